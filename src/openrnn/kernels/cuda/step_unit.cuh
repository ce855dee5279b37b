// The cell of one step, T = 1: what a lane reads and writes of a unit in two rows of the batch.

#include "device.cuh"
#include "overlap.cuh"
#include "saved.cuh"
#include "unit_constants.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int MMA_ROWS = (GATES + 1) / 2;  // fragments: 8 units of one gate and of the next

// Where a lane has the product of a gate in row c of two, among the values of its fragments.
INLINE constexpr int product_place(int gate, int c) { return gate / 2 * 4 + gate % 2 * 2 + c; }

INLINE bool is_reset(const StepForwardArgs& args, int64 b) { return args.reset && args.reset[b]; }

// State k of a row before the step, (B, units), or null for zeros.
INLINE const storage_t* state_before(const StepForwardArgs& args, int k, int64 b) {
    return is_reset(args, b) ? args.reset_state[k] : args.initial[k];
}

// A unit in two rows of a tile: what the cell reads besides the products.
struct Cells {
    UnitConstants constants;
    float given[GATES][2];   // input side of the gates, where there is no W_ih
    float state[2][STATES];  // before the step

    INLINE void load(const StepForwardArgs& args, int unit, int64 first_row) {
        constants.load(args, unit, true);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int64 b = first_row + c;
            const bool inside = b < args.batch;
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
                given[gate][c] = inside && !args.w_ih
                    ? widen(args.x[b * args.x_row + gate * args.x_gate + unit]) : 0.0f;
            #pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const storage_t* source = inside ? state_before(args, k, b) : nullptr;
                state[c][k] = source ? widen(source[b * args.hidden + unit]) : 0.0f;
            }
        }
    }
};

// Applies the cell to a unit in row c of two; saved: activations for backward.
INLINE void step_row(const StepForwardArgs& args, const Cells& cells, int c, int64 b, int unit,
                     const float (&x_sums)[MMA_ROWS * 4], const float (&h_sums)[MMA_ROWS * 4],
                     float (&saved)[ACTIVATIONS + 4]) {
    float left[GATES], right[GATES], after[STATES];
    #pragma unroll
    for (int gate = 0; gate < GATES; ++gate) {
        const int at = product_place(gate, c);
        const float given = cells.given[gate][c] + x_sums[at];
        left[gate] = given + cells.constants.bias_x[gate];
        right[gate] = h_sums[at] + cells.constants.start(gate, given);
    }
    step(left, right, cells.state[c], cells.constants.vectors, after, saved);
    if (b >= args.batch) return;
    args.y[b * args.y_row + unit] = narrow(after[0]);
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        const int64 at = b * args.hidden + unit;
        args.final[k][at] = narrow(after[k]);
        if (args.all_states[k]) args.all_states[k][at] = narrow(after[k]);
    }
}
