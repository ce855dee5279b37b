// Flag buffers: values in global memory that say themselves whether they have arrived.
//
// Their place is filled with ones beforehand. All ones means "not arrived yet", and what is stored
// there is never that. So no flag, no fence and no barrier stands beside the values.

template <class Value>
INLINE uint4 poll(const Value* place) {
    uint4 found;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                 : "l"(place) : "memory");
    return found;
}

INLINE bool arrived(uint4 words) {
    return words.x != ~0u && words.y != ~0u && words.z != ~0u && words.w != ~0u;
}

// Polls again for what has not arrived, all of it at once, because a poll takes half a microsecond,
// until all has. poll_again(i): the poll for number i. Whether any was not there at first.
template <int COUNT, class PollAgain>
INLINE bool await_arrival(uint4 (&found)[COUNT], PollAgain poll_again) {
    bool early = false;
#if SPIN_LIMIT
    int tries = 0;
#endif
    while (true) {
        bool all = true;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) all &= arrived(found[i]);
        if (all) return early;
        early = true;
#if SPIN_LIMIT
        if (++tries > SPIN_LIMIT) __trap();
#endif
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (!arrived(found[i])) found[i] = poll_again(i);
    }
}

// A user's NaN, or two in 16 bits, with that pattern are replaced by others.
template <bool TWO_VALUES>
INLINE uint32 not_all_ones(uint32 bits) {
    return bits == ~0u ? (TWO_VALUES ? 0x7fff7fffu : 0x7fffffffu) : bits;
}

// Stores two values into the flag buffer.
INLINE void publish(storage_t* place, Pair pair) {
#if NARROW
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;"
                 ::"l"(place), "r"(not_all_ones<true>(pair.bits)) : "memory");
#else
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};"
                 ::"l"(place), "r"(not_all_ones<false>(__float_as_uint(pair.low))),
                 "r"(not_all_ones<false>(__float_as_uint(pair.high))) : "memory");
#endif
}
#if HALF_OPERANDS
INLINE void publish(operand_t* place, Message message) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;"
                 ::"l"(place), "r"(not_all_ones<true>(message.bits)) : "memory");
}
#endif
