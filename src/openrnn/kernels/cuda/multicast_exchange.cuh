// How the operand (h, or gate gradients) travels between blocks of loops with multicast: the warps
// that compute cells store it, the publishing thread counts the block, copying threads bring it.
//
// A counter of each set and split says how often the blocks of that split have published. All
// copying threads poll it. With a flag of each block, eight times as many sectors of L2, a step
// took up to half as long again. No block publishes step i + 1 before all have published step i.
//
// Each set has a ring of DEPTH buffers. One layer has two, for even and odd steps. A block stores
// what step i + 1 multiplies over what step i - 1 did. It may: it has the sums of step i over all
// of K, so every block had published step i, and a block does that only after it has multiplied in
// step i - 1.
//
// In a stack the layer that follows (above; in backward, below) multiplies the same values, and may
// be some steps late. So each layer has more buffers, and every DEPTH / 2 steps await_followers
// waits until the layer that follows has multiplied what is overwritten next.

// The flag buffer: counters [LAYERS, sets, SPLITS, 128 bytes], then backward's messages [LAYERS,
// sets, 2 (of even and of odd steps), BLOCKS, MESSAGES_BYTES], then what is published [LAYERS,
// sets, DEPTH, SPLITS, SPLIT_BYTES]. Counters and messages are filled with ones.
// the bytes of ROWS rows: those filled, and all
constexpr int FILLED_BYTES = LAYERS * SETS * (COUNTER_BYTES + 2 * BLOCKS * MESSAGES_BYTES);
constexpr int FLAG_BYTES = FILLED_BYTES + LAYERS * SETS * DEPTH * STEP_BYTES;
static_assert(FILLED_BYTES == FILLED_ROWS_GIVEN * 128 && FLAG_BYTES == FLAG_ROWS_GIVEN * 128,
              "codegen/multicast_config.py counts the flag buffer otherwise");
struct Exchange {
    unsigned char* counters;  // of the block's layer and first set
    unsigned char* messages;  // to the block, in the same set
    unsigned char* operand;   // of the layer and set
    int64 sets;

    template <class Args>
    INLINE Exchange(const Args& args, const Place& here) {
        sets = (args.batch + ROWS - 1) / ROWS * SETS;
        const int64 set = here.layer * sets + here.first_row / SET_ROWS, all = LAYERS * sets;
        unsigned char* const begin = reinterpret_cast<unsigned char*>(args.flag_buffer);
        counters = begin + set * COUNTER_BYTES;
        messages = begin + all * COUNTER_BYTES + (set * 2 * BLOCKS + here.block) * MESSAGES_BYTES;
        operand = begin + all * (COUNTER_BYTES + 2 * BLOCKS * MESSAGES_BYTES) +
                  set * (DEPTH * STEP_BYTES);
    }
    // Counters and published values of the layer `away` above the block's own.
    INLINE Exchange of_layer(int away) const {
        Exchange found = *this;
        found.counters += away * sets * COUNTER_BYTES;
        found.operand += away * sets * (DEPTH * STEP_BYTES);
        return found;
    }
    INLINE int* counter(int set, int split) const {  // how often blocks of a split have published
        return reinterpret_cast<int*>(counters + set * COUNTER_BYTES + split * 128);
    }
    INLINE unsigned char* operand_of(int set, int step) const {
        return operand + (set * DEPTH + (step & DEPTH - 1)) * STEP_BYTES;
    }
    // those to a block `away` blocks after this one
    INLINE unsigned char* messages_of(int set, int step, int away) const {
        return messages + ((set * 2 + (step & 1)) * BLOCKS + away) * MESSAGES_BYTES;
    }
};

// STACK: the layer that multiplies this one's values, counted from this one.
constexpr int LAYER_AFTER = -LAYER_BEFORE;

// Whether the stack has a layer `away` above this one.
INLINE bool has_layer(const Place& here, int away) {
    return here.layer + away >= 0 && here.layer + away < LAYERS;
}
// Whether a half of K has an operand in a turn; else its sums are zeros. In a stack the layer that
// comes first has no other layer's. Backward's first step of a set has no own gate gradients yet,
// and after the last one there are none of the other layer.
INLINE bool has_operand(const Place& here, int half, int turn, int count) {
    if (!STACK) return true;
    if (half == OTHER_LAYER)
        return has_layer(here, LAYER_BEFORE) && (!BACKWARD || turn < count * SETS);
    return !BACKWARD || turn >= SETS;
}

INLINE uint32 mbarrier_at(int offset) { return shared_address(shared) + offset; }

