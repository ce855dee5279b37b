// A dense copy of a sequence by its strides, with zeros in columns past its own, and in rows past
// their lengths, where x may hold NaN, or masked.

#include "device.cuh"

// Numbers of 32 bits divide several times as fast.
__device__ int64 quotient(int64 a, int64 b) {
    return (a | b) >> 32 ? a / b : int64(uint32(a) / uint32(b));
}

// A thread copies 16 bytes of a row or, where rows are not made of such, one value.
extern "C" __global__ void copy_rows(const __grid_constant__ CopyRowsArgs args) {
    const int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64 piece = args.out_width / args.pieces;  // values
    if (number >= args.steps * args.batch * args.pieces) return;
    const int64 line = quotient(number, args.pieces), t = quotient(line, args.batch);
    const int64 b = line - t * args.batch, column = (number - line * args.pieces) * piece;
    const int64 to = number * piece;
    const int64 from = t * args.x_step + b * args.x_row + column;
    const bool live = column < args.width && !(args.lengths && t >= args.lengths[b]) &&
                      !(args.mask && args.mask[line]);
    if (piece > 1)
        *reinterpret_cast<uint4*>(args.out + to) =
            live ? *reinterpret_cast<const uint4*>(args.x + from) : make_uint4(0, 0, 0, 0);
    else
        args.out[to] = live ? args.x[from] : storage_t(0);
}
