// What both loops of the grid share: R over the whole device, what it multiplies through L2.
//
// A cluster owns groups of 8 units: their cells, and all rows of the matrix that give them. Its
// blocks split K: a block fetches its part of the operand (h, or the gate gradients), multiplies,
// and sends each sum to the block that owns the slot, a group in one tile of 8 rows of the batch.
// The operand's home in global memory is its own mbarrier: filled with ones beforehand, a pattern
// that no conversion makes, a word tells by its value that it has come. So nothing else is waited
// for, but all blocks must be on the device together: the launch is cooperative.
//
// K: length of a row of the matrix; EACH: sums of a cell, of which the matrix gives each.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int GROUPS_EACH = PER;
constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILES * 8;
constexpr int FROM = CLUSTER * K_WARPS;                             // parts of a sum
constexpr int K_TILES = ((K + K_TILE - 1) / K_TILE + FROM - 1) / FROM;  // of a warp
constexpr int CHUNKS = K_TILES * K_WARPS * 4;                        // of a block, 16 bytes of K each
constexpr int M_WARPS = WARPS / K_WARPS;
constexpr int MMA_ROWS = ((GROUPS_EACH * EACH + 1) / 2 + M_WARPS - 1) / M_WARPS;
constexpr int OWN_SLOTS = (GROUPS_EACH * TILES + CLUSTER - 1) / CLUSTER;  // of a block
constexpr int SLOTS = (OWN_SLOTS + WARPS - 1) / WARPS;                    // of a warp
constexpr int OPERAND_BYTES = K_TILES * K_WARPS * TILES * 512;
constexpr int PARTS_BYTES = OWN_SLOTS * FROM * EACH * 256;

#include "product.cuh"

// shared memory, in bytes
constexpr int AT_ROWS = 2 * 8;
constexpr int AT_OPERAND = (AT_ROWS + ROWS * 4 + 127) / 128 * 128;
constexpr int AT_PARTS = AT_OPERAND + 2 * OPERAND_BYTES;
constexpr int AT_RING = AT_PARTS + 2 * PARTS_BYTES;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // of the ring, a slot
constexpr int AT_WEIGHTS = AT_RING + WARPS * SLOTS * STAGES * ENTRY_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
// Two buffers of parts are enough because a block that sends again has fetched what it waits for.
static_assert((CLUSTER - 1) * CHUNKS * CHUNK_K < K, "a block without a part of K would wait for nobody");
static_assert(WARPS % K_WARPS == 0, "each part of K has as many warps");
static_assert(!WGMMA || M_WARPS % 4 == 0, "a warpgroup multiplies one part of K");
static_assert(SHARED_BYTES == SHARED_GIVEN, "the plan counts shared memory otherwise");

INLINE int first_group_of_cluster(int cluster) {
    return (cluster * GROUPS + CLUSTERS - 1) / CLUSTERS;
}

struct Slot { int group, tile; bool mine; };  // group: of the cluster's

// where a block stands: its clusters share the rows from `first_row` on
struct Place {
    int lane, warp, group_of_lane, thread_in_group, block, first_group, groups;
    int64 first_row;

    INLINE explicit Place(int64 first) {
        lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        const int cluster = blockIdx.x / CLUSTER;
        first_group = first_group_of_cluster(cluster % CLUSTERS);
        groups = first_group_of_cluster(cluster % CLUSTERS + 1) - first_group;
        first_row = first + int64(cluster / CLUSTERS) * ROWS;
    }
    INLINE Slot slot(int s) const {  // this warp's
        const int number = (s * WARPS + warp) * CLUSTER + block, group = number / TILES;
        return {group, number % TILES, s * WARPS + warp < OWN_SLOTS && group < groups};
    }
    INLINE int message() const {  // bytes that the block awaits each step
        return (groups * TILES - block + CLUSTER - 1) / CLUSTER * (FROM * EACH * 256);
    }
    INLINE int first_chunk() const { return block * CHUNKS; }
};

INLINE uint4 test(const operand_t* place) {
    uint4 found;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "l"(place) : "memory");
    return found;
}

INLINE bool complete(uint4 words) {
    return words.x != ~0u && words.y != ~0u && words.z != ~0u && words.w != ~0u;
}

// into a mbarrier; where all bits of a word are ones it is a nan of the user's, and another one does
INLINE uint32 told(uint32 bits) { return bits == ~0u ? (SHORT ? 0x7fff7fffu : 0x7fffffffu) : bits; }

INLINE void post(operand_t* place, Message message) {
#if SHORT
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(place), "r"(told(message.bits)) : "memory");
#else
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(place),
                 "r"(told(__float_as_uint(message.low))), "r"(told(__float_as_uint(message.high)))
                 : "memory");
#endif
}

// How long a warp waits before it looks in L2 for what others post. A test that comes too early costs a
// whole way there once more, and looks hold up posts. So the next test comes later, and after one that found
// all a little sooner: the wait settles where one test in 17 is too early.
constexpr uint32 FINE = 16;  // of a cycle: the unit of waits
constexpr uint32 LATER = 8 * FINE, SOONER = FINE / 2;