// mbarriers: those of AT_FULL await the bytes of a half of the operand; AT_EMPTY the PEERS, which
// have multiplied it; AT_SUMMED_UP the warps that multiply, which have stored their
// shares of sums; AT_READ and AT_STORED the warps that compute cells, which have read those and
// stored the next operand.
INLINE void begin_mbarriers() {
    const int offset = threadIdx.x * 8;
    if (offset < AT_ROWS) {
        const int count = offset < AT_EMPTY ? 1 : offset < AT_SUMMED_UP ? PEERS
            : offset < AT_READ ? PRODUCT_WARPS : offset < AT_MESSAGE_BARRIERS ? CELL_WARPS : 1;
        mbarrier_init(mbarrier_at(offset), count);
    }
    __syncthreads();
}

// Waits for an mbarrier of even and odd turns.
INLINE void await_turn(int mbarriers, int turn) {
    mbarrier_wait(mbarrier_at(mbarriers) + (turn & 1) * 8, turn / 2 & 1);
}

INLINE void arrive_remote(uint32 mbarrier) {  // of any block of the cluster
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// Tells an mbarrier of this block that the whole warp has got so far.
INLINE void arrive_warp(const Place& here, int mbarrier) {
    arrive_warp(here.lane, mbarrier_at(mbarrier));
}

// Between a thread's stores to global memory and a copy by TMA: in the thread that stored, and
// in the thread that copies, after it has seen the counter. PTX asks for such a fence on the way,
// and does not say plainly at which end; the second cost no time that could be measured.
INLINE void fence_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Waits until all blocks of a split have published `times` times: what they stored is in L2.
//
// The polls are relaxed. An acquire would also invalidate L1 at each of them, which takes up to 6%
// of a step. PTX's memory model asks for one, but only loads read L1: here a copy by TMA follows,
// which reads L2.
INLINE void await_published(const int* counter, int times) {
    int found;
#if SPIN_LIMIT
    for (int tries = 0;; ++tries) {
        if (tries > SPIN_LIMIT) __trap();
#else
    while (true) {
#endif
        asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        if (found + 1 >= times * BLOCKS_OF_SPLIT) return;  // it begins with -1
    }
}

// STACK: before step i of a set, where i is a multiple of SOME, waits until all blocks of the layer
// that follows have multiplied this layer's values of step i - SOME - 1, as the counters of that
// layer tell. No block reads the values of steps i - DEPTH to i - SOME - 1 any more then, and those
// of steps i to i + SOME - 1 may be stored over them.
INLINE void await_followers(const Place& here, const Exchange& exchange, int set, int i) {
    constexpr int SOME = DEPTH / 2;
    if (!STACK || i % SOME || i < SOME || !has_layer(here, LAYER_AFTER)) return;
    for (int split = 0; split < SPLITS; ++split)
        await_published(exchange.of_layer(LAYER_AFTER).counter(set, split), i - SOME + 1);
}

// From a block's rank to the next one's that multiplies the same operand.
constexpr int PEER_STRIDE = CLUSTER / PEERS;
// The block's number among PEERS, and a bit for the rank of each of them.
INLINE int peer_number() { return cluster_rank() / PEER_STRIDE; }
INLINE int peers_mask(const Place& here) {
    constexpr int FIRST_PART = ((1 << CLUSTER) - 1) / ((1 << PEER_STRIDE) - 1);
    return PARTS_IN_CLUSTER ? FIRST_PART << here.part_of_k() : FIRST_PART;
}

// The thread that copies one half of all operands, turn by turn: the block's part of it, into all
// PEERS.
INLINE void copy_operand(const Place& here, const Exchange& exchange, int count, int half) {
    constexpr int PART = HALF_BYTES / PEERS;
    const int split = STACK ? here.part_of_k() : here.part_of_k() * HALVES + half;
    const int begin =
        split * SPLIT_BYTES + (half == OWN_LAYER ? RECURRENT_OFFSET : 0) + peer_number() * PART;
    const Exchange source =
        STACK && half == OTHER_LAYER ? exchange.of_layer(LAYER_BEFORE) : exchange;
    // from a step to that of the published values
    const int ahead = !STACK ? 0 : half == OTHER_LAYER ? !BACKWARD : -BACKWARD;
    int turn = 0;
    for (int i = 0; i < steps_of_products(count); ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set, ++turn) {
            const int place = turn % BUFFERS * HALVES + half;
            const uint32 full = mbarrier_at(AT_FULL + place * 8);
            if (half == OWN_LAYER) await_followers(here, exchange, set, i);
            const bool exists = has_operand(here, half, turn, count);
            if (exists) {
                await_published(source.counter(set, split), i + ahead + 1);
                fence_copies();
            }
            if (turn >= BUFFERS) await_turn(AT_EMPTY, turn - BUFFERS);
            if (!exists) {
                arrive(full);
                continue;
            }
            mbarrier_expect(full, HALF_BYTES);
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                ".multicast::cluster [%0], [%1], %2, [%3], %4;"
                ::"r"(mbarrier_at(AT_OPERAND + place * HALF_BYTES + peer_number() * PART)),
                "l"(source.operand_of(set, i + ahead) + begin), "n"(PART), "r"(full),
                "h"((unsigned short)peers_mask(here)) : "memory");
        }
}

// The thread that publishes: once all warps have stored theirs, it counts the block.
INLINE void publish_operand(const Place& here, const Exchange& exchange, int count) {
    for (int i = 0; i < steps_published(count); ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set) {
            mbarrier_wait(mbarrier_at(AT_STORED + set * 8), i & 1);
            asm volatile("red.release.gpu.global.add.s32 [%0], 1;"
                         ::"l"(exchange.counter(set, here.block / BLOCKS_OF_SPLIT)) : "memory");
        }
}

// The start of a block: the batch row of each of its rows, mbarriers. Returns how many steps the
// longest of its rows has.
template <class Args>
INLINE int begin_block(const Args& args, const Place& here, int* rows) {
    number_rows<LENGTHS, ROWS, THREADS>(args, rows, here.first_row);
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
    const int first_half = K_WARPGROUPS > 1 ? here.warp / 4 : 0;
    const uint32 a = matrix_descriptor(others);
    const uint32 b = descriptor_low(mbarrier_at(AT_OPERAND) + first_half * HALF_BYTES, PIECE_BYTES);
    for (int turn = 0; turn < steps_of_products(time.count) * SETS; ++turn) {
        const int buffer = turn % BUFFERS;
        const uint32 operand = b + buffer * (HALVES * HALF_BYTES / 16);
        const uint32 full = mbarrier_at(AT_FULL + (buffer * HALVES + first_half) * 8);
        Sums sums = {};
        mbarrier_wait(full, turn / BUFFERS & 1);
        // the other layer's values are multiplied while those of its own are awaited
        if (STACK && has_operand(here, first_half, turn, time.count))
            product_of<0, HALF_TILES>(sums, matrix, a, operand);
        if (K_WARPGROUPS == 1) mbarrier_wait(full + 8, turn / BUFFERS & 1);
        if (!STACK)
            product_of<0, K_TILES>(sums, matrix, a, operand);
        else if (K_WARPGROUPS == 1 && has_operand(here, OWN_LAYER, turn, time.count))
            product_of<K_TILES - HALF_TILES, K_TILES>(sums, matrix, a, operand);
        if (turn >= 2) await_turn(AT_READ, turn - 2);
        store_shares(here, sums, turn);
        arrive_warp(here, AT_SUMMED_UP + (turn & 1) * 8);
    }
}

// The warp that tells the PEERS which turns this block has multiplied: their operands may be
// overwritten.
INLINE void release_operands(const Place& here, int count) {
    for (int turn = 0; turn < steps_of_products(count) * SETS; ++turn) {
        await_turn(AT_SUMMED_UP, turn);
        arrive_remote(remote(mbarrier_at(AT_EMPTY + (turn & 1) * 8), here.peer(here.lane)));
    }
}

// Brings the next set's cells to where the loop has its own. With code for each set kernels of four
// sets spilled.
template <class SetCells>
INLINE void rotate(SetCells (&cells)[SETS_OF_WARP]) {
    const SetCells first = cells[0];
    #pragma unroll
    for (int set = 1; set < SETS_OF_WARP; ++set) cells[set - 1] = cells[set];
    cells[SETS_OF_WARP - 1] = first;
}

// The roles of warps. Each kind takes as many registers as it needs of the 128 that every thread
// begins with.
template <class Multiply, class Compute>
INLINE void run_warps(const Place& here, const Exchange& exchange, int count, Multiply multiply,
                      Compute compute) {
    if (here.warp < PRODUCT_WARPS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        multiply();
    } else if (here.warp < PRODUCT_WARPS + CELL_WARPGROUPS * CELL_WARPS) {
        if (CELL_REGISTERS > 128)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CELL_REGISTERS));
        else if (CELL_REGISTERS < 128)
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CELL_REGISTERS));
        compute();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHER_REGISTERS));
        const int role = here.warp - PRODUCT_WARPS - CELL_WARPGROUPS * CELL_WARPS;
        if (here.lane == 0 && role < HALVES) copy_operand(here, exchange, count, role);
        if (here.lane == 0 && role == HALVES) publish_operand(here, exchange, count);
        if (here.lane < PEERS && role > HALVES) release_operands(here, count);
        __syncwarp();
    }
    cluster_barrier();  // no block leaves while another may still write to it
}

// Tells the publishing warp that this warp has stored all that it has of a set.
INLINE void signal_stored(const Place& here, int set) {
    fence_copies();
    arrive_warp(here, AT_STORED + set * 8);
}
