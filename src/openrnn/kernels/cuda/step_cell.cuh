// The cell of one step of one layer and direction, T = 1, on products that GEMMs made before.
//
// A warp takes 8 units in a tile of 8 rows of the batch; a block has WARPS such tiles of the same
// units.

#include "step_unit.cuh"

// Reads what a GEMM made of a unit's gates in row c of two; 0 where there is none.
INLINE void load_products(const float* source, const StepForwardArgs& args, int64 b, int unit,
                          int c, float (&products)[MMA_ROWS * 4]) {
    #pragma unroll
    for (int gate = 0; gate < GATES; ++gate)
        products[product_place(gate, c)] =
            source ? source[(b * GATES + gate) * args.hidden + unit] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
step_cell(const __grid_constant__ StepForwardArgs args) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int groups = int(args.hidden) / 8;
    const int group = blockIdx.x % groups, unit = group * 8 + (lane >> 2);  // of the lane
    const int64 tile = int64(blockIdx.x / groups) * WARPS + warp;
    const int64 own_row = tile * 8 + (lane & 3) * 2;
    overlap_launches();
    if (tile * 8 >= args.batch) return;

    Cells cells;
    cells.load(args, unit, own_row);
    float x_products[MMA_ROWS * 4] = {}, h_products[MMA_ROWS * 4] = {};
    float saved[2][ACTIVATIONS + 4] = {};
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int64 b = own_row + c;
        if (b >= args.batch) continue;
        load_products(args.x_products, args, b, unit, c, x_products);
        if (!is_reset(args, b))  // else h is zero
            load_products(args.h_products, args, b, unit, c, h_products);
    }
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        step_row(args, cells, c, own_row + c, unit, x_products, h_products, saved[c]);
    if (args.saved)
        store_saved(args.saved + (tile * groups + group) * (64 * SAVED) + saved_offset(lane),
                    SavedPlace(lane).rest, saved);
}
