// Sets all bits of a flag buffer: "not arrived yet", a NaN that no kernel writes.

#include "device.cuh"

// A thread sets 16 bytes of a row.
extern "C" __global__ void fill_flags(const __grid_constant__ FillFlagsArgs args) {
    const int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64 row = number / args.pieces;
    if (row >= args.rows) return;
    char* to = reinterpret_cast<char*>(args.buffer) + row * args.row_bytes;
    reinterpret_cast<uint4*>(to)[number % args.pieces] = make_uint4(~0u, ~0u, ~0u, ~0u);
}
