// Weights with their gates in another order, transposed or not, padded to a multiple of 8 units.

#include "device.cuh"

constexpr int LINES = 256 / TILE;  // of TILE values that 256 threads move at a time
static_assert(256 % TILE == 0 && TILE % LINES == 0, "a block moves whole rows, and all of them");

// From matrix [gates, hidden, columns] to out [gates, units, columns] or, transposed, [across,
// gates, units]. A block moves one tile of one gate through shared memory; `order` has 4 bits for
// each place in out: the gate of matrix that belongs there.
extern "C" __global__ void permute_weights(const __grid_constant__ PermuteWeightsArgs args) {
    __shared__ storage_t tile[TILE][TILE + 4 / SIZE];  // padded: a column meets no bank twice
    const uint32 side = uint32((args.across + TILE - 1) / TILE);  // tiles of a gate
    const uint32 down = uint32((args.units + TILE - 1) / TILE);
    const int64 first_column = blockIdx.x % side * TILE;
    const int64 first_unit = blockIdx.x / side % down * TILE;
    const int64 gate = blockIdx.x / side / down, from = args.order >> (4 * gate) & 15;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const int64 unit = first_unit + line, column = first_column + x;
        const bool inside = unit < args.hidden && column < args.columns;
        tile[line][x] = inside ? args.matrix[(from * args.hidden + unit) * args.columns + column]
                               : storage_t(0);
    }
    __syncthreads();
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const int64 unit = first_unit + (args.turned ? x : line);
        const int64 column = first_column + (args.turned ? line : x);
        if (unit >= args.units || column >= args.across) continue;
        if (args.turned)
            args.out[(column * args.gates + gate) * args.units + unit] = tile[x][line];
        else
            args.out[(gate * args.units + unit) * args.columns + column] = tile[line][x];
    }
}
