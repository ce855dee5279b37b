// A matrix of weights with gates in another order, turned or not, with zeros up to a multiple of 8 units.

#include "device.cuh"

constexpr int LINES = 256 / TILE;  // a block of 256 threads moves TILE x TILE values, so many rows at a time
static_assert(256 % TILE == 0 && TILE % LINES == 0, "a block moves whole rows, and all of them");

// From matrix [gates, hidden, columns] to out [gates, units, columns] or, turned, [across, gates,
// units]; `order` names with 4 bits each the gate that stands at its places.
extern "C" __global__ void permute_weights(const __grid_constant__ PermuteWeightsArgs args) {
    __shared__ storage_t tile[TILE][TILE + 4 / SIZE];  // a column's values lie in banks that differ
    const uint32 side = uint32((args.across + TILE - 1) / TILE), down = uint32((args.units + TILE - 1) / TILE);  // in tiles
    const int64 first_column = blockIdx.x % side * TILE, first_unit = blockIdx.x / side % down * TILE;
    const int64 gate = blockIdx.x / side / down, from = args.order >> (4 * gate) & 15;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const int64 unit = first_unit + line, column = first_column + x;
        const bool inside = unit < args.hidden && column < args.columns;
        tile[line][x] = inside ? args.matrix[(from * args.hidden + unit) * args.columns + column] : storage_t(0);
    }
    __syncthreads();
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const int64 unit = first_unit + (args.turned ? x : line), column = first_column + (args.turned ? line : x);
        if (unit >= args.units || column >= args.across) continue;
        if (args.turned)
            args.out[(column * args.gates + gate) * args.units + unit] = tile[x][line];
        else
            args.out[(gate * args.units + unit) * args.columns + column] = tile[line][x];
    }
}
