// The rows of a batch by falling length, in one launch: `argsort` takes eight, felt in short calls.

#include "device.cuh"

// A row's place is the number of rows before it: the longer ones, and earlier ones of its length.
extern "C" __global__ void sort_lengths(const __grid_constant__ SortLengthsArgs args) {
    __shared__ int64 others[BLOCK_THREADS];
    const int64 row = int64(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
    const int64 length = row < args.batch ? args.lengths[row] : 0;
    int before = 0;
    for (int64 first = 0; first < args.batch; first += BLOCK_THREADS) {
        const int64 other = first + threadIdx.x;
        others[threadIdx.x] = other < args.batch ? args.lengths[other] : -1;
        __syncthreads();
        for (int j = 0; j < BLOCK_THREADS; ++j)
            before += others[j] > length || (others[j] == length && first + j < row);
        __syncthreads();
    }
    if (row < args.batch) args.order[before] = row;
}
