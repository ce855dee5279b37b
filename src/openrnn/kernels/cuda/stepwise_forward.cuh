// One step of a forward loop that holds no R. A GEMM has multiplied h by R before. What other loops
// keep in registers from step to step lies in memory: states, and h as the next GEMM reads it.
// Step -1 writes the first of both.
//
// A warp takes 8 units in a tile of 8 rows of the batch; a block has WARPS such tiles of the same
// units.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"
#include "forward_cell.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;

// Writes what the next step begins with.
INLINE void store_states(const ForwardArgs& args, int64 b, int unit, const float (&state)[STATES]) {
    const int64 at = b * args.hidden + unit, cells = args.batch * args.hidden;
    #pragma unroll
    for (int k = 0; k < STATES; ++k) args.carried[k * cells + at] = state[k];
    args.h[b * UNITS + unit] = narrow(state[0]);
}

// The states of a row before the first step.
INLINE void begin_row(const ForwardArgs& args, int count, int64 b, int unit) {
    float state[STATES];
    #pragma unroll
    for (int k = 0; k < STATES; ++k) state[k] = first_state_inline(args, count, k, b, unit);
    store_states(args, b, unit, state);
}

// A unit's step i in row b of the batch. saved: activations for backward.
INLINE void step_row(const ForwardArgs& args, const UnitConstants& constants, const Time& time,
                     int i, int64 b, int unit, float (&saved)[ACTIVATIONS + 4]) {
    const int t = time.first + time.direction * i;
    const int64 at = b * args.hidden + unit, cells = args.batch * args.hidden;
    const storage_t* const x = advanced(args.x, (time.to_first + i) * args.x_step_bytes) +
                               b * args.x_row + unit;
    float left[GATES], right[GATES], state[STATES], after[STATES];
    #pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
        const float given = widen(x[gate * args.x_gate]);
        left[gate] = given + constants.bias_x[gate];
        right[gate] = constants.start(gate, given) +
                      args.products[(b * GATES + gate) * UNITS + unit];
    }
    #pragma unroll
    for (int k = 0; k < STATES; ++k) state[k] = args.carried[k * cells + at];
    step(left, right, state, constants.vectors, after, saved);
    const int length = LENGTHS ? int(args.lengths[b]) : time.count;
    const bool live = t < length;
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (live) state[k] = after[k];
        if (ALL_STATES && live) args.all_states[k][t * cells + at] = narrow(after[k]);
    }
    advanced(args.y, (time.to_first + i) * args.y_step_bytes)[b * args.y_row + unit] =
        narrow(live ? after[0] : 0.0f);
    const int next = args.reverse ? t : t + 1;  // whose reset comes before the loop's next step
    if (RESET && next < length && args.reset[next * args.batch + b])
        load_states(state, args.reset_state, b, unit, args.hidden);
    if (i + 1 < time.count)
        store_states(args, b, unit, state);
    else
        #pragma unroll
        for (int k = 0; k < STATES; ++k)
            store_end(args.chunk_out, args.final[k], k * cells, at, state[k]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs args) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, i = int(args.step);
    const int group = blockIdx.x % GROUPS, unit = group * 8 + (lane >> 2);  // of the lane
    const int64 tile = int64(blockIdx.x / GROUPS) * WARPS + warp;
    const int64 own_row = tile * 8 + (lane & 3) * 2;
    if (tile * 8 >= args.batch) return;

    const bool inside = !PADDED || unit < args.hidden;
    const Time time(args, int(args.steps));
    UnitConstants constants;
    constants.load(args, unit, inside);
    float saved[2][ACTIVATIONS + 4] = {};
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (own_row + c >= args.batch) continue;
        const int64 b = row_of<LENGTHS>(args, own_row + c);
        if (!inside)
            args.h[b * UNITS + unit] = 0;
        else if (i < 0)
            begin_row(args, time.count, b, unit);
        else
            step_row(args, constants, time, i, b, unit, saved[c]);
    }
    if (SAVE && i >= 0)
        store_saved(advanced(args.saved, (time.to_first + i) * args.saved_step_bytes) +
                        (tile * GROUPS + group) * (64 * SAVED) + saved_offset(lane),
                    SavedPlace(lane).rest, saved);
}
