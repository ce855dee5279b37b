// One step of one layer and direction, T = 1: both products and the cell in one launch.
//
// A block owns UNIT_GROUPS groups of 8 units, all gates of them, in TILES * 8 rows of the batch. It
// reads each of its weights once, from L2 or memory, and keeps none: with one step to take there is
// nothing to gain from holding R. Its warps split K: some multiply x by columns of W_ih, the others
// h by columns of R. Their partial sums meet in shared memory. There a warp adds those of a pair, a
// group of units and a tile of 8 rows, in a fixed order, and applies the cell.
//
// A warp's operands pass through a ring of STAGES K tiles in shared memory. A lane copies 16 bytes
// at a time to places of its own and reads no others, so the ring needs no barrier.
//
// H and I are multiples of 8, so that every 16 bytes of a row that a lane reads are inside it.

#include "step_unit.cuh"

constexpr int PAIRS = UNIT_GROUPS * TILES;    // of a group of units and a tile of rows
constexpr int PLACE = 32 * sizeof(uint4);     // 16 bytes for each lane of a warp
constexpr int WEIGHTS = UNIT_GROUPS * GATES;  // places of a stage, before those of rows
constexpr int PARTS = PAIRS * MMA_ROWS;       // of a warp's sums, four a lane
constexpr int STAGE_BYTES = (WEIGHTS + TILES) * PLACE;
constexpr int RING_BYTES = STAGES * STAGE_BYTES, PARTS_BYTES = PARTS * PLACE;
constexpr int WARP_BYTES = RING_BYTES > PARTS_BYTES ? RING_BYTES : PARTS_BYTES;
static_assert(WARPS * WARP_BYTES == SHARED_GIVEN,
              "codegen/step_config.py counts shared memory otherwise");

