// The gradients of biases and unit vectors from the float32 sums that backward leaves.

#include "device.cuh"

// a thread adds up one unit of a gate's bias, of its recurrent bias, or of a unit vector, always in
// the same order; `left` and `right` name with 4 bits each the plane of a gate on its side
extern "C" __global__ void finish(
    const float* __restrict__ sums,      // [parts, planes + vectors, units]
    stored* __restrict__ input_bias,     // [gates, hidden], or null
    stored* __restrict__ recurrent_bias, // [gates, hidden], or null
    stored* __restrict__ unit_vectors,   // [vectors, hidden]
    wide parts, wide planes, wide gates, wide vectors, wide units, wide hidden,
    wide left, wide right
) {
    const wide number = wide(blockIdx.x) * blockDim.x + threadIdx.x;
    const wide row = number / hidden, unit = number % hidden;
    if (row >= 2 * gates + vectors) return;
    stored* out = unit_vectors + (row - 2 * gates) * hidden;
    wide plane = planes + row - 2 * gates;
    if (row < gates) {
        if (!input_bias) return;
        out = input_bias + row * hidden;
        plane = (left >> (4 * row)) & 15;
    } else if (row < 2 * gates) {
        if (!recurrent_bias) return;
        out = recurrent_bias + (row - gates) * hidden;
        plane = planes - gates + ((right >> (4 * (row - gates))) & 15);
    }
    const float* from = sums + plane * units + unit;
    float total = 0.0f;
    #pragma unroll 8
    for (wide part = 0; part < parts; ++part) total += from[part * (planes + vectors) * units];
    out[unit] = narrow(total);
}
