// A matrix of weights with gates in another order, turned or not, with zeros up to a multiple of 8 units.

#include "device.cuh"

constexpr int LINES = 256 / TILE;  // a block of 256 threads moves TILE x TILE values, so many rows at a time
static_assert(256 % TILE == 0 && TILE % LINES == 0, "a block moves whole rows, and all of them");

// From matrix [gates, hidden, columns] to out [gates, units, columns] or, turned, [across, gates,
// units]; `order` names with 4 bits each the gate that stands at its places.
extern "C" __global__ void arrange(
    const stored* __restrict__ matrix,
    stored* __restrict__ out,
    wide units, wide hidden, wide across, wide columns, wide gates, wide order, wide turned
) {
    __shared__ stored tile[TILE][TILE + 4 / SIZE];  // a column's values lie in banks that differ
    const word side = word((across + TILE - 1) / TILE), down = word((units + TILE - 1) / TILE);  // in tiles
    const wide first_column = blockIdx.x % side * TILE, first_unit = blockIdx.x / side % down * TILE;
    const wide gate = blockIdx.x / side / down, from = order >> (4 * gate) & 15;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const wide unit = first_unit + line, column = first_column + x;
        const bool inside = unit < hidden && column < columns;
        tile[line][x] = inside ? matrix[(from * hidden + unit) * columns + column] : stored(0);
    }
    __syncthreads();
    #pragma unroll 8
    for (int i = 0; i < TILE / LINES; ++i) {
        const int line = i * LINES + y;
        const wide unit = first_unit + (turned ? x : line), column = first_column + (turned ? line : x);
        if (unit >= units || column >= across) continue;
        if (turned)
            out[(column * gates + gate) * units + unit] = tile[x][line];
        else
            out[(gate * units + unit) * columns + column] = tile[line][x];
    }
}
