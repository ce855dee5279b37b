// A dense copy of a sequence by its strides, with zeros in columns past its own, and in rows past
// their lengths, where x may hold NaN, or masked.

#include "device.cuh"

// Numbers of 32 bits divide several times as fast.
__device__ int64 quotient(int64 a, int64 b) {
    return (a | b) >> 32 ? a / b : int64(uint32(a) / uint32(b));
}

// A piece of a row, or zeros.
template <class Piece>
__device__ void copy_piece(storage_t* out, const storage_t* x, bool live) {
    *reinterpret_cast<Piece*>(out) = live ? *reinterpret_cast<const Piece*>(x) : Piece{};
}

// Block b is block b / STRUCTS of those that work for struct b % STRUCTS.
struct CopyRowsStructs {
    CopyRowsArgs each[STRUCTS];
};

// A thread copies a piece of a row. Its bytes are the largest power of two, up to 16, that divides
// addresses, widths and strides.
extern "C" __global__ void copy_rows(const __grid_constant__ CopyRowsStructs given) {
    const CopyRowsArgs& args = given.each[blockIdx.x % STRUCTS];
    const int64 number = int64(blockIdx.x / STRUCTS) * blockDim.x + threadIdx.x;
    const int64 piece = args.out_width / args.pieces;  // values
    if (number >= args.steps * args.batch * args.pieces) return;
    const int64 line = quotient(number, args.pieces), t = quotient(line, args.batch);
    const int64 b = line - t * args.batch, column = (number - line * args.pieces) * piece;
    storage_t* const out = args.out + number * piece;
    const storage_t* const x = args.x + t * args.x_step + b * args.x_row + column;
    const bool live = column < args.width && !(args.lengths && t >= args.lengths[b]) &&
                      !(args.mask && args.mask[line]);
    switch (piece * SIZE) {
        case 16: copy_piece<uint4>(out, x, live); break;
        case 8: copy_piece<uint2>(out, x, live); break;
        case 4: copy_piece<uint32>(out, x, live); break;
        default: copy_piece<storage_t>(out, x, live);
    }
}
