// What both loops with multicast share: loops for large batches, in 16 bits. TMA brings what a
// block multiplies, the operand (h, or the gate gradients), into shared memory, one copy for all
// blocks of a cluster that multiply it; wgmma multiplies it there.
//
// BLOCKS blocks share R; they must all run at once: the launch is cooperative. A block owns the
// cells of GROUPS_OF_BLOCK groups of 8 units, in SETS sets of rows that take turns: while the
// operand of one set is in flight, the block computes another. K_PARTS blocks compute the sums of
// the SUM_GROUPS groups that they own together, each over its part of K. A cluster has either
// blocks of one part, or with PARTS_IN_CLUSTER those of all parts, which then send each other sums
// through shared memory.
//
// With LAYERS > 1 one launch runs all layers of a stack: BLOCKS blocks for each, a step behind the
// layer below (in backward, above). The first half of K is then that layer's: its h of the same
// step times W_ih, or its gate gradients times the transposed W_ih. The second half is the layer's
// own.
//
// K_WARPGROUPS warpgroups of a block hold its rows of R, two of them half of its K each, most of it
// in registers. They multiply one turn after the other and leave their shares of the sums in shared
// memory. CELL_WARPGROUPS warpgroups compute the cells of a turn from there, while the next one is
// multiplied; two of them have every other set. Of four more warps two copy operands of the turns
// to come, each a half of K; one publishes what this block adds to the operand of the next step, by
// a counter; and one tells the PEERS which operands were multiplied.
//
// K: values of a row: of R, in a stack of W_ih and R. SUMS: sums of a cell, each with a row of R.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int SETS = TILES_IN_FLIGHT;
constexpr int SET_ROWS = TILES * 8;
constexpr int ROWS = SETS * SET_ROWS;
constexpr int GROUPS_OF_BLOCK = GROUPS_OF_CLUSTER / CLUSTER;
constexpr int SUM_GROUPS = GROUPS_OF_BLOCK * K_PARTS;
constexpr int BLOCKS = GROUPS / GROUPS_OF_BLOCK;
// blocks of a cluster that multiply the same operand
constexpr int PEERS = PARTS_IN_CLUSTER ? CLUSTER / K_PARTS : CLUSTER;
constexpr int HALVES = 2;  // of a block's K, each copied by a thread
constexpr bool STACK = LAYERS > 1;
constexpr int OTHER_LAYER = 0, OWN_LAYER = 1;  // STACK: whose values a half of K multiplies
constexpr int PRODUCT_WARPS = 4 * K_WARPGROUPS, CELL_WARPGROUPS = 3 - K_WARPGROUPS;
constexpr int CELL_WARPS = 4;                         // of a set
constexpr int SETS_OF_WARP = SETS / CELL_WARPGROUPS;  // whose cells a warp computes
// Registers of a thread by its role; four warpgroups begin with 128. Where those that multiply have
// fewer than they need, ptxas has each wgmma wait for the one before.
constexpr int NEEDED = (8 * REGISTER_FRAGMENTS + 2 * TILES + 48 + 7) / 8 * 8;
constexpr int OTHER_REGISTERS = STACK ? 40 : 24, PRODUCT_REGISTERS = NEEDED > 136 ? NEEDED : 136;
constexpr int CELL_REGISTERS =
    (4 * 128 - K_WARPGROUPS * PRODUCT_REGISTERS - OTHER_REGISTERS) / CELL_WARPGROUPS / 8 * 8;
constexpr int HALF_TILES = K / K_TILE / HALVES / K_PARTS;  // of K
constexpr int K_TILES = HALF_TILES * HALVES / K_WARPGROUPS;
constexpr int MMA_ROWS = (SUM_GROUPS * SUMS + 7) / 8;  // of a warp
// slots of a warp for cells: some groups, of each some tiles
constexpr int GROUPS_OF_WARP = (GROUPS_OF_BLOCK + CELL_WARPS - 1) / CELL_WARPS;
constexpr int WARPS_OF_GROUP = GROUPS_OF_BLOCK < CELL_WARPS ? CELL_WARPS / GROUPS_OF_BLOCK : 1;
constexpr int TILES_OF_WARP = (TILES + WARPS_OF_GROUP - 1) / WARPS_OF_GROUP;
constexpr int SLOTS = GROUPS_OF_WARP * TILES_OF_WARP;
#include "product.cuh"

