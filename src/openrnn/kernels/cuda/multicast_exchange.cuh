// How the operand (h, or gate gradients) travels between blocks of loops with multicast: the warps
// that compute store it, the publishing warp sets flags, the copying warp brings it.
//
// Each set has two buffers, for even and odd steps. A block stores what step i + 1 multiplies over
// what step i - 1 did. It may: it has the sums of step i over all of K, so every block's flag was
// at i, and a block sets that flag only after it has multiplied in step i - 1.

INLINE uint32 mbarrier_at(int offset) { return shared_address(shared) + offset; }

// mbarriers: FULL awaits the bytes of a half of the operand; EMPTY all blocks of the cluster, which
// have read it; STORED all warps that compute.
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

// Between a thread's stores to global memory and a copy by TMA: in the thread that stored, and
// in the thread that copies, after it has seen the flag. PTX asks for such a fence on the way,
// and does not say plainly at which end; the second cost no time that could be measured.
INLINE void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Waits until all flags of a half are at least `step`: what its blocks store is there.
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

// The loop of the copying warp: the operand of one turn after the other, each in halves. A block
// copies its part of a half into all blocks of the cluster.
INLINE void copy_operand(const Place& here, const Exchange& exchange, int count) {
    constexpr int PART = HALF_BYTES / CLUSTER;
    const int part = cluster_rank() * PART;
    const int first_half = blockIdx.x / (CLUSTER * K_PARTS) % HALVES;  // not the same in all blocks
    const uint32 mbarriers = mbarrier_at(0), target = mbarrier_at(AT_OPERAND) + part;
    int turn = 0;
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set, ++turn)
            #pragma unroll 1
            for (int which = 0; which < HALVES; ++which) {
                const int half = which ^ first_half;
                const int source = here.part_of_k() * HALVES + half;
                await_flags(here, exchange.flags + set * BLOCKS + source * FLAGS_OF_HALF, i);
                if (here.lane == 0) {
                    fence_copies();
                    if (which == 0) mbarrier_wait(mbarriers + EMPTY, ~turn & 1);
                    const uint32 full = mbarriers + FULL + half * 8;
                    mbarrier_expect(full, HALF_BYTES);
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                        ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                        ::"r"(target + half * HALF_BYTES),
                        "l"(exchange.operand_of(set, i) + source * HALF_BYTES + part), "n"(PART),
                        "r"(full), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
                }
                __syncwarp();
            }
}

// The loop of the publishing warp: once all warps have stored theirs, it sets the block's flag.
INLINE void publish_operand(const Place& here, const Exchange& exchange, int count) {
    if (here.lane) return;
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set) {
            mbarrier_wait(mbarrier_at(STORED + set * 8), i & 1);
            asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.b32 [%0], %1;"
                         ::"l"(exchange.flags + set * BLOCKS + here.block), "r"(i) : "memory");
        }
}

// The start of a block: the batch row of each of its rows, mbarriers. Returns how many steps the
// longest of its rows has.
template <class Args>
INLINE int begin_block(const Args& args, const Place& here, int* rows) {
    number_rows<ROWS, THREADS>(rows, here.first_row, args.batch, LENGTHS ? args.order : nullptr);
    begin_mbarriers();
    cluster_barrier();
    return int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
}

// What a warp's products have in common.
struct Turns {
    uint32 full, their_empty;  // mbarriers: of its half of K, and a lane's, of one block each
    uint32 a, b;               // lower halves of descriptors: of R, and of the operand

    INLINE Turns(const Place& here, const unsigned char* others) {
        const int half_of_k = here.warp / 4;
        full = mbarrier_at(FULL + half_of_k * 8);
        their_empty = remote(mbarrier_at(EMPTY), min(here.lane, CLUSTER - 1));
        a = matrix_descriptor(others);
        b = descriptor_low(mbarrier_at(AT_OPERAND) + half_of_k * HALF_BYTES, CHUNK_BYTES);
    }
    // One turn of a set, once its operand is there: then all shares of its sums are.
    INLINE void multiply(const Place& here, const Matrix& matrix, int set, uint32 turn) const {
        mbarrier_wait(full, turn & 1);
        multiply_half(here, matrix, a, b, set);
        compute_barrier();
        if (here.warp == 0 && here.lane < CLUSTER) arrive(their_empty);  // it was read
    }
};

// The roles of warps: `compute` is the loop of those that multiply.
template <class Compute>
INLINE void run_warps(const Place& here, const Exchange& exchange, int count, Compute compute) {
    if (here.warp < COMPUTE_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        compute();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (here.warp == COMPUTE_WARPS) copy_operand(here, exchange, count);
        if (here.warp == COMPUTE_WARPS + 1) publish_operand(here, exchange, count);
    }
    cluster_barrier();  // no block leaves while another may still write to it
}

// Tells the publishing warp that this warp has stored all that it has of a set.
INLINE void signal_stored(const Place& here, int set) {
    fence_copies();
    __syncwarp();
    if (here.lane == 0) arrive(mbarrier_at(STORED + set * 8));
}
