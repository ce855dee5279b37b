// A sequence with rows of zeros: past the rows' lengths, where it may hold nan, or where it is masked.

#include "device.cuh"

// a thread copies 16 bytes of a row, or, where rows are not made of such, one element
extern "C" __global__ void mask_rows(const __grid_constant__ MaskRowsArgs args) {
    const int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x, each = args.width / args.pieces;
    if (number >= args.steps * args.batch * args.pieces) return;
    const int64 line = number / args.pieces, t = line / args.batch, b = line % args.batch;
    const int64 from = t * args.x_step + b * args.x_row + number % args.pieces * each, to = number * each;
    const bool live = !(args.lengths && t >= args.lengths[b]) && !(args.mask && args.mask[line]);
    if (each > 1)
        *reinterpret_cast<uint4*>(args.out + to) =
            live ? *reinterpret_cast<const uint4*>(args.x + from) : make_uint4(0, 0, 0, 0);
    else
        args.out[to] = live ? args.x[from] : storage_t(0);
}
