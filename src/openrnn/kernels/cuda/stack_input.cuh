// What input warps do in forward and backward: they poll for values of another layer, y or gate
// gradients, and put them into shared memory, as the operand of their product.
//
// A thread polls a step or two ahead: a poll takes half a microsecond, as long as a step of the
// loop. What has not arrived is polled again.
//
// OPERAND_K: values of a row of the operand, the first ones of a row in memory.

constexpr int ROW_CHUNKS = OPERAND_K / CHUNK;  // of 16 bytes in memory
constexpr int POLLS = (ROWS * ROW_CHUNKS + THREADS - 1) / THREADS;  // of a thread, a step
constexpr int IN_FLIGHT = POLLS < 8 ? POLLS : 8;                    // of them at a time
constexpr int AHEAD = POLLS <= 4 ? 2 : 1;                           // steps
static_assert(OPERAND_K % CHUNK == 0, "whole chunks");

// the input warps of a block
INLINE void input_barrier() { asm volatile("barrier.sync 2, %0;" ::"n"(THREADS) : "memory"); }

// Of a thread's poll number p: where it is, in 16 bytes from the first of row 0, NOWHERE for none;
// and where in the operand it goes.
constexpr uint32 NOWHERE = ~0u;
INLINE uint32 poll_offset(const Place& here, int p, int row_values, const int* rows) {
    const int number = p * THREADS + here.thread, r = number / ROW_CHUNKS;
    const int b = r < ROWS ? rows[r] : -1;
    return b < 0 ? NOWHERE : uint32(b) * uint32(row_values / CHUNK) + number % ROW_CHUNKS;
}
INLINE int poll_place(const Place& here, int p) {
    const int number = p * THREADS + here.thread;
    const int r = number / ROW_CHUNKS, k = number % ROW_CHUNKS * CHUNK;
    return operand_offset(k / CHUNK_K, r / 8, r % 8) + k % CHUNK_K * sizeof(operand_t);
}

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

// What a thread polls for in each step.
struct Polls {
    const storage_t* first;  // of the first step, in row 0
    int64 step_bytes;
    int row_values;
    const int* rows;
    uint32 offset[IN_FLIGHT];  // of the polls on their way
    int place[IN_FLIGHT];
    uint4 found[AHEAD][IN_FLIGHT];

    INLINE Polls(const Place& here, const storage_t* first, int64 step_bytes, int row_values,
                 const int* rows)
        : first(first), step_bytes(step_bytes), row_values(row_values), rows(rows) {
        find(here, 0);
    }
    // the polls from number `done` on
    INLINE void find(const Place& here, int done) {
        #pragma unroll
        for (int p = 0; p < IN_FLIGHT; ++p) {
            offset[p] = poll_offset(here, done + p, row_values, rows);
            place[p] = poll_place(here, done + p);
        }
    }
    INLINE uint4 poll_for(int i, int p) const {
        if (offset[p] == NOWHERE) return make_uint4(0, 0, 0, 0);
        return poll(advanced(first, i * step_bytes + int64(offset[p]) * 16));
    }
    // turn: i % AHEAD, a constant, so that registers hold `found`
    INLINE void begin(int turn, int i) {
        #pragma unroll
        for (int p = 0; p < IN_FLIGHT; ++p) found[turn][p] = poll_for(i, p);
    }
    // until what these polls ask for is here; then it goes to the operand
    INLINE void finish(int turn, int i, unsigned char* operand) {
        uint4 (&words)[IN_FLIGHT] = found[turn];
        await_arrival(words, [&](int p) { return poll_for(i, p); });
        #pragma unroll
        for (int p = 0; p < IN_FLIGHT; ++p)
            if (offset[p] != NOWHERE) store_operand(operand + place[p], words[p]);
    }
    // the other polls of step i, some at a time
    INLINE void finish_others(const Place& here, int i, unsigned char* operand) {
        if (POLLS == IN_FLIGHT) return;
        #pragma unroll 1
        for (int done = IN_FLIGHT; done < POLLS; done += IN_FLIGHT) {
            find(here, done);
            begin(0, i);
            finish(0, i, operand);
        }
        find(here, 0);
    }
};

// All steps of an input warp. operands: BUFFERS of BYTES each; multiply(i, operand): the product of
// step i and its way to the ring buffer. With one buffer it returns once all input warps have read
// that.
template <int BUFFERS, int BYTES, class Multiply>
INLINE void run_input_warp(const Place& here, Polls& polls, int count, unsigned char* operands,
                           Multiply multiply) {
    #pragma unroll
    for (int turn = 0; turn < AHEAD; ++turn)
        if (turn < count) polls.begin(turn, turn);
    for (int first = 0; first < count; first += AHEAD)
        #pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn) {
            const int i = first + turn;
            if (i >= count) break;
            unsigned char* const operand = operands + i % BUFFERS * BYTES;
            polls.finish(turn, i, operand);
            polls.finish_others(here, i, operand);
            if (i + AHEAD < count) polls.begin(turn, i + AHEAD);
            input_barrier();  // all of the operand is there
            multiply(i, operand);
        }
}
