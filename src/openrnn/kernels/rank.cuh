// The rows of a batch by falling length, in one launch: `argsort` takes eight, felt in short calls.

#include "device.cuh"

// order[k] = the row of which k others come first: the longer ones, and of equal ones the earlier
extern "C" __global__ void rank(
    const wide* __restrict__ lengths,  // [B]
    wide* __restrict__ order,          // [B]
    wide batch
) {
    __shared__ wide some[256];
    const wide here = wide(blockIdx.x) * 256 + threadIdx.x;
    const wide mine = here < batch ? lengths[here] : 0;
    int before = 0;
    for (wide first = 0; first < batch; first += 256) {
        const wide other = first + threadIdx.x;
        some[threadIdx.x] = other < batch ? lengths[other] : -1;
        __syncthreads();
        for (int j = 0; j < 256; ++j)
            before += some[j] > mine || (some[j] == mine && first + j < here);
        __syncthreads();
    }
    if (here < batch) order[before] = here;
}
