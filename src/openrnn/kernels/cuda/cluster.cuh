// Blocks of a cluster: who owns which units, distributed shared memory, mbarriers.

// Groups of 8 units are dealt out evenly: a block owns those from its first to the next block's.
INLINE int first_group_of(int block) { return (block * (UNITS / 8) + CLUSTER - 1) / CLUSTER; }
INLINE int owner_of(int group) { return group * CLUSTER / (UNITS / 8); }

#if CLUSTER > 1
// this block's rank in the cluster, read anew wherever it is asked for
INLINE int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// an address in this block's shared memory, mapped to another block's
INLINE uint32 remote(uint32 place, int block) {
    uint32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
    return there;
}

// all threads of the cluster have arrived, and see what the others wrote before
INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::
                     : "memory");
}

// the four warps of a warpgroup have arrived
INLINE void warpgroup_barrier(int number) {
    asm volatile("barrier.sync %0, 128;" ::"r"(number + WARPGROUP_BARRIERS) : "memory");
}

// st.async: stores into another block, whose mbarrier counts the bytes
INLINE void store_async(uint32 target, uint4 value, uint32 mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(target), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w), "r"(mbarrier) : "memory");
}

INLINE void store_async(uint32 target, float low, float high, uint32 mbarrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 "
                 "[%0], {%1, %2}, [%3];" ::"r"(target), "r"(__float_as_uint(low)),
                 "r"(__float_as_uint(high)), "r"(mbarrier) : "memory");
}
#else
INLINE int cluster_rank() { return 0; }
INLINE void cluster_barrier() {}
#endif

#if CLUSTER > 1 || LAYERS > 1
// one thread opens the next phase of an mbarrier, which ends when so many bytes have arrived
INLINE void mbarrier_expect(uint32 mbarrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier),
                 "r"(bytes) : "memory");
}

// one thread says that it has got so far; or, for its warp, one of its lanes
INLINE void arrive(uint32 mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
INLINE void arrive_warp(int lane, uint32 mbarrier) {
    __syncwarp();
    if (lane == 0) arrive(mbarrier);
}

// an mbarrier whose phases end after so many arrivals and all bytes that these announce
INLINE void mbarrier_init(uint32 mbarrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Waits for the end of a phase. Kernels under test trap after SPIN_LIMIT polls; 0 waits for ever.
// The acquire has the scope of the block, as CUTLASS has it for copies of other blocks: what
// arrives lies in this block's shared memory. Scope cluster would invalidate L1 in each step.
INLINE void mbarrier_wait(uint32 mbarrier, uint32 phase) {
    uint32 over = 0;
#if SPIN_LIMIT
    for (int tries = 0; tries < SPIN_LIMIT; ++tries) {
#else
    while (true) {
#endif
        asm volatile("{\n.reg .pred over;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, over;\n}" : "=r"(over) : "r"(mbarrier), "r"(phase)
                     : "memory");
        if (over) return;
    }
#if SPIN_LIMIT
    __trap();
#endif
}
#endif

#if CLUSTER > 1
// COUNT mbarriers whose first phase awaits so many bytes; with ODD_ONLY only that of odd ones is
// opened. All threads see what the others wrote before.
template <int COUNT, bool ODD_ONLY = false>
INLINE void open_mbarriers(uint32 mbarriers, int bytes) {
    const uint32 mbarrier = mbarriers + threadIdx.x * 8;
    if (threadIdx.x < COUNT) mbarrier_init(mbarrier, 1);
    __syncthreads();
    if (threadIdx.x < COUNT && (!ODD_ONLY || threadIdx.x & 1)) mbarrier_expect(mbarrier, bytes);
}
#else
template <int COUNT, bool ODD_ONLY = false>
INLINE void open_mbarriers(uint32, int) {
    __syncthreads();
}
#endif
