// What both loops of a grid share. Where R fits no cluster, CLUSTERS clusters share it, and what it
// multiplies, the operand, travels through L2.
//
// A cluster owns groups of 8 units: their cells, and all rows of the matrix that give their sums.
// Its blocks split K: a block polls for its part of the operand (h, or the gate gradients),
// multiplies, and sends its share of each sum to the block that owns the slot, a group in one tile
// of 8 rows of the batch.
//
// The operand's place in global memory is a flag buffer, see flag_buffer.cuh. A block waits for
// nothing else, but all blocks must run at once: the launch is cooperative.
//
// K: length of a row of the matrix. SUMS: sums of a cell, each with a row of the matrix.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILES * 8;
constexpr int SHARES = CLUSTER * K_WARPS;  // of a sum: K is split over blocks and their warps
constexpr int K_TILES = ((K + K_TILE - 1) / K_TILE + SHARES - 1) / SHARES;  // of a warp
constexpr int PIECES = K_TILES * K_WARPS * 4;  // of a block: 16 bytes of K each
constexpr int M_WARPS = WARPS / K_WARPS;
constexpr int MMA_ROWS = ((GROUPS_OF_CLUSTER * SUMS + 1) / 2 + M_WARPS - 1) / M_WARPS;
constexpr int BLOCK_SLOTS = (GROUPS_OF_CLUSTER * TILES + CLUSTER - 1) / CLUSTER;
constexpr int SLOTS = (BLOCK_SLOTS + WARPS - 1) / WARPS;  // of a warp
constexpr int OPERAND_BYTES = K_TILES * K_WARPS * TILES * 512;
// A buffer of shares. Two are enough: a block that sends again has received what it waits for.
constexpr int SHARES_BYTES = BLOCK_SLOTS * SHARES * SUMS * 256;

#include "product.cuh"

// shared memory, in bytes: mbarriers, numbers of rows, two buffers of the operand and of shares of
// sums, ring of inputs, matrix
constexpr int AT_ROWS = 2 * 8;
constexpr int AT_OPERAND = (AT_ROWS + ROWS * 4 + 127) / 128 * 128;
constexpr int AT_SHARES = AT_OPERAND + 2 * OPERAND_BYTES;
constexpr int AT_RING = AT_SHARES + 2 * SHARES_BYTES;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // of the ring, a slot
constexpr int AT_WEIGHTS = AT_RING + WARPS * SLOTS * STAGES * ENTRY_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
static_assert((CLUSTER - 1) * PIECES * PIECE_K < K,
              "a block without a part of K would wait for nobody");
static_assert(WARPS % K_WARPS == 0, "each part of K has as many warps");
static_assert(!WGMMA || M_WARPS % 4 == 0, "a warpgroup multiplies one part of K");
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/config.py counts shared memory otherwise");

INLINE int first_group_of_cluster(int cluster) {
    return (cluster * GROUPS + CLUSTERS - 1) / CLUSTERS;
}

// A group of the cluster in a tile: two cells a lane.
struct Slot {
    int group, tile;
    bool owned;
};

// Where a thread stands; the clusters that share R have the same rows of the batch.
struct Place {
    int lane, warp, group_of_lane, thread_in_group, block;
    int first_group, groups;  // of the cluster
    int64 first_row;

    INLINE explicit Place(int64 first_row_of_launch) {
        lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        const int cluster = blockIdx.x / CLUSTER;
        first_group = first_group_of_cluster(cluster % CLUSTERS);
        groups = first_group_of_cluster(cluster % CLUSTERS + 1) - first_group;
        first_row = first_row_of_launch + int64(cluster / CLUSTERS) * ROWS;
    }
    INLINE Slot slot(int s) const {  // of this warp
        const int number = (s * WARPS + warp) * CLUSTER + block, group = number / TILES;
        return {group, number % TILES, s * WARPS + warp < BLOCK_SLOTS && group < groups};
    }
    INLINE int unit(const Slot& slot) const {
        return (first_group + slot.group) * 8 + group_of_lane;
    }
    INLINE int share_bytes() const {  // that the block receives each step
        return (groups * TILES - block + CLUSTER - 1) / CLUSTER * (SHARES * SUMS * 256);
    }
    INLINE int first_piece() const { return block * PIECES; }
};

#include "flag_buffer.cuh"

// How long a warp waits before its first poll of a step. A poll that comes too early costs a second
// way through L2, and polls delay stores. So the wait grows after a poll that came too early, and
// shrinks a little after one that found everything: it settles where one poll in 17 is too early.
constexpr uint32 FINE = 16;  // the wait is counted in parts of a cycle
constexpr uint32 LATER = 8 * FINE, SOONER = FINE / 2;

