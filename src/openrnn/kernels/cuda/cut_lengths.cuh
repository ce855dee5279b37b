// The lengths of a batch within a chunk of time, counted from its first step.

#include "device.cuh"

// A thread has one row.
extern "C" __global__ void cut_lengths(const __grid_constant__ CutLengthsArgs args) {
    const int64 row = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= args.batch) return;
    const int64 left = args.lengths[row] - args.begin;
    args.inside[row] = left < 0 ? 0 : left > args.steps ? args.steps : left;
}
