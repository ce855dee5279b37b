// A copy of a sequence with zeros in rows past their lengths, where x may hold NaN, or masked.

#include "device.cuh"

// A thread copies 16 bytes of a row or, where rows are not made of such, one value.
extern "C" __global__ void mask_rows(const __grid_constant__ MaskRowsArgs args) {
    const int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64 piece = args.width / args.pieces;  // values
    if (number >= args.steps * args.batch * args.pieces) return;
    const int64 line = number / args.pieces, t = line / args.batch, b = line % args.batch;
    const int64 from = t * args.x_step + b * args.x_row + number % args.pieces * piece;
    const int64 to = number * piece;
    const bool live = !(args.lengths && t >= args.lengths[b]) && !(args.mask && args.mask[line]);
    if (piece > 1)
        *reinterpret_cast<uint4*>(args.out + to) =
            live ? *reinterpret_cast<const uint4*>(args.x + from) : make_uint4(0, 0, 0, 0);
    else
        args.out[to] = live ? args.x[from] : storage_t(0);
}
