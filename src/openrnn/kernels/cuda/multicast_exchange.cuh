// How the operand (h, or gate gradients) travels between blocks of loops with multicast: the warps
// that compute cells store it, the publishing thread counts the block, copying threads bring it.
//
// A counter of each set and half of K says how often the blocks of that half have published. All
// copying threads poll it. With a flag of each block, eight times as many sectors of L2, a step
// took up to half as long again. No block publishes step i + 1 before all have published step i.
//
// Each set has two buffers, for even and odd steps. A block stores what step i + 1 multiplies over
// what step i - 1 did. It may: it has the sums of step i over all of K, so every block had
// published step i, and a block does that only after it has multiplied in step i - 1.

INLINE uint32 mbarrier_at(int offset) { return shared_address(shared) + offset; }

// mbarriers: FULL awaits the bytes of a half of the operand; EMPTY all blocks of the cluster, which
// have multiplied it; SUMMED_UP the warps that multiply, which have stored their shares of sums;
// READ and STORED the warps that compute cells, which have read those and stored the next operand.
INLINE void begin_mbarriers() {
    const int offset = threadIdx.x * 8;
    if (offset < STORED + SETS * 8) {
        const int count = offset < EMPTY ? 1 : offset < SUMMED_UP ? CLUSTER
            : offset < READ ? PRODUCT_WARPS : CELL_WARPS;
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                     ::"r"(mbarrier_at(offset)), "r"(count) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

// Waits for an mbarrier of even and odd turns.
INLINE void await_turn(int mbarriers, int turn) {
    mbarrier_wait(mbarrier_at(mbarriers) + (turn & 1) * 8, turn / 2 & 1);
}

INLINE void arrive(uint32 mbarrier) {  // of any block of the cluster
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Tells an mbarrier of this block that the whole warp has got so far.
INLINE void arrive_warp(const Place& here, int mbarrier) {
    __syncwarp();
    if (here.lane == 0) arrive(mbarrier_at(mbarrier));
}

// Between a thread's stores to global memory and a copy by TMA: in the thread that stored, and
// in the thread that copies, after it has seen the counter. PTX asks for such a fence on the way,
// and does not say plainly at which end; the second cost no time that could be measured.
INLINE void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Waits until all blocks of a half of K have published `times` times: what they stored is there.
INLINE void await_published(const int* counter, int times) {
    int found;
#if SPIN_LIMIT
    for (int tries = 0;; ++tries) {
        if (tries > SPIN_LIMIT) __trap();
#else
    while (true) {
#endif
        asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if (found + 1 >= times * BLOCKS_OF_HALF) return;  // it begins with -1
    }
}

// The thread that copies one half of all operands, turn by turn: the block's part of it, into all
// blocks of the cluster.
INLINE void copy_operand(const Place& here, const Exchange& exchange, int count, int half) {
    constexpr int PART = HALF_BYTES / CLUSTER;
    const int part = cluster_rank() * PART, source = here.part_of_k() * HALVES + half;
    int turn = 0;
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set, ++turn) {
            await_published(exchange.counter(set, source), i + 1);
            fence_copies();
            if (turn >= BUFFERS) await_turn(EMPTY, turn - BUFFERS);
            const int place = turn % BUFFERS * HALVES + half;
            const uint32 full = mbarrier_at(FULL + place * 8);
            mbarrier_expect(full, HALF_BYTES);
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                ::"r"(mbarrier_at(AT_OPERAND + place * HALF_BYTES + part)),
                "l"(exchange.operand_of(set, i) + source * HALF_BYTES + part), "n"(PART),
                "r"(full), "h"((unsigned short)((1 << CLUSTER) - 1)) : "memory");
        }
}

// The thread that publishes: once all warps have stored theirs, it counts the block.
INLINE void publish_operand(const Place& here, const Exchange& exchange, int count) {
    for (int i = 0; i < count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set) {
            mbarrier_wait(mbarrier_at(STORED + set * 8), i & 1);
            asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.s32 [%0], 1;"
                         ::"l"(exchange.counter(set, here.block / BLOCKS_OF_HALF)) : "memory");
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

// The loop of a warp that multiplies: its shares of the sums of one turn after the other.
template <class Args, class Time>
INLINE void multiply(const Args& args, const Place& here, const Time& time) {
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    load_weights(args, here, matrix, others);
    const int half_of_k = here.warp / 4;
    const uint32 a = matrix_descriptor(others);
    const uint32 b = descriptor_low(mbarrier_at(AT_OPERAND) + half_of_k * HALF_BYTES, CHUNK_BYTES);
    for (int turn = 0; turn < time.count * SETS; ++turn) {
        const int buffer = turn % BUFFERS;
        Sums sums = {};
        mbarrier_wait(mbarrier_at(FULL + (buffer * HALVES + half_of_k) * 8), turn / BUFFERS & 1);
        product_of(sums, matrix, a, b + buffer * (HALVES * HALF_BYTES / 16));
        if (turn >= 2) await_turn(READ, turn - 2);
        store_shares(here, sums, turn);
        arrive_warp(here, SUMMED_UP + (turn & 1) * 8);
    }
}

// A turn of a warp that computes cells begins: all shares of its sums are there. All warps that
// multiply have read the operand then, which one warp tells the cluster.
INLINE void await_sums(const Place& here, int turn) {
    await_turn(SUMMED_UP, turn);
    if (here.warp == PRODUCT_WARPS && here.lane < CLUSTER)
        arrive(remote(mbarrier_at(EMPTY + (turn & 1) * 8), here.lane));
}

// Brings the next set's cells to where the loop has its own. With code for each set kernels of four
// sets spilled.
template <class SetCells>
INLINE void rotate(SetCells (&cells)[SETS]) {
    const SetCells first = cells[0];
    #pragma unroll
    for (int set = 1; set < SETS; ++set) cells[set - 1] = cells[set];
    cells[SETS - 1] = first;
}

// The roles of warps. Each kind takes as many registers as it needs of the 128 that every thread
// begins with.
template <class Multiply, class Compute>
INLINE void run_warps(const Place& here, const Exchange& exchange, int count, Multiply multiply,
                      Compute compute) {
    if (here.warp < PRODUCT_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        multiply();
    } else if (here.warp < PRODUCT_WARPS + CELL_WARPS) {
        if (CELL_REGISTERS > 128)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CELL_REGISTERS));
        else
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CELL_REGISTERS));
        compute();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
        const int role = here.warp - PRODUCT_WARPS - CELL_WARPS;
        if (here.lane == 0 && role < HALVES) copy_operand(here, exchange, count, role);
        if (here.lane == 0 && role == HALVES) publish_operand(here, exchange, count);
        __syncwarp();
    }
    cluster_barrier();  // no block leaves while another may still write to it
}

// Tells the publishing warp that this warp has stored all that it has of a set.
INLINE void signal_stored(const Place& here, int set) {
    fence_copies();
    arrive_warp(here, STORED + set * 8);
}
