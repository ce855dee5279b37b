// One loop, or those of all layers of a stack: which layer a block runs, and who fills its ring
// buffer of inputs.
//
// In a stack (LAYERS > 1) a cluster has one layer and some rows of the batch. Half of a block's
// warps, the loop warps, run the loop as if there were no others. The other half, the input warps,
// multiply W_ih by h of the layer below or, in backward, by the gate gradients of the layer above.
// An input warp serves one loop warp: it has the same place, and fills its ring buffer. The first
// layer to run has its inputs in memory, and copies them.

INLINE int layer_of_block() { return LAYERS > 1 ? blockIdx.x / CLUSTER % LAYERS : 0; }

// Which of a layer's clusters a block is in; first: the launch's first row, in a stack; rows: that
// a cluster has.
INLINE int64 cluster_of_layer(int64 first, int rows) {
    return LAYERS > 1 ? first / rows + blockIdx.x / (CLUSTER * LAYERS) : blockIdx.x / CLUSTER;
}

// all threads of all blocks that exchange h or gate gradients
INLINE void blocks_barrier() {
#if CLUSTER > 1
    cluster_barrier();
#else
    __syncthreads();
#endif
}

// the threads of all loop warps
INLINE void loop_barrier() {
#if LAYERS > 1
    sync_barrier<LOOP_BARRIER, THREADS>();
#else
    __syncthreads();
#endif
}

#if LAYERS > 1
#include "flag_buffer.cuh"
static_assert(!WGMMA && TILES_IN_FLIGHT == 1, "what input warps can do");
static_assert((STAGES & STAGES - 1) == 0, "i / STAGES and i % STAGES are a shift and a mask");

// the mbarriers of ring buffers, of each warp and stage two: filled and empty
INLINE void begin_ring_barriers(uint32 mbarriers) {
    if (threadIdx.x < 2 * WARPS * STAGES) mbarrier_init(mbarriers + threadIdx.x * 8, 1);
}
static_assert(2 * WARPS * STAGES <= BLOCK_THREADS, "a thread for each");

// How a loop warp and its input warp share the ring buffer.
struct RingBarriers {
    uint32 mbarriers;  // of the warp's ring buffer
    int lane;
    bool used;  // the layer has input warps at work

    template <class Place>
    INLINE RingBarriers(const Place& here, uint32 all, bool used)
        : mbarriers(all + here.warp * (2 * STAGES * 8)), lane(here.lane), used(used) {}

    INLINE uint32 filled(int i) const { return mbarriers + i % STAGES * 8; }
    INLINE uint32 empty(int i) const { return mbarriers + (STAGES + i % STAGES) * 8; }

    // the loop warp waits for the inputs of step i
    INLINE void await_inputs(int i) const {
        if (used) mbarrier_wait(filled(i), i / STAGES & 1);
    }
    // the loop warp has read them
    INLINE void release(int i) const {
        if (used) arrive_warp(lane, empty(i));
    }
    // the input warp waits until the stage of step i is free
    INLINE void await_stage(int i) const {
        if (i >= STAGES) mbarrier_wait(empty(i), i / STAGES - 1 & 1);
    }
    // the input warp has filled it
    INLINE void fill(int i) const { arrive_warp(lane, filled(i)); }
};
#else
INLINE void begin_ring_barriers(uint32) {}

struct RingBarriers {
    template <class Place>
    INLINE RingBarriers(const Place&, uint32, bool) {}
    INLINE void await_inputs(int) const {}
    INLINE void release(int) const {}
};
#endif
