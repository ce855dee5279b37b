// The derivative of one step of one layer and direction, T = 1: gate gradients from saved
// activations. All products are left to GEMMs: for the gradients of the weights and of x, as after
// a loop, and one more for the gradient of h before the step, which is added to what stands there.
//
// A block owns a group of 8 units in all rows of the batch; its warps take tiles of 8 rows in turn.

#include "device.cuh"
#include "overlap.cuh"
#include "saved.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int SUMS = PLANES + VECTORS;        // over rows, of a unit
constexpr int RESULTS = 2 * GATES + VECTORS;  // of a unit: gradients of its biases and vectors

// The gradients of the states of a cell after the step.
INLINE void load_gradients(const StepBackwardArgs& args, int64 b, int unit,
                           float (&d_after)[STATES]) {
    const int64 at = b * args.hidden + unit;
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        d_after[k] = args.d_final[k] ? widen(args.d_final[k][at]) : 0.0f;
        if (args.d_all_states[k]) d_after[k] += widen(args.d_all_states[k][at]);
    }
    if (args.dy) d_after[0] += widen(args.dy[b * args.dy_row + unit]);
}

// Writes the gradients of a unit in one row, and adds them to the sums of the unit.
INLINE void derive_row(const StepBackwardArgs& args, int64 b, int unit,
                       const float (&values)[ACTIVATIONS + 4], const float (&vectors)[VECTORS + 1],
                       float (&sums)[SUMS]) {
    float factor[FACTORS + 1], d_after[STATES], d_gates[PLANES], d_before[STATES];
    float d_vectors[VECTORS + 1];
    load_gradients(args, b, unit, d_after);
    factors(values, vectors, factor);
    derivative(factor, d_after, d_gates, d_before, d_vectors);
    #pragma unroll
    for (int p = 0; p < PLANES; ++p) {
        args.d_gates[(b * PLANES + p) * args.hidden + unit] = narrow(d_gates[p]);
        sums[p] += d_gates[p];
    }
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) sums[PLANES + v] += d_vectors[v];
    #pragma unroll
    for (int k = 0; k < STATES; ++k)
        if (args.d_initial[k]) args.d_initial[k][b * args.hidden + unit] = narrow(d_before[k]);
}

// A gradient that is a sum over rows: of a gate's bias, of its recurrent bias, or of a vector.
struct Result {
    storage_t* target;  // of all units, or null
    int place;          // among the sums

    INLINE Result(const StepBackwardArgs& args, int index) {
        const int gate = index % GATES;
        storage_t* matrix = args.d_vectors;
        int row = index - 2 * GATES;
        place = PLANES + row;
        if (index < GATES) {
            matrix = args.input_bias, row = gate;
            place = int(args.left >> 4 * gate) & 15;
        } else if (index < 2 * GATES) {
            matrix = args.recurrent_bias, row = gate;
            place = PLANES - GATES + (int(args.right >> 4 * gate) & 15);
        }
        target = matrix ? matrix + row * args.hidden : nullptr;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
step_backward(const __grid_constant__ StepBackwardArgs args) {
    __shared__ float parts[WARPS][SUMS][8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int groups = int(args.hidden) / 8, group = blockIdx.x;
    const int unit = group * 8 + (lane >> 2);
    overlap_launches();
    float vectors[VECTORS + 1], sums[SUMS] = {};
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) vectors[v] = widen(args.vectors[v * args.hidden + unit]);
    const SavedPlace place(lane);
    for (int64 tile = warp; tile * 8 < args.batch; tile += WARPS) {
        float values[2][ACTIVATIONS + 4];
        load_saved(reinterpret_cast<const unsigned char*>(
                       args.saved + (tile * groups + group) * (64 * SAVED)), place, values);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int64 b = tile * 8 + (lane & 3) * 2 + c;
            if (b < args.batch) derive_row(args, b, unit, values[c], vectors, sums);
        }
    }
    #pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        const float sum = sum_over_rows(sums[i]);
        if ((lane & 3) == 0) parts[warp][i][lane >> 2] = sum;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < RESULTS * 8; at += THREADS) {
        const Result result(args, at / 8);
        if (!result.target) continue;
        float sum = 0.0f;
        #pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += parts[w][result.place][at % 8];
        result.target[group * 8 + at % 8] = narrow(sum);
    }
}
