// A sequence with rows of zeros: past the rows' lengths, where it may hold nan, or where it is masked.

#include "device.cuh"

// a thread copies 16 bytes of a row, or, where rows are not made of such, one element
extern "C" __global__ void blank(
    const stored* __restrict__ x,            // [T, B, width], by the strides below
    stored* __restrict__ out,                // [T, B, width]
    const wide* __restrict__ lengths,        // [B], or null
    const unsigned char* __restrict__ mask,  // [T, B], or null
    wide steps, wide batch, wide width, wide step, wide row, wide pieces
) {
    const wide number = wide(blockIdx.x) * blockDim.x + threadIdx.x, each = width / pieces;
    if (number >= steps * batch * pieces) return;
    const wide line = number / pieces, t = line / batch, b = line % batch;
    const wide from = t * step + b * row + number % pieces * each, to = number * each;
    const bool live = !(lengths && t >= lengths[b]) && !(mask && mask[line]);
    if (each > 1)
        *reinterpret_cast<uint4*>(out + to) =
            live ? *reinterpret_cast<const uint4*>(x + from) : make_uint4(0, 0, 0, 0);
    else
        out[to] = live ? x[from] : stored(0);
}
