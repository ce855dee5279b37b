// What input warps do in forward and backward: they poll for values of another layer, y or gate
// gradients, and put them into shared memory, as the operand of their product.
//
// A thread polls a step or two ahead: a poll takes half a microsecond, as long as a step of the
// loop. What has not arrived is polled again.
//
// OPERAND_K: values of a row of the operand, the first ones of a row in memory.

constexpr int ROW_PIECES = OPERAND_K / PIECE;  // of 16 bytes in memory
constexpr int POLLS = (ROWS * ROW_PIECES + THREADS - 1) / THREADS;  // of a thread, a step
constexpr int AHEAD = POLLS <= 4 ? 2 : 1;                           // steps
static_assert(OPERAND_K % PIECE == 0, "whole pieces");
static_assert(POLLS == POLLS_GIVEN, "codegen/cluster_stack_config.py counts polls otherwise");
static_assert(AHEAD == 1 || POLLS_IN_FLIGHT == POLLS, "two steps ahead in one round each");

// the input warps of a block
INLINE void input_barrier() { sync_barrier<INPUT_BARRIER, THREADS>(); }

// Of a thread's poll number p: the row, and the piece of 16 bytes in it.
struct Polled {
    int row, piece;
    INLINE Polled(const Place& here, int p) {
        if constexpr (ROW_PIECES % THREADS == 0) {  // rows are the same for all threads
            row = p / (ROW_PIECES / THREADS);
            piece = p % (ROW_PIECES / THREADS) * THREADS + here.thread;
        } else {
            row = (p * THREADS + here.thread) / ROW_PIECES;
            piece = (p * THREADS + here.thread) % ROW_PIECES;
        }
    }
    INLINE int place() const {  // in the operand
        const int k = piece * PIECE;
        return operand_offset(k / PIECE_K, row / 8, row % 8) + k % PIECE_K * sizeof(operand_t);
    }
};

INLINE void store_operand(unsigned char* place, uint4 words) {
#if HALF_OPERANDS
    *reinterpret_cast<uint2*>(place) =
        make_uint2(pack(__uint_as_float(words.x), __uint_as_float(words.y)),
                   pack(__uint_as_float(words.z), __uint_as_float(words.w)));
#else
    *reinterpret_cast<uint4*>(place) = make_uint4(rounded(words.x), rounded(words.y),
                                                  rounded(words.z), rounded(words.w));
#endif
}

// Where a poll reads, in 16 bytes from the first of row 0; NOWHERE where the batch has no such row.
constexpr uint32 NOWHERE = ~0u;

// What a thread polls for in each step.
struct Polls {
    const storage_t* first;  // of the first step, in row 0
    int64 step_bytes;
    int row_values;
    const int* rows;
    uint32 offset[POLLS_IN_FLIGHT];  // of the first polls of a step
    uint4 found[AHEAD][POLLS_IN_FLIGHT];

    INLINE Polls(const Place& here, const storage_t* first, int64 step_bytes, int row_values,
                 const int* rows)
        : first(first), step_bytes(step_bytes), row_values(row_values), rows(rows) {
        find(here, 0, offset);
    }
    // Where the polls from number `done` on read.
    INLINE void find(const Place& here, int done, uint32 (&where)[POLLS_IN_FLIGHT]) const {
        #pragma unroll
        for (int p = 0; p < POLLS_IN_FLIGHT; ++p) {
            const Polled polled(here, done + p);
            const int b = polled.row < ROWS ? rows[polled.row] : -1;
            where[p] = b < 0 ? NOWHERE : uint32(b) * uint32(row_values / PIECE) + polled.piece;
        }
    }
    INLINE uint4 poll_for(int i, uint32 where) const {
        if (where == NOWHERE) return make_uint4(0, 0, 0, 0);
        return poll(advanced(first, i * step_bytes + int64(where) * 16));
    }
    // buffer: i % AHEAD, a constant, so that registers hold `found`
    INLINE void begin(int buffer, int i, const uint32 (&where)[POLLS_IN_FLIGHT]) {
        #pragma unroll
        for (int p = 0; p < POLLS_IN_FLIGHT; ++p) found[buffer][p] = poll_for(i, where[p]);
    }
    // Until what these polls ask for is here. Then it goes to the operand.
    INLINE void finish(const Place& here, int buffer, int i, unsigned char* operand, int done,
                       const uint32 (&where)[POLLS_IN_FLIGHT]) {
        uint4 (&words)[POLLS_IN_FLIGHT] = found[buffer];
        await_arrival(words, [&](int p) { return poll_for(i, where[p]); });
        #pragma unroll
        for (int p = 0; p < POLLS_IN_FLIGHT; ++p)
            if (where[p] != NOWHERE)
                store_operand(operand + Polled(here, done + p).place(), words[p]);
    }
    // the other polls of step i, one round after the other
    INLINE void finish_others(const Place& here, int i, unsigned char* operand) {
        #pragma unroll 1
        for (int done = POLLS_IN_FLIGHT; done < POLLS; done += POLLS_IN_FLIGHT) {
            uint32 where[POLLS_IN_FLIGHT];
            find(here, done, where);
            begin(0, i, where);
            finish(here, 0, i, operand, done, where);
        }
    }
};

// All steps of an input warp. operands: BUFFERS of BYTES each; multiply(i, operand): the product of
// step i and its way to the ring buffer. With one buffer it returns once all input warps have read
// that.
template <int BUFFERS, int BYTES, class Multiply>
INLINE void run_input_warp(const Place& here, Polls& polls, int count, unsigned char* operands,
                           Multiply multiply) {
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i)
        if (i < count) polls.begin(i, i, polls.offset);
    for (int first = 0; first < count; first += AHEAD)
        #pragma unroll
        for (int buffer = 0; buffer < AHEAD; ++buffer) {
            const int i = first + buffer;
            if (i >= count) break;
            unsigned char* const operand = operands + i % BUFFERS * BYTES;
            polls.finish(here, buffer, i, operand, 0, polls.offset);
            polls.finish_others(here, i, operand);
            if (i + AHEAD < count) polls.begin(buffer, i + AHEAD, polls.offset);
            input_barrier();  // all of the operand is there
            multiply(i, operand);
        }
}