constexpr int HALF_BYTES = HALF_TILES * 4 * PIECE_BYTES;  // the operand of a set, one half of K
// What a layer's blocks publish in a step of a set, in SPLITS that blocks copy: of the units of
// BLOCKS_OF_SPLIT blocks each, and of each unit PUBLISHED values.
constexpr int SPLITS = STACK ? K_PARTS : K_PARTS * HALVES;
constexpr int BLOCKS_OF_SPLIT = BLOCKS / SPLITS;
constexpr int SPLIT_BYTES = GROUPS / SPLITS * PUBLISHED * PIECE_BYTES;
constexpr int STEP_BYTES = SPLITS * SPLIT_BYTES;
constexpr int COUNTER_BYTES = SPLITS * 128;  // of a set
// Buffers of published steps. In a stack the other layer reads them too, and may be some steps
// behind.
constexpr int DEPTH = STACK ? 8 : 2;
constexpr int SHARES_BYTES = SUM_GROUPS * TILES * K_WARPGROUPS * SUMS * 256;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // inputs of a slot

// Shared memory, in bytes: mbarriers, numbers of rows, the operand, shares of sums, inputs, what
// registers do not hold of R. Of mbarriers AT_FULL has one for each buffer of the operand and half,
// AT_STORED one for each set; AT_EMPTY, AT_SUMMED_UP and AT_READ have two, for even and odd turns.
constexpr int AT_FULL = 0, AT_EMPTY = BUFFERS * HALVES * 8;
constexpr int AT_SUMMED_UP = AT_EMPTY + 2 * 8, AT_READ = AT_SUMMED_UP + 2 * 8;
constexpr int AT_STORED = AT_READ + 2 * 8;
// PARTS_IN_CLUSTER: one for each warp that computes cells, for even and for odd steps of each set
constexpr int AT_MESSAGE_BARRIERS = AT_STORED + SETS * 8;
constexpr int MESSAGE_BARRIERS = PARTS_IN_CLUSTER ? SETS * 2 * CELL_WARPS : 0;
constexpr int AT_ROWS = AT_MESSAGE_BARRIERS + MESSAGE_BARRIERS * 8;
constexpr int AT_OPERAND = (AT_ROWS + ROWS * 4 + 127) / 128 * 128;
constexpr int AT_SHARES = AT_OPERAND + BUFFERS * HALVES * HALF_BYTES;
constexpr int AT_INPUTS = AT_SHARES + 2 * SHARES_BYTES;  // of even and of odd turns
constexpr int AT_MESSAGES =
    (AT_INPUTS + SETS * CELL_WARPS * SLOTS * ENTRY_BYTES + 127) / 128 * 128;
// PARTS_IN_CLUSTER: for each of these mbarriers what a warp receives, [sender, lane, slot, 2]
constexpr int MESSAGE_BUFFER_BYTES = (K_PARTS - 1) * 32 * SLOTS * 8;
constexpr int AT_WEIGHTS = AT_MESSAGES + MESSAGE_BARRIERS * MESSAGE_BUFFER_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + PRODUCT_WARPS * MATRIX_BYTES;
static_assert(SHORT && WGMMA, "operands of 16 bits, and warpgroups");
static_assert(WARPS == 16, "four warpgroups: of products, of cells, and one for the rest");
static_assert(SETS > 1, "while one set's operand is on its way another one is computed");
static_assert(BUFFERS <= 2, "the mbarriers of AT_EMPTY are of even and of odd turns");
static_assert(SETS % CELL_WARPGROUPS == 0, "a warpgroup for cells has all even or all odd turns");
static_assert(CELL_WARPS % GROUPS_OF_BLOCK == 0 || GROUPS_OF_BLOCK % CELL_WARPS == 0,
              "all warps have as many groups");
static_assert(CLUSTER > 1 && CLUSTERS * CLUSTER == BLOCKS * LAYERS, "clusters share R evenly");
static_assert(!STACK || !RESET, "layers of a stack read h, not what a reset leaves of it");
static_assert(K % (K_PARTS * HALVES * K_TILE) == 0, "halves of K are whole tiles");
static_assert(BLOCKS % SPLITS == 0, "splits are of whole blocks");
static_assert(PARTS_IN_CLUSTER ? BLOCKS % CLUSTER == 0 && CLUSTER % K_PARTS == 0
                               : BLOCKS % (CLUSTER * K_PARTS) == 0,
              "a cluster has all parts of K of some groups, or one part");
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/multicast_config.py counts it otherwise");

