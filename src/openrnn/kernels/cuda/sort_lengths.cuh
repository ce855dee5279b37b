// The rows of a batch by falling length, in one launch: `argsort` takes eight, felt in short calls.

#include "device.cuh"

// order[k] = the row of which k others come first: the longer ones, and of equal ones the earlier
extern "C" __global__ void sort_lengths(const __grid_constant__ SortLengthsArgs args) {
    __shared__ int64 some[256];
    const int64 here = int64(blockIdx.x) * 256 + threadIdx.x;
    const int64 mine = here < args.batch ? args.lengths[here] : 0;
    int before = 0;
    for (int64 first = 0; first < args.batch; first += 256) {
        const int64 other = first + threadIdx.x;
        some[threadIdx.x] = other < args.batch ? args.lengths[other] : -1;
        __syncthreads();
        for (int j = 0; j < 256; ++j)
            before += some[j] > mine || (some[j] == mine && first + j < here);
        __syncthreads();
    }
    if (here < args.batch) args.order[before] = here;
}
