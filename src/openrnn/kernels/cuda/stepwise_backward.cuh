// The derivative of one step of a loop that holds no R. A GEMM has multiplied the gate
// gradients of the step before by R, which gives their part of dh. Gradients of states lie in
// memory from step to step. The launch after the last step writes those of the first states.
//
// A warp takes 8 units in a tile of 8 rows of the batch; a block has WARPS such tiles of the same
// units, and adds their gradients up to its part of the sums over steps and rows.

#include "device.cuh"
#include "saved.cuh"
#include "backward_cell.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int SUMS = PLANES + VECTORS;  // over rows, of a unit

// A unit in one row: gradients of its states after the step, and of reset states so far.
struct Gradients {
    float state[STATES], reset[RESET_STATE ? STATES : 1];

    // before step i, with what the GEMM made of the step before
    INLINE void load(const BackwardArgs& args, int i, int64 b, int unit) {
        const int64 at = b * args.hidden + unit, cells = args.batch * args.hidden;
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            state[k] = i > 0 ? args.carried[k * cells + at] : final_gradient(args, k, cells, at);
            if (RESET_STATE)
                reset[RESET_STATE ? k : 0] = i > 0 ? args.carried[(STATES + k) * cells + at] : 0.0f;
        }
        if (i > 0) state[0] += args.products[b * UNITS + unit];
    }
    INLINE void store(const BackwardArgs& args, int64 at) const {
        const int64 cells = args.batch * args.hidden;
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            args.carried[k * cells + at] = state[k];
            if (RESET_STATE) args.carried[(STATES + k) * cells + at] = reset[RESET_STATE ? k : 0];
        }
    }
};

// Step i of a unit in row b. values: saved activations; d_gates: zeros where the row has ended.
INLINE void derive_row(const BackwardArgs& args, const Time& time, int i, int64 b, int unit,
                       const float (&values)[ACTIVATIONS + 4], const float (&vectors)[VECTORS + 1],
                       float (&d_gates)[PLANES], float (&sums)[SUMS]) {
    const int t = time.first + time.direction * i, length = time.length(args, int(b));
    const int64 at = b * args.hidden + unit;
    Gradients found;
    found.load(args, i, b, unit);
    const int later = args.reverse ? t : t + 1;  // whose reset came after forward's step
    if (RESET && later < length && args.reset[later * args.batch + b])
        end_at_reset(found.state, found.reset);
    if (t < length) {
        float factor[FACTORS + 1], d_after[STATES], d_vectors[VECTORS + 1];
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            d_after[k] = found.state[k];
            if (ALL_STATES && args.d_all_states[k])
                d_after[k] += widen(args.d_all_states[k][t * args.batch * args.hidden + at]);
        }
        if (args.dy)
            d_after[0] += widen(advanced(args.dy, (time.to_first + i) * args.dy_step_bytes)
                                    [b * args.dy_row + unit]);
        factors(values, vectors, factor);
        derivative(factor, d_after, d_gates, found.state, d_vectors);
        add_up(sums, d_gates, d_vectors);
    }
    found.store(args, at);
}

// The gradients of the first states of a unit in row b.
INLINE void finish_row(const BackwardArgs& args, const Time& time, int64 b, int unit) {
    Gradients found;
    found.load(args, time.count, b, unit);
    const bool replaced =
        RESET && !args.reverse && time.length(args, int(b)) > 0 && args.reset[b];
    store_first(args, found.state, found.reset, replaced, args.batch * args.hidden,
                b * args.hidden + unit);
}

// Adds the block's sums of its units to those of the steps before; part: of the rows.
INLINE void add_to_sums(const BackwardArgs& args, int i, int64 part, int group, int lane, int warp,
                        const float (&sums)[SUMS]) {
    __shared__ float parts[WARPS][SUMS][8];
    #pragma unroll
    for (int p = 0; p < SUMS; ++p) {
        const float sum = sum_over_rows(sums[p]);
        if ((lane & 3) == 0) parts[warp][p][lane >> 2] = sum;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < SUMS * 8; at += THREADS) {
        float* const target = args.sums + (part * SUMS + at / 8) * UNITS + group * 8 + at % 8;
        float sum = i > 0 ? *target : 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w][at / 8][at % 8];
        *target = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs args) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, i = int(args.step);
    const int group = blockIdx.x % GROUPS, unit = group * 8 + (lane >> 2);  // of the lane
    const int64 part = blockIdx.x / GROUPS, tile = part * WARPS + warp;
    const int64 own_row = tile * 8 + (lane & 3) * 2;
    const bool inside = !PADDED || unit < args.hidden;
    const Time time(args, int(args.steps));
    if (i == time.count) {
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            if (inside && own_row + c < args.batch)
                finish_row(args, time, row_of<LENGTHS>(args, own_row + c), unit);
        return;
    }
    float vectors[VECTORS + 1], values[2][ACTIVATIONS + 4], sums[SUMS] = {};
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v)
        vectors[v] = inside ? widen(args.vectors[v * args.hidden + unit]) : 0.0f;
    if (tile * 8 < args.batch)
        load_saved(reinterpret_cast<const unsigned char*>(
                       advanced(args.saved, (time.to_first + i) * args.saved_step_bytes) +
                       (tile * GROUPS + group) * (64 * SAVED)),
                   SavedPlace(lane), values);
    storage_t* const target = advanced(args.d_gates, (time.to_first + i) * args.d_gates_step_bytes);
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (own_row + c >= args.batch) continue;
        const int64 b = row_of<LENGTHS>(args, own_row + c);
        float d_gates[PLANES] = {};
        if (inside) derive_row(args, time, i, b, unit, values[c], vectors, d_gates, sums);
        #pragma unroll
        for (int p = 0; p < PLANES; ++p)
            target[(b * PLANES + p) * UNITS + unit] = narrow(d_gates[p]);
    }
    add_to_sums(args, i, part, group, lane, warp, sums);
}
