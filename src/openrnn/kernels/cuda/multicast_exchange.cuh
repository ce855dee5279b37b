// How h travels between blocks of the forward loop with multicast: the warps that compute store it,
// the publishing warp sets flags, the copying warp brings it.
//
// Each set has two buffers, for even and odd steps. A block stores h of step i + 1 over that of
// step i - 1. It may: it has multiplied h of step i, so every block's flag was at i, and a block
// sets that flag only after it has multiplied h of step i - 1.

INLINE uint32 mbarrier_at(int offset) { return shared_address(shared) + offset; }

// mbarriers: FULL awaits the bytes of a half of h; EMPTY all blocks of the cluster, which have read
// h; STORED all warps that compute.
INLINE void begin_mbarriers() {
    if (threadIdx.x < HALVES + 1 + SETS) {
        const int count = int(threadIdx.x) < HALVES ? 1
            : int(threadIdx.x) == HALVES ? CLUSTER : COMPUTE_WARPS;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     ::"r"(mbarrier_at(threadIdx.x * 8)), "r"(count) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

INLINE void arrive(uint32 mbarrier) {  // of any block of the cluster
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}

// Waits until all flags of a half are at least `step`: h of its units is there.
INLINE void await_flags(const Place& here, const int* flags, int step) {
#if SPIN_LIMIT
    for (int tries = 0; tries < SPIN_LIMIT; ++tries) {
#else
    while (true) {
#endif
        int least = step;
        #pragma unroll
        for (int i = 0; i < FLAGS_OF_LANE; ++i) {
            const int number = i * 32 + here.lane;
            int flag = step;
            if (number < FLAGS_OF_HALF)
                asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];"
                             : "=r"(flag) : "l"(flags + number) : "memory");
            least = min(least, flag);
        }
        if (__all_sync(~0u, least >= step)) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            __syncwarp();
            return;
        }
    }
#if SPIN_LIMIT
    __trap();
#endif
}

// The loop of the copying warp: h of one turn after the other, each in halves. A block copies its
// part of a half into all blocks of the cluster.
INLINE void copy_hidden(const Place& here, const Exchange& exchange, int count) {
    constexpr int PART = HALF_BYTES / CLUSTER;
    const int part = cluster_rank() * PART, first_half = blockIdx.x / CLUSTER % HALVES;
    const uint32 mbarriers = mbarrier_at(0), target = mbarrier_at(AT_HIDDEN) + part;
    int turn = 0;
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set, ++turn)
            #pragma unroll 1
            for (int which = 0; which < HALVES; ++which) {
                const int half = which ^ first_half;
                await_flags(here, exchange.flags + set * BLOCKS + half * FLAGS_OF_HALF, i);
                if (here.lane == 0) {
                    if (which == 0) mbarrier_wait(mbarriers + EMPTY, ~turn & 1);
                    const uint32 full = mbarriers + FULL + half * 8;
                    mbarrier_expect(full, HALF_BYTES);
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                        ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                        ::"r"(target + half * HALF_BYTES),
                        "l"(exchange.hidden_of(set, i) + half * HALF_BYTES + part), "n"(PART),
                        "r"(full), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
                }
                __syncwarp();
            }
}

// The loop of the publishing warp: once all warps have stored h, it sets the block's flag.
INLINE void publish_hidden(const Place& here, const Exchange& exchange, int count) {
    if (here.lane) return;
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set) {
            mbarrier_wait(mbarrier_at(STORED + set * 8), i & 1);
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.b32 [%0], %1;"
                         ::"l"(exchange.flags + set * BLOCKS + here.block), "r"(i) : "memory");
        }
}

// Stores two units of a row of h where other blocks will copy it from.
INLINE void store_hidden(const Place& here, const Slot& slot, unsigned char* exchange,
                         Message message) {
    *reinterpret_cast<uint32*>(exchange +
                               ((here.group(slot) * TILES + slot.tile) * 8 + here.group_of_lane) *
                                   16 + here.thread_in_group * 4) = message.bits;
}

// Tells the publishing warp that this warp has stored all that it has of a set's h.
INLINE void signal_stored(const Place& here, int set) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads what threads stored
    __syncwarp();
    if (here.lane == 0) arrive(mbarrier_at(STORED + set * 8));
}
