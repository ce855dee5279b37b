// The forward time loop of one layer and direction for large batches, in 16 bits. TMA brings h into
// shared memory, one copy for all blocks of a cluster; wgmma multiplies it there.
//
// A block owns BLOCK_GROUPS groups of 8 units and computes them for SETS sets of rows, which take
// turns: while h of one set is in flight, the block computes another. Two warpgroups hold the rows
// of R that give the units' sums, each half of K, most of it in registers. They multiply, add their
// shares of the sums through shared memory, and compute the cells. Of four more warps one copies h
// of the next turn, one publishes this block's h by setting its flag, and two do nothing.
//
// BLOCKS blocks share R; they must all run at once: the launch is cooperative. Their h travels
// through L2 in the flag buffer. In it each block has a flag for each set: the last step for which
// its h is stored, -1 before the first.

#define K UNITS
#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int SETS = TILES_IN_FLIGHT;
constexpr int SET_ROWS = TILES * 8;
constexpr int ROWS = SETS * SET_ROWS;
constexpr int BLOCK_GROUPS = GROUPS_EACH / CLUSTER;
constexpr int BLOCKS = GROUPS / BLOCK_GROUPS;
constexpr int HALVES = 2;                    // of K, each of a warpgroup
constexpr int COMPUTE_WARPS = 4 * HALVES;
constexpr int K_TILES = UNITS / K_TILE / HALVES;
constexpr int MMA_ROWS = (BLOCK_GROUPS * GATES + 7) / 8;  // of a warp
constexpr int SLOTS = (BLOCK_GROUPS * TILES + COMPUTE_WARPS - 1) / COMPUTE_WARPS;  // of a warp
#include "product.cuh"
#include "forward_cell.cuh"

constexpr int HALF_BYTES = K_TILES * 4 * CHUNK_BYTES;  // h of a set, one half of K
constexpr int FLAGS_OF_HALF = BLOCKS / HALVES;
constexpr int FLAGS_OF_LANE = (FLAGS_OF_HALF + 31) / 32;
constexpr int SHARES_BYTES = BLOCK_GROUPS * TILES * HALVES * GATES * 256;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // inputs of a slot
constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;
constexpr int GATE_BYTES = 64 * SIZE;

// shared memory, in bytes: mbarriers, numbers of rows, h, shares of sums, inputs, the rest of R
constexpr int FULL = 0, EMPTY = HALVES * 8, STORED = EMPTY + 8;  // mbarriers, the last for each set
constexpr int AT_ROWS = STORED + SETS * 8;
constexpr int AT_HIDDEN = (AT_ROWS + ROWS * 4 + 127) / 128 * 128;
constexpr int AT_SHARES = AT_HIDDEN + HALVES * HALF_BYTES;
constexpr int AT_INPUTS = AT_SHARES + SETS * SHARES_BYTES;
constexpr int AT_WEIGHTS =
    (AT_INPUTS + SETS * COMPUTE_WARPS * SLOTS * ENTRY_BYTES + 127) / 128 * 128;
constexpr int SHARED_BYTES = AT_WEIGHTS + COMPUTE_WARPS * MATRIX_BYTES;
static_assert(SHORT && WGMMA, "operands of 16 bits, and warpgroups");
static_assert(WARPS == COMPUTE_WARPS + 4, "two warpgroups that compute, and one more");
static_assert(CLUSTER > 1 && CLUSTERS * CLUSTER == BLOCKS, "clusters share R evenly");
static_assert(UNITS % (HALVES * K_TILE) == 0, "halves of K are whole tiles");
static_assert(GROUPS % BLOCK_GROUPS == 0 && BLOCKS % HALVES == 0, "blocks have as many units");
static_assert(TILES % SLOTS == 0, "a warp has one group of units");
static_assert(SCALED == 0, "sums are halved in the step");
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/config.py counts shared memory otherwise");

// A group of the block in a tile of a set: two cells a lane.
struct Slot {
    int group, tile;
    bool owned;
};

// Where a thread stands.
struct Place {
    int lane, warp, group_of_lane, thread_in_group;
    int block;          // of those that share R
    int64 first_row;    // of the block

    INLINE explicit Place(int64 first_row_of_launch) {
        lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = blockIdx.x % BLOCKS;
        first_row = first_row_of_launch + int64(blockIdx.x / BLOCKS) * ROWS;
    }
    INLINE Slot slot(int s) const {  // of this warp
        const int number = warp * SLOTS + s;
        return {number / TILES, number % TILES, number < BLOCK_GROUPS * TILES};
    }
    INLINE int group(const Slot& slot) const { return block * BLOCK_GROUPS + slot.group; }
    INLINE int unit() const { return group(slot(0)) * 8 + group_of_lane; }  // of all slots
};

// The flag buffer: flags [sets, BLOCKS], then h [sets, 2 (of even and of odd steps), UNITS / 8,
// TILES, 8 rows, 8 units].
struct Exchange {
    int* flags;             // of the block's first set
    unsigned char* hidden;  // of the same

    INLINE Exchange(const ForwardArgs& args, const Place& here) {
        const int64 sets = (args.batch + ROWS - 1) / ROWS * SETS, set = here.first_row / SET_ROWS;
        flags = reinterpret_cast<int*>(args.flag_buffer) + set * BLOCKS;
        hidden = reinterpret_cast<unsigned char*>(args.flag_buffer) +
                 (sets * BLOCKS * 4 + 127) / 128 * 128 + set * (2 * HALVES * HALF_BYTES);
    }
    INLINE unsigned char* hidden_of(int set, int step) const {
        return hidden + (set * 2 + (step & 1)) * (HALVES * HALF_BYTES);
    }
};

#include "multicast_exchange.cuh"
#include "multicast_forward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given_args) {
#if LOW_REGISTER
    const ForwardArgs& args = given_args;
#else
    const ForwardArgs args = given_args;  // read once: loads at each use cost the loop more
#endif
    const Place here(args.first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    number_rows<ROWS, THREADS>(rows, here.first_row, args.batch, LENGTHS ? args.order : nullptr);
    begin_mbarriers();
    cluster_barrier();
    const Exchange exchange(args, here);
    const int count = int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
    if (here.warp < COMPUTE_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        compute(args, here, exchange, Time(args, count), rows);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (here.warp == COMPUTE_WARPS) copy_hidden(here, exchange, count);
        if (here.warp == COMPUTE_WARPS + 1) publish_hidden(here, exchange, count);
    }
    cluster_barrier();  // no block leaves while another may still write to it
}
