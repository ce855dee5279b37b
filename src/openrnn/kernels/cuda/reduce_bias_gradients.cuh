// The gradients of biases and per-unit vectors from the float32 sums that the backward loop leaves.

#include "device.cuh"

// Block b is block b / STRUCTS of those that work for struct b % STRUCTS.
struct ReduceBiasGradientsStructs {
    ReduceBiasGradientsArgs each[STRUCTS];
};

// A thread adds up one unit of a gate's bias, of its recurrent bias, or of a per-unit vector,
// always in the same order. `left` and `right` have 4 bits for each gate: its plane on that side.
extern "C" __global__ void reduce_bias_gradients(
    const __grid_constant__ ReduceBiasGradientsStructs given
) {
    const ReduceBiasGradientsArgs& args = given.each[blockIdx.x % STRUCTS];
    const int64 number = int64(blockIdx.x / STRUCTS) * blockDim.x + threadIdx.x;
    const int64 row = number / args.hidden, unit = number % args.hidden;
    if (row >= 2 * args.gates + args.vectors) return;
    storage_t* out = args.unit_vectors + (row - 2 * args.gates) * args.hidden;
    int64 plane = args.planes + row - 2 * args.gates;
    if (row < args.gates) {
        if (!args.input_bias) return;
        out = args.input_bias + row * args.hidden;
        plane = (args.left >> (4 * row)) & 15;
    } else if (row < 2 * args.gates) {
        if (!args.recurrent_bias) return;
        out = args.recurrent_bias + (row - args.gates) * args.hidden;
        plane = args.planes - args.gates + ((args.right >> (4 * (row - args.gates))) & 15);
    }
    const int64 part_size = (args.planes + args.vectors) * args.units;
    const float* from = args.sums + plane * args.units + unit;
    float total = 0.0f;
    #pragma unroll 8
    for (int64 part = 0; part < args.parts; ++part) total += from[part * part_size];
    out[unit] = narrow(total);
}