// A group of the block in a tile of a set: two cells a lane.
struct Slot {
    int group, tile;
    bool owned;
};

// Where a thread stands.
struct Place {
    int lane, warp, group_of_lane, thread_in_group;
    int layer;
    int block, first_group;  // of those that share R; of the cells that it owns
    int64 first_row;         // of the block
    int set = 0;             // of rows, where only one is meant

    INLINE explicit Place(int64 first_row_of_launch) {
        lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        // K_PARTS blocks that follow each other have the same sums. PARTS_IN_CLUSTER: they are of
        // one cluster. Else those of a cluster are K_PARTS apart, and so have the same part of K.
        const int number = blockIdx.x % BLOCKS, cluster = number / CLUSTER;
        layer = blockIdx.x / BLOCKS % LAYERS;
        block = PARTS_IN_CLUSTER ? number
            : cluster / K_PARTS * (CLUSTER * K_PARTS) + number % CLUSTER * K_PARTS +
                  cluster % K_PARTS;
        first_group = block * GROUPS_OF_BLOCK;
        first_row = first_row_of_launch + int64(blockIdx.x / (BLOCKS * LAYERS)) * ROWS;
    }
    INLINE int part_of_k() const { return block % K_PARTS; }
    // the rank in the cluster of one of PEERS
    INLINE int peer(int number) const {
        return PARTS_IN_CLUSTER ? number * K_PARTS + part_of_k() : number;
    }
    // of a warp that computes cells: which warpgroup, which warp of a set
    INLINE int cell_warpgroup() const {
        return CELL_WARPGROUPS > 1 ? (warp - PRODUCT_WARPS) / CELL_WARPS : 0;
    }
    INLINE int cell_warp() const { return warp % CELL_WARPS; }
    INLINE Slot slot(int s) const {  // of this warp, which computes cells
        const int number = cell_warp();
        const int group = number / WARPS_OF_GROUP * GROUPS_OF_WARP + s / TILES_OF_WARP;
        const int tile = number % WARPS_OF_GROUP * TILES_OF_WARP + s % TILES_OF_WARP;
        return {group, tile, tile < TILES};
    }
    INLINE int group(const Slot& slot) const { return first_group + slot.group; }
    INLINE int unit(const Slot& slot) const { return group(slot) * 8 + group_of_lane; }
};

// Makes R in shared memory visible to wgmma and waits for all product warps.
INLINE void share_weights() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_barrier<PRODUCT_BARRIER, PRODUCT_WARPS * 32>();
}

// This warpgroup's shares of the sums of a turn, over its part of K, to shared memory: [group,
// tile, warpgroup, sum, unit, row].
INLINE void store_shares(const Place& here, const Sums& sums, int turn) {
    const int m_warp = here.warp % 4, warpgroup = here.warp / 4;
    #pragma unroll
    for (int half = 0; half < 2 * MMA_ROWS; ++half) {
        const int number = m_warp * MMA_ROWS * 2 + half, group = number / SUMS;
        if (group >= SUM_GROUPS) continue;
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int share =
                ((group * TILES + n) * K_WARPGROUPS + warpgroup) * SUMS + number % SUMS;
            *reinterpret_cast<float2*>(shared + AT_SHARES + (turn & 1) * SHARES_BYTES +
                                       share * 256 + here.group_of_lane * 32 +
                                       here.thread_in_group * 8) =
                make_float2(sums[half / 2][n][0][half % 2 * 2],
                            sums[half / 2][n][0][half % 2 * 2 + 1]);
        }
    }
}

// Where a lane's two cells of a group and tile have their shares of sums: store_shares left them.
INLINE const unsigned char* shares_of(const Place& here, int group, int tile, int turn) {
    return shared + AT_SHARES + (turn & 1) * SHARES_BYTES +
           (group * TILES + tile) * (K_WARPGROUPS * SUMS * 256) + here.group_of_lane * 32 +
           here.thread_in_group * 8;
}