typedef float Sums[UNIT_GROUPS][MMA_ROWS][TILES][4];

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

    // Begins to copy a K tile to a stage; a lane's place in it is at `stage`.
    INLINE void copy_tile(int tile, uint32 stage) const {
        const int k = tile * K_TILE;
        const bool inside = k + lane_column < columns;
        #pragma unroll
        for (int u = 0; u < UNIT_GROUPS; ++u)
            #pragma unroll
            for (int g = 0; g < GATES; ++g)
                copy_async<16>(stage + (u * GATES + g) * PLACE,
                               matrix + g * gate + u * 8 * columns + k, inside ? 16 : 0);
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const bool exists = inside && rows[n];
            copy_async<16>(stage + (WEIGHTS + n) * PLACE, exists ? rows[n] + k : matrix,
                           exists ? 16 : 0);
        }
    }

    // Adds the products of the K tiles [begin, end); `ring`: the lane's place in the first stage.
    INLINE void multiply_tiles(int begin, int end, const unsigned char* ring, Sums& sums) const {
        const uint32 target = shared_address(ring);
        #pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            if (begin + stage < end) copy_tile(begin + stage, target + stage * STAGE_BYTES);
            commit_copies();
        }
        int at = 0;  // of the stage
        for (int tile = begin; tile < end; ++tile) {
            await_copies<STAGES - 1>();
            multiply_stage(reinterpret_cast<const uint4*>(ring + at), sums);
            if (tile + STAGES < end) copy_tile(tile + STAGES, target + at);
            commit_copies();
            at = at + STAGE_BYTES == RING_BYTES ? 0 : at + STAGE_BYTES;
        }
    }

    static INLINE void multiply_stage(const uint4* stage, Sums& sums) {
        uint4 a[UNIT_GROUPS][MMA_ROWS * 2];
        #pragma unroll
        for (int u = 0; u < UNIT_GROUPS; ++u)
            #pragma unroll
            for (int g = 0; g < MMA_ROWS * 2; ++g)
                a[u][g] = g < GATES ? stage[(u * GATES + g) * 32] : make_uint4(0, 0, 0, 0);
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const uint4 row = stage[(WEIGHTS + n) * 32];
            #pragma unroll
            for (int u = 0; u < UNIT_GROUPS; ++u)
                #pragma unroll
                for (int m = 0; m < MMA_ROWS; ++m)
                    multiply_tile(sums[u][m][n], a[u][2 * m], a[u][2 * m + 1], row);
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
//
// ring: this lane's place in the warp's first stage.
INLINE void multiply_share(const StepForwardArgs& args, const Shares& shares, int64 first_row,
                           int unit, int warp, int lane, const unsigned char* ring, Sums& sums) {
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
    operands.multiply_tiles(rank * tiles / among, (rank + 1) * tiles / among, ring, sums);
}

// Where a lane has four partial sums of a pair and fragment that a warp made. They lie where the
// warp's ring has been: a lane overwrites only what it alone has read.
INLINE float4* part_place(int warp, int pair, int m, int lane) {
    float4* first = reinterpret_cast<float4*>(shared + warp * WARP_BYTES);
    return first + (pair * MMA_ROWS + m) * 32 + lane;
}

INLINE void store_parts(const Sums& sums, int warp, int lane) {
    #pragma unroll
    for (int u = 0; u < UNIT_GROUPS; ++u)
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int m = 0; m < MMA_ROWS; ++m) {
                const float (&sum)[4] = sums[u][m][n];
                *part_place(warp, u * TILES + n, m, lane) =
                    make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
}

// A lane's sums of a pair.
struct PairSums {
    float x[MMA_ROWS * 4] = {}, h[MMA_ROWS * 4] = {};  // of the products with W_ih, and with R

    static INLINE void add(float* sum, float4 part) {
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }

    // Adds what the warps made; the first `x_warps` of them multiplied x.
    INLINE void add_parts(int pair, int x_warps, int lane) {
        constexpr int AT_ONCE = 4;  // warps whose parts are loaded before they are added
        #pragma unroll
        for (int first = 0; first < WARPS; first += AT_ONCE) {
            float4 parts[AT_ONCE][MMA_ROWS];
            #pragma unroll
            for (int w = 0; w < AT_ONCE; ++w)
                #pragma unroll
                for (int m = 0; m < MMA_ROWS; ++m)
                    parts[w][m] = *part_place(first + w, pair, m, lane);
            #pragma unroll
            for (int w = 0; w < AT_ONCE; ++w)
                #pragma unroll
                for (int m = 0; m < MMA_ROWS; ++m)
                    if (first + w < x_warps)  // no pointer, which would not be to registers
                        add(x + m * 4, parts[w][m]);
                    else
                        add(h + m * 4, parts[w][m]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
step_forward(const __grid_constant__ StepForwardArgs args) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int groups = int(args.hidden) / 8, across = groups / UNIT_GROUPS;  // blocks for a row
    const int first_group = blockIdx.x % across * UNIT_GROUPS;
    const int64 first_row = int64(blockIdx.x / across) * (TILES * 8);
    // of the lane: its unit in the first group, its first row in the first tile
    const int unit = first_group * 8 + (lane >> 2);
    const int64 lane_row = first_row + (lane & 3) * 2;
    overlap_launches();
    Cells cells;
    if (warp < PAIRS)  // early: its loads overlap the products
        cells.load(args, unit + warp / TILES * 8, lane_row + warp % TILES * 8);

    const Shares shares(args);
    Sums sums = {};
    multiply_share(args, shares, first_row, unit, warp, lane,
                   shared + warp * WARP_BYTES + lane * 16, sums);
    store_parts(sums, warp, lane);
    __syncthreads();

    #pragma unroll 1
    for (int pair = warp; pair < PAIRS; pair += WARPS) {
        const int group = pair / TILES, n = pair % TILES, own_unit = unit + group * 8;
        const int64 tile_row = first_row + n * 8, own_row = lane_row + n * 8;
        if (tile_row >= args.batch) continue;
        if (pair >= WARPS) cells.load(args, own_unit, own_row);
        PairSums both;
        both.add_parts(pair, shares.x_warps, lane);
        float saved[2][ACTIVATIONS + 4] = {};
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            step_row(args, cells, c, own_row + c, own_unit, both.x, both.h, saved[c]);
        if (args.saved)
            store_saved(args.saved + (tile_row / 8 * groups + first_group + group) * (64 * SAVED) +
                            saved_offset(lane),
                        SavedPlace(lane).rest, saved);
    }
}
