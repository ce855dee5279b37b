// One step of one layer and direction, T = 1: both products and the cell in one launch.
//
// A block owns a group of 8 units, all gates of it, in TILES * 8 rows of the batch. It reads each
// of its weights once, from L2 or memory, and keeps none: with one step to take there is nothing to
// gain from holding R. Its warps split K: some multiply x by columns of W_ih, the others h by
// columns of R. Their partial sums meet in shared memory, where the first TILES warps add them in a
// fixed order and apply the cell, each to one tile of 8 rows.
//
// H and I are multiples of 8, so that every 16 bytes of a row that a lane reads are inside it.

#include "step_unit.cuh"

constexpr int PARTS = MMA_ROWS * TILES;    // of a warp's sums, four a lane
static_assert(WARPS * PARTS * 32 * sizeof(float4) == SHARED_GIVEN,
              "codegen/step_config.py counts shared memory otherwise");
// K tiles whose operands a lane loads before it multiplies: as many as registers hold
constexpr int MOST = (WARPS > 8 ? 64 : 80) / (MMA_ROWS * 8 + TILES * 4);
constexpr int DEPTH = MOST < 1 ? 1 : MOST > 4 ? 4 : MOST;

typedef float Sums[MMA_ROWS][TILES][4];

INLINE uint4 load_16_bytes(const storage_t* source, bool exists) {
    return exists ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
}

// The row of the batch that a lane has as a column of the product in tile n.
INLINE int64 column_row(int64 first_row, int n, int lane) {
    return first_row + n * 8 + (lane >> 2);
}

// A matrix [GATES, units, columns], and the rows [B, columns] that it is multiplied with.
struct Operands {
    const storage_t* matrix;       // of the lane's unit in the first gate, from its columns on
    int64 gate;                    // values from a gate to the next
    const storage_t* rows[TILES];  // of the lane's row in each tile, the same; null: zeros
    int columns, lane_column;      // K; the first column of a K tile that the lane reads

    INLINE Operands(const storage_t* weights, int64 units, int64 width, int unit, int lane) {
        lane_column = (lane & 3) * PIECE_K, columns = int(width), gate = units * width;
        matrix = weights + unit * width + lane_column;
    }

    // Adds the products of the K tiles [begin, end).
    INLINE void multiply_tiles(int begin, int end, Sums& sums) const {
        for (int s = begin; s < end; s += DEPTH) {
            uint4 a[DEPTH][MMA_ROWS * 2], b[DEPTH][TILES];
            #pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int k = (s + d) * K_TILE;
                const bool inside = s + d < end && k + lane_column < columns;
                #pragma unroll
                for (int g = 0; g < MMA_ROWS * 2; ++g)
                    a[d][g] = load_16_bytes(matrix + g * gate + k, inside && g < GATES);
                #pragma unroll
                for (int n = 0; n < TILES; ++n)
                    b[d][n] = load_16_bytes(rows[n] + k, inside && rows[n]);
            }
            #pragma unroll
            for (int d = 0; d < DEPTH; ++d)
                #pragma unroll
                for (int m = 0; m < MMA_ROWS; ++m)
                    #pragma unroll
                    for (int n = 0; n < TILES; ++n)
                        multiply_tile(sums[m][n], a[d][2 * m], a[d][2 * m + 1], b[d][n]);
        }
    }

    // lower, upper: rows lane / 4 and lane / 4 + 8 of a fragment
    static INLINE void multiply_tile(float (&sum)[4], uint4 lower, uint4 upper, uint4 row) {
        multiply(sum, make_uint4(rounded(lower.x), rounded(upper.x), rounded(lower.y),
                                 rounded(upper.y)), rounded(row.x), rounded(row.y));
        multiply(sum, make_uint4(rounded(lower.z), rounded(upper.z), rounded(lower.w),
                                 rounded(upper.w)), rounded(row.z), rounded(row.w));
    }
};

// How the warps of a block share the products: the first `x_warps` multiply x, the others h.
struct Shares {
    int x_warps, warps;  // warps: that multiply anything

    INLINE Shares(const StepForwardArgs& args) {
        const bool has_h = args.initial[0] || (args.reset && args.reset_state[0]);
        const int both = int(args.inputs + args.hidden);
        const int share = (WARPS * int(args.inputs) + both / 2) / both;
        warps = args.w_ih || has_h ? WARPS : 0;
        x_warps = !args.w_ih ? 0 : !has_h ? WARPS : min(max(share, 1), WARPS - 1);
    }
};

// Adds this warp's part of the products.
INLINE void multiply_share(const StepForwardArgs& args, const Shares& shares, int64 first_row,
                           int unit, int warp, int lane, Sums& sums) {
    if (warp >= shares.warps) return;
    const bool takes_x = warp < shares.x_warps;
    const int64 width = takes_x ? args.inputs : args.hidden;
    Operands operands(takes_x ? args.w_ih : args.weight, args.hidden, width, unit, lane);
    #pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const int64 b = column_row(first_row, n, lane);
        const storage_t* row = nullptr;
        if (b < args.batch) {
            row = takes_x ? args.x + b * args.x_row : state_before(args, 0, b);
            if (row) row += operands.lane_column + (takes_x ? 0 : b * args.hidden);
        }
        operands.rows[n] = row;
    }
    const int rank = takes_x ? warp : warp - shares.x_warps;
    const int among = takes_x ? shares.x_warps : shares.warps - shares.x_warps;
    const int tiles = (int(width) + K_TILE - 1) / K_TILE;
    operands.multiply_tiles(rank * tiles / among, (rank + 1) * tiles / among, sums);
}

// The sums of tile n over warps [begin, end), in their order.
INLINE void add_parts(int n, int begin, int end, int lane, float (&sums)[MMA_ROWS * 4]) {
    for (int warp = begin; warp < end; ++warp)
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m) {
            const float4 part = reinterpret_cast<const float4*>(
                shared)[(warp * PARTS + m * TILES + n) * 32 + lane];
            sums[m * 4] += part.x, sums[m * 4 + 1] += part.y;
            sums[m * 4 + 2] += part.z, sums[m * 4 + 3] += part.w;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
step_forward(const __grid_constant__ StepForwardArgs args) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int groups = int(args.hidden) / 8;
    const int group = blockIdx.x % groups, unit = group * 8 + (lane >> 2);  // of the lane
    const int64 first_row = int64(blockIdx.x / groups) * (TILES * 8);
    const int64 tile_row = first_row + warp * 8, own_row = tile_row + (lane & 3) * 2;
    Cells cells;
    if (warp < TILES) cells.load(args, unit, own_row);  // early: its loads overlap the products

    const Shares shares(args);
    Sums sums = {};
    multiply_share(args, shares, first_row, unit, warp, lane, sums);
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float (&sum)[4] = sums[m][n];
            reinterpret_cast<float4*>(shared)[(warp * PARTS + m * TILES + n) * 32 + lane] =
                make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
    __syncthreads();
    if (warp >= TILES || tile_row >= args.batch) return;

    float x_sums[MMA_ROWS * 4] = {}, h_sums[MMA_ROWS * 4] = {}, saved[2][ACTIVATIONS + 4] = {};
    add_parts(warp, 0, shares.x_warps, lane, x_sums);
    add_parts(warp, shares.x_warps, shares.warps, lane, h_sums);
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        step_row(args, cells, c, own_row + c, unit, x_sums, h_sums, saved[c]);
    if (args.saved)
        store_saved(args.saved + (tile_row / 8 * groups + group) * (64 * SAVED) +
                        saved_offset(lane),
                    SavedPlace(lane).rest, saved);
}
