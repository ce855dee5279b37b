// Messages between the K_PARTS blocks that share K in backward: sums in float32, over the sender's
// part of K, for the cells of the block that receives them. A warp for cells sends its sums to the
// warp with the same place in each of the other blocks. A set has two buffers of messages, for even
// and odd steps.
//
// A block may write over what it sent two steps before: a block reads its messages of a step before
// it publishes gate gradients of that step, and what any block multiplies two steps later depends
// on all of those: each pair of cells has the sums of all parts of K, and so of all units.

#if PARTS_IN_CLUSTER
// The blocks are of one cluster. They store into each other's shared memory, and there an mbarrier
// for each warp, set and buffer counts the bytes. Bytes may come before the receiver says how many
// it expects: the phase still lacks its one arrival.
INLINE uint32 tagged(float sum, int) { return __float_as_uint(sum); }
INLINE float2 untagged(const uint32* words) {
    return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
}

INLINE void store_async(uint32 target, uint2 value, uint32 mbarrier) {
    store_async(target, __uint_as_float(value.x), __uint_as_float(value.y), mbarrier);
}

// The number of a warp's mbarrier and buffer in a step of a set.
INLINE int message_buffer(const Place& here, int set, int step) {
    return (set * 2 + (step & 1)) * CELL_WARPS + here.cell_warp();
}

// away: from this block's rank to the receiver's, as blocks that share K have consecutive ranks;
// sender: this block's index among those that send to the receiver.
INLINE void send_message(const Place& here, const Exchange&, int away, int sender, int set,
                         int step, const uint32 (&words)[MESSAGE_WORDS]) {
    const int rank = cluster_rank() + away, number = message_buffer(here, set, step);
    const uint32 mbarrier = remote(mbarrier_at(AT_MESSAGE_BARRIERS + number * 8), rank);
    const uint32 target = remote(mbarrier_at(AT_MESSAGES + number * MESSAGE_BUFFER_BYTES), rank) +
                          (sender * 32 + here.lane) * (MESSAGE_WORDS * 4);
    if constexpr (MESSAGE_WORDS % 4 == 0) {
        #pragma unroll
        for (int n = 0; n < MESSAGE_WORDS; n += 4)
            store_async(target + n * 4,
                        make_uint4(words[n], words[n + 1], words[n + 2], words[n + 3]), mbarrier);
    } else {  // a lane's words begin at a multiple of 8 bytes, not of 16
        #pragma unroll
        for (int n = 0; n < MESSAGE_WORDS; n += 2)
            store_async(target + n * 4, make_uint2(words[n], words[n + 1]), mbarrier);
    }
}

struct Messages {
    uint32 words[K_PARTS][MESSAGE_WORDS];

    // Waits for those of a step and reads them; through memory `read` is one poll.
    INLINE void read(const Place& here, const Exchange&, int set, int step) {
        const int number = message_buffer(here, set, step);
        const uint32 mbarrier = mbarrier_at(AT_MESSAGE_BARRIERS + number * 8);
        if (here.lane == 0) mbarrier_expect(mbarrier, MESSAGE_BUFFER_BYTES);
        mbarrier_wait(mbarrier, step >> 1 & 1);
        const uint32* const received =
            reinterpret_cast<const uint32*>(shared + AT_MESSAGES + number * MESSAGE_BUFFER_BYTES);
        #pragma unroll
        for (int sender = 0; sender < K_PARTS - 1; ++sender)
            #pragma unroll
            for (int n = 0; n < MESSAGE_WORDS; ++n)
                words[sender][n] = received[(sender * 32 + here.lane) * MESSAGE_WORDS + n];
    }
    INLINE bool are_of(int) const { return true; }
};
#else
// They go through memory, without a flag beside them: the lowest bit of each word says whether it
// is of this step. Each buffer has ones there before its first use, then 0, 1, 0 ... from use to
// use.
INLINE uint32 message_tag(int step) { return step >> 1 & 1; }

INLINE uint32 tagged(float sum, int step) {
    return (__float_as_uint(sum) & ~1u) | message_tag(step);
}
INLINE float2 untagged(const uint32* words) {
    return make_float2(__uint_as_float(words[0] & ~1u), __uint_as_float(words[1] & ~1u));
}

// A lane's place in the messages of one sender to one block.
INLINE unsigned char* message_place(const Place& here, unsigned char* messages, int sender) {
    return messages +
           ((sender * CELL_WARPS + here.cell_warp()) * 32 + here.lane) *
               (MESSAGE_WORDS * 4);
}

// away: from this block's number to the receiver's; sender: this block's index among those that
// send to the receiver.
INLINE void send_message(const Place& here, const Exchange& exchange, int away, int sender, int set,
                         int step, const uint32 (&words)[MESSAGE_WORDS]) {
    unsigned char* const place =
        message_place(here, exchange.messages_of(set, step, away), sender);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s)
        asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};"
                     ::"l"(place + s * 8), "r"(words[2 * s]), "r"(words[2 * s + 1])
                     : "memory");
}

// The messages of the other blocks, as a poll found them.
struct Messages {
    uint32 words[K_PARTS][MESSAGE_WORDS];

    INLINE void read(const Place& here, const Exchange& exchange, int set, int step) {
        #pragma unroll
        for (int sender = 0; sender < K_PARTS - 1; ++sender) {
            const unsigned char* const place =
                message_place(here, exchange.messages_of(set, step, 0), sender);
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s)
                asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];"
                             : "=r"(words[sender][2 * s]), "=r"(words[sender][2 * s + 1])
                             : "l"(place + s * 8) : "memory");
        }
    }
    INLINE bool are_of(int step) const {
        uint32 wrong = 0;
        #pragma unroll
        for (int sender = 0; sender < K_PARTS - 1; ++sender)
            #pragma unroll
            for (int word = 0; word < MESSAGE_WORDS; ++word)
                wrong |= words[sender][word] ^ message_tag(step);
        return !(wrong & 1);
    }
};
#endif
