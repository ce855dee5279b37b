// A matrix of weights in another order of axes and gates, with zeros up to a multiple of 8 units.

#include "device.cuh"

// out[i, j, k] = matrix[i * step0 + j * step1 + k * step2] inside the limits, 0 outside; i or j, as
// `gates` says, counts gates, and `order` names with 4 bits each the gate that stands at its places
extern "C" __global__ void arrange(
    const stored* __restrict__ matrix,
    stored* __restrict__ out,          // [size0, size1, size2]
    wide size0, wide size1, wide size2, wide limit0, wide limit1, wide limit2,
    wide step0, wide step1, wide step2, wide gates, wide order
) {
    const wide number = wide(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number >= size0 * size1 * size2) return;
    wide i = number / (size1 * size2), j = number / size2 % size1;
    const wide k = number % size2;
    const bool inside = i < limit0 && j < limit1 && k < limit2;
    if (gates == 0) i = (order >> (4 * i)) & 15;
    else j = (order >> (4 * j)) & 15;
    out[number] = inside ? matrix[i * step0 + j * step1 + k * step2] : stored(0);
}
