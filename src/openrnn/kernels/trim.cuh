// A sequence with zeros past its rows' lengths, where it may hold nan.

#include "device.cuh"

// a thread copies 16 bytes of a row, or, where rows are not made of such, one element
extern "C" __global__ void trim(
    const stored* __restrict__ x,      // [T, B, width], by the strides below
    stored* __restrict__ out,          // [T, B, width]
    const wide* __restrict__ lengths,  // [B]
    wide steps, wide batch, wide width, wide step, wide row, wide pieces
) {
    const wide number = wide(blockIdx.x) * blockDim.x + threadIdx.x, each = width / pieces;
    if (number >= steps * batch * pieces) return;
    const wide t = number / pieces / batch, b = number / pieces % batch;
    const wide from = t * step + b * row + number % pieces * each, to = number * each;
    const bool live = t < lengths[b];
    if (each > 1)
        *reinterpret_cast<uint4*>(out + to) =
            live ? *reinterpret_cast<const uint4*>(x + from) : make_uint4(0, 0, 0, 0);
    else
        out[to] = live ? x[from] : stored(0);
}
