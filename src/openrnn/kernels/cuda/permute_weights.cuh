// Weights with their gates in another order, transposed or not, padded to more units and columns;
// or any matrix transposed, as one gate.

#include "device.cuh"

constexpr int LINES = BLOCK_THREADS / TILE;  // of TILE values that a block moves, one a thread
static_assert(BLOCK_THREADS % TILE == 0 && TILE % LINES == 0,
              "a block moves whole rows, and all of them");
constexpr int PIECES = TILE / PIECE;  // of a line
constexpr int LINES_OF_PIECES = BLOCK_THREADS / PIECES;  // that a block moves, a piece a thread
static_assert(TILE % LINES_OF_PIECES == 0, "a block moves all lines of a tile");
static_assert((PIECES & PIECES - 1) == 0, "place_of swaps pieces by bits of their numbers");

// What a block moves: a tile of one gate.
struct Part {
    int64 unit, column;  // the first of the tile
    int64 gate, from;    // of out, of matrix
};

// Where a piece of a line lies in shared memory. Pieces of one column meet no bank twice, but in
// float32, where lines are twice as wide as all banks, each bank twice.
INLINE int place_of(int line, int piece) {
    return line * TILE + (piece ^ line / PIECE % PIECES) * PIECE;
}

// A piece at any address, of which the first `values` exist: zeros after them. Both loads are of
// aligned 16 bytes that hold one of these values at least.
INLINE uint4 load_piece(const storage_t* source, int64 values) {
    if (values <= 0) return make_uint4(0, 0, 0, 0);
    const int bytes = int(min(values, int64(PIECE))) * SIZE;
    const int shift = int(reinterpret_cast<int64>(source) & 15);
    const uint4* const first = reinterpret_cast<const uint4*>(
        reinterpret_cast<const unsigned char*>(source) - shift);
    const uint4 low = first[0];
    const uint4 high = shift + bytes > 16 ? first[1] : make_uint4(0, 0, 0, 0);
    if (shift == 0 && bytes == 16) return low;
    uint32 words[9] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w, 0};
    #pragma unroll
    for (int i = 0; i < 8; ++i) words[i] = shift & 4 ? words[i + 1] : words[i];
    #pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = shift & 8 ? words[i + 2] : words[i];
    uint32 found[4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int left = bytes - 4 * i;  // 2 are half a word
        const uint32 word = __funnelshift_r(words[i], words[i + 1], (shift & 3) * 8);
        found[i] = left >= 4 ? word : left == 2 ? word & 0xffff : 0;
    }
    return make_uint4(found[0], found[1], found[2], found[3]);
}

// 16 bytes at a time: rows of out are multiples of that.
INLINE void move_pieces(const PermuteWeightsArgs& args, const Part& part, storage_t* tile) {
    const int first_line = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    #pragma unroll
    for (int line = first_line; line < TILE; line += LINES_OF_PIECES) {
        const int64 unit = part.unit + line, column = part.column + piece * PIECE;
        const uint4 values =
            load_piece(args.matrix + (part.from * args.hidden + unit) * args.row + column,
                       unit < args.hidden ? args.columns - column : 0);
        if (args.transposed)
            *reinterpret_cast<uint4*>(tile + place_of(line, piece)) = values;
        else if (unit < args.units && column < args.across)
            *reinterpret_cast<uint4*>(
                args.out + (part.gate * args.units + unit) * args.across + column) = values;
    }
    if (!args.transposed) return;
    __syncthreads();
    #pragma unroll
    for (int line = first_line; line < TILE; line += LINES_OF_PIECES) {
        const int64 unit = part.unit + piece * PIECE, column = part.column + line;
        if (unit >= args.units || column >= args.across) continue;
        alignas(16) storage_t values[PIECE];
        #pragma unroll
        for (int i = 0; i < PIECE; ++i)
            values[i] = tile[place_of(piece * PIECE + i, line / PIECE) + line % PIECE];
        *reinterpret_cast<uint4*>(
            args.out + (column * args.gates + part.gate) * args.units + unit) =
            *reinterpret_cast<const uint4*>(values);
    }
}

// One value at a time, not transposed: for rows of out that are no multiple of 16 bytes.
INLINE void move_values(const PermuteWeightsArgs& args, const Part& part) {
    const int64 column = part.column + threadIdx.x % TILE;
    #pragma unroll 8
    for (int line = threadIdx.x / TILE; line < TILE; line += LINES) {
        const int64 unit = part.unit + line;
        if (unit >= args.units || column >= args.across) continue;
        args.out[(part.gate * args.units + unit) * args.across + column] =
            unit < args.hidden && column < args.columns
            ? args.matrix[(part.from * args.hidden + unit) * args.row + column]
            : storage_t(0);
    }
}

// Block b is block b / STRUCTS of those that move the matrix of struct b % STRUCTS.
struct PermuteWeightsStructs {
    PermuteWeightsArgs each[STRUCTS];
};

// From matrix [gates, hidden, columns] to out [gates, units, across] or, transposed, [across,
// gates, units]. A block moves one tile of one gate; `order` has 4 bits for each place in out: the
// gate of matrix that belongs there.
extern "C" __global__ void permute_weights(const __grid_constant__ PermuteWeightsStructs given) {
    __shared__ alignas(16) storage_t tile[TILE * TILE];
    const PermuteWeightsArgs& args = given.each[blockIdx.x % STRUCTS];
    const uint32 block = blockIdx.x / STRUCTS;
    const uint32 side = uint32((args.across + TILE - 1) / TILE);  // tiles of a gate
    const uint32 down = uint32((args.units + TILE - 1) / TILE);
    const int64 gate = block / side / down;
    const Part part{block / side % down * TILE, block % side * TILE, gate,
                    args.order >> (4 * gate) & 15};
    // rows of out: units are a multiple of 8
    if (args.transposed || args.across * SIZE % 16 == 0)
        move_pieces(args, part, tile);
    else
        move_values(args, part);
}