// The block's part of K of all rows, as soon as it is there; from: this step's, in row 0.
INLINE void fetch(const Place& here, uint32& wait, const operand_t* from, int64 row_stride, const int* rows,
                  unsigned char* operand) {
    constexpr int COUNT = (ROWS * CHUNKS + THREADS - 1) / THREADS, BATCH = COUNT < 8 ? COUNT : 8;
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
            const int chunk = number % CHUNKS, r = number / CHUNKS;
            const int b = r < ROWS ? rows[r] : -1;
            const int at = (here.first_chunk() + chunk) * CHUNK_K;
            source[i] = b >= 0 && at < K ? from + b * row_stride + at : nullptr;
            place[i] = operand_offset(chunk, r / 8, r % 8);
            found[i] = source[i] ? test(source[i]) : make_uint4(0, 0, 0, 0);
        }
        // those that are not there are asked for again, all at once: a test takes half a microsecond
        bool early = false;
#if SPIN_LIMIT
        int tries = 0;
#endif
        while (true) {
            bool all = true;
            #pragma unroll
            for (int i = 0; i < BATCH; ++i) all &= complete(found[i]);
            if (all) break;
            early = true;
#if SPIN_LIMIT
            if (++tries > SPIN_LIMIT) __trap();
#endif
            #pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (!complete(found[i])) found[i] = test(source[i]);
        }
        #pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const uint4 words = found[i];
            if (source[i])
                *reinterpret_cast<uint4*>(operand + place[i]) = make_uint4(
                    rounded(words.x), rounded(words.y), rounded(words.z), rounded(words.w));
        }
        // what is looked for afterwards has had more time, and says nothing of the first test
        if (done == 0) wait = __any_sync(~0u, early) ? wait + LATER : wait - min(wait, SOONER);
    }
}

// this warp's rows of the cluster's part of the matrix; load(group, which, k): 16 bytes of this lane's
template <class Load>
INLINE void load_part(const Place& here, Matrix& matrix, unsigned char* others, Load load) {
    const int m_warp = here.warp % M_WARPS, k_warp = here.warp / M_WARPS;
    #pragma unroll
    for (int s = K_TILES - 1; s >= 0; --s)  // what registers hold comes last
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m) {
            uint4 half[2] = {};
            #pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int number = (m_warp * MMA_ROWS + m) * 2 + h;
                const int group = number / EACH, which = number % EACH;
                const int k = (here.first_chunk() + (k_warp * K_TILES + s) * 4 + here.thread_in_group) * CHUNK_K;
                if (group < here.groups && k < K) half[h] = load(here.first_group + group, which, k);
            }
            hold(matrix, others, m, s, half[0], half[1]);
        }
}

// multiplies, and sends each sum's part to the owner of its slot; now: the turn's half of buffers
INLINE void multiply_and_send(const Place& here, const Matrix& matrix, const unsigned char* others,
                              unsigned char* shared, uint32 mbarriers, int now) {
    const int m_warp = here.warp % M_WARPS, k_warp = here.warp / M_WARPS;
    if ((WGMMA ? m_warp & ~3 : m_warp) * MMA_ROWS * 2 >= here.groups * EACH) return;
    Sums sums = {};
    product(sums, matrix, others, shared + AT_OPERAND + now * OPERAND_BYTES +
                                      k_warp * (K_TILES * 4 * CHUNK_BYTES) +
                                      operand_start(here.thread_in_group, here.group_of_lane));
    #pragma unroll
    for (int half = 0; half < 2 * MMA_ROWS; ++half) {  // of 8 units
        const int m = half / 2, number = m_warp * MMA_ROWS * 2 + half;
        const int group = number / EACH, which = number % EACH;
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const float low = chained(sums, m, n, half % 2 * 2), high = chained(sums, m, n, half % 2 * 2 + 1);
            const int slot = group * TILES + n, owner = slot % CLUSTER;
            const int there = AT_PARTS + now * PARTS_BYTES +
                              ((slot / CLUSTER * FROM + here.block * K_WARPS + k_warp) * EACH + which) * 256 +
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

// waits until all parts of step i are here
INLINE void await_parts(const Place& here, uint32 mbarriers, int i) {
#if CLUSTER > 1
    const uint32 mbarrier = mbarriers + (i & 1) * 8;
    mbarrier_wait(mbarrier, uint32(i >> 1) & 1);
    if (threadIdx.x == 0) mbarrier_expect(mbarrier, here.message());
#endif
}

// adds the parts of a warp's slot, always in the same order
INLINE void add_parts(const Place& here, const unsigned char* shared, int s, int now,
                      float (&sums)[EACH][2]) {
    const float* parts = reinterpret_cast<const float*>(shared + AT_PARTS + now * PARTS_BYTES) +
                         (s * WARPS + here.warp) * (FROM * EACH * 64) + here.group_of_lane * 8 + here.thread_in_group * 2;
    #pragma unroll
    for (int from = 0; from < FROM; ++from)
        #pragma unroll
        for (int which = 0; which < EACH; ++which) {
            const float2 part = *reinterpret_cast<const float2*>(parts + (from * EACH + which) * 64);
            sums[which][0] += part.x;
            sums[which][1] += part.y;
        }
}

// both buffers of the operand are zeros, where no row or unit is they stay so
INLINE void clear_operand(unsigned char* shared) {
    for (int at = AT_OPERAND + threadIdx.x * 16; at < AT_PARTS; at += THREADS * 16)
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(0, 0, 0, 0);
}