// Polls for the block's part of K of all rows and puts it into shared memory. from: this step's
// operand in row 0.
INLINE void fetch(const Place& here, uint32& wait, const operand_t* from, int64 row_stride,
                  const int* rows, unsigned char* operand) {
    constexpr int COUNT = (ROWS * PIECES + THREADS - 1) / THREADS, BATCH = COUNT < 8 ? COUNT : 8;
    const uint32 begin = uint32(clock());
    while (uint32(clock()) - begin < wait / FINE) continue;
    #pragma unroll 1
    for (int done = 0; done < COUNT; done += BATCH) {
        const operand_t* source[BATCH];
        uint4 found[BATCH];
        int place[BATCH];
        #pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int number = (done + i) * THREADS + threadIdx.x;
            const int piece = number % PIECES, r = number / PIECES;
            const int b = r < ROWS ? rows[r] : -1;
            const int at = (here.first_piece() + piece) * PIECE_K;
            source[i] = b >= 0 && at < K ? from + b * row_stride + at : nullptr;
            place[i] = operand_offset(piece, r / 8, r % 8);
            found[i] = source[i] ? poll(source[i]) : make_uint4(0, 0, 0, 0);
        }
        const bool early = await_arrival(found, [&](int i) { return poll(source[i]); });
        #pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint4 words = found[i];
            if (source[i])
                *reinterpret_cast<uint4*>(operand + place[i]) = make_uint4(
                    rounded(words.x), rounded(words.y), rounded(words.z), rounded(words.w));
        }
        // later batches have had more time, and say nothing about the first poll
        if (done == 0) wait = __any_sync(~0u, early) ? wait + LATER : wait - min(wait, SOONER);
    }
}

// Loads this warp's rows of the cluster's part of the matrix. load(group, which, k): 16 bytes of
// this lane, of one of the group's sums.
template <class Load>
INLINE void load_part(const Place& here, Matrix& matrix, unsigned char* others,
                      const Streamed& streamed, Load load) {
    const int m_warp = here.warp % M_WARPS, k_warp = here.warp / M_WARPS;
    #pragma unroll
    for (int s = K_TILES - 1; s >= 0; --s)  // fragments for registers come last
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m) {
            uint4 half[2] = {};
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int number = (m_warp * MMA_ROWS + m) * 2 + h;
                const int group = number / SUMS, which = number % SUMS;
                const int piece = (k_warp * K_TILES + s) * 4 + here.thread_in_group;
                const int k = (here.first_piece() + piece) * PIECE_K;
                if (group < here.groups && k < K)
                    half[h] = load(here.first_group + group, which, k);
            }
            hold(matrix, others, streamed, m, s, half[0], half[1]);
        }
}

// Multiplies, and sends the share of each sum to the owner of its slot. now: which of two buffers.
INLINE void multiply_and_send(const Place& here, const Matrix& matrix, const unsigned char* others,
                              Streamed& streamed, uint32 mbarriers, int now) {
    const int m_warp = here.warp % M_WARPS, k_warp = here.warp / M_WARPS;
    if ((WGMMA ? m_warp & ~3 : m_warp) * MMA_ROWS * 2 >= here.groups * SUMS) return;
    Sums sums = {};
    product(sums, matrix, others, streamed,
            shared + AT_OPERAND + now * OPERAND_BYTES + k_warp * (K_TILES * 4 * PIECE_BYTES) +
                operand_start(here.thread_in_group, here.group_of_lane));
    #pragma unroll
    for (int half = 0; half < 2 * MMA_ROWS; ++half) {  // of 8 units
        const int m = half / 2, number = m_warp * MMA_ROWS * 2 + half;
        const int group = number / SUMS, which = number % SUMS;
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float low = chained(sums, m, n, half % 2 * 2);
            const float high = chained(sums, m, n, half % 2 * 2 + 1);
            const int slot = group * TILES + n, owner = slot % CLUSTER;
            const int share = slot / CLUSTER * SHARES + here.block * K_WARPS + k_warp;
            const int there = AT_SHARES + now * SHARES_BYTES + (share * SUMS + which) * 256 +
                              here.group_of_lane * 32 + here.thread_in_group * 8;
            if (group >= here.groups) continue;
#if CLUSTER > 1
            const uint32 base = remote(mbarriers, owner);
            store_async(base + there, low, high, base + now * 8);
#else
            *reinterpret_cast<float2*>(shared + there) = make_float2(low, high);
#endif
        }
    }
}

// until all shares of step i are here
INLINE void wait_for_shares(const Place& here, uint32 mbarriers, int i) {
#if CLUSTER > 1
    const uint32 mbarrier = mbarriers + (i & 1) * 8;
    mbarrier_wait(mbarrier, uint32(i >> 1) & 1);
    if (threadIdx.x == 0) mbarrier_expect(mbarrier, here.share_bytes());
#endif
}

INLINE void add_slot_shares(const Place& here, int s, int now,
                            float (&sums)[SUMS][2]) {
    add_shares<SHARES>(
        reinterpret_cast<const float*>(shared + AT_SHARES + now * SHARES_BYTES) +
            (s * WARPS + here.warp) * (SHARES * SUMS * 64) + here.group_of_lane * 8 +
            here.thread_in_group * 2,
        sums);
}

// The start of a block: rows, zeros in both operands where no row or unit is, mbarriers.
template <class Args>
INLINE void begin_block(const Args& args, const Place& here, int* rows, uint32 mbarriers) {
    number_rows<LENGTHS, ROWS, THREADS>(args, rows, here.first_row);
    clear_shared<THREADS>(AT_OPERAND, AT_SHARES);
    open_mbarriers<2>(mbarriers, here.share_bytes());
}
