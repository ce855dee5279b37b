// How a warp holds 8 units x 8 rows of the batch: a fragment, two values a lane.
//
// As sums of mma and as the cell sees it, a lane holds unit lane / 4 in rows 2 * (lane % 4) and the
// next. As stored and sent, row lane / 4 of units 2 * (lane % 4) and the next: consecutive memory.
// PTX calls lane / 4 the lane's group and lane % 4 the thread in group.

struct Pair {  // two neighbouring units of a row
#if NARROW
    uint32 bits;
#else
    float low, high;
#endif
};

INLINE uint32 transposed_bits(uint32 bits) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(bits));
    return bits;
}

// from one unit in two rows to two units of one row
INLINE Pair transposed(float first, float second) {
#if NARROW
    return {transposed_bits(pack(first, second))};
#else
    const uint32 a = __float_as_uint(first), b = __float_as_uint(second);
    const uint32 low = transposed_bits(__byte_perm(a, b, 0x5410));
    const uint32 high = transposed_bits(__byte_perm(a, b, 0x7632));
    return {__uint_as_float(__byte_perm(low, high, 0x5410)),
            __uint_as_float(__byte_perm(low, high, 0x7632))};
#endif
}

// A message: the pair of h that a lane sends to blocks that multiply it, in the type of operands.
// With HALF_OPERANDS, given the values before they were transposed, packing need not wait for that.
#if HALF_OPERANDS
struct Message {
    uint32 bits;
};
INLINE Message message_of(Pair pair) { return {pack(pair.low, pair.high)}; }
INLINE Message message_of(Pair, float first, float second) {
    return {transposed_bits(pack(first, second))};
}
#else
typedef Pair Message;
INLINE Message message_of(Pair pair) { return pair; }
INLINE Message message_of(Pair pair, float, float) { return pair; }
#endif

INLINE Message rounded(Message message) {
#if SHORT
    return message;
#else
    return {__uint_as_float(rounded(__float_as_uint(message.low))),
            __uint_as_float(rounded(__float_as_uint(message.high)))};
#endif
}

// 16 bytes of a row from neighbouring lanes: 8 units of four lanes, or 4 units of two
INLINE uint4 gathered(Message message) {
#if SHORT
    return make_uint4(__shfl_sync(~0u, message.bits, 0, 4), __shfl_sync(~0u, message.bits, 1, 4),
                      __shfl_sync(~0u, message.bits, 2, 4), __shfl_sync(~0u, message.bits, 3, 4));
#else
    const uint32 low = __float_as_uint(message.low), high = __float_as_uint(message.high);
    return make_uint4(__shfl_sync(~0u, low, 0, 2), __shfl_sync(~0u, high, 0, 2),
                      __shfl_sync(~0u, low, 1, 2), __shfl_sync(~0u, high, 1, 2));
#endif
}
[[maybe_unused]] constexpr int PIECE_LANES = SHORT ? 4 : 2;  // lanes with the same gathered bytes

INLINE Pair load_pair(const storage_t* source) {
#if NARROW
    return {uint32(source[0]) | uint32(source[1]) << 16};
#else
    return {source[0], source[1]};
#endif
}

INLINE void store(storage_t* target, Pair pair) {
#if NARROW
    *reinterpret_cast<uint32*>(target) = pair.bits;
#else
    *reinterpret_cast<float2*>(target) = make_float2(pair.low, pair.high);
#endif
}
#if HALF_OPERANDS
INLINE void store(operand_t* target, Message message) {
    *reinterpret_cast<uint32*>(target) = message.bits;
}
#endif

// Stores a pair into a row of `units` values: with PADDED part of it may lie past the end.
INLINE void store_inside(storage_t* target, Pair pair, int64 unit, int64 units) {
#if PADDED
#if NARROW
    const storage_t first = storage_t(pair.bits), second = storage_t(pair.bits >> 16);
#else
    const storage_t first = pair.low, second = pair.high;
#endif
    const int left = int(units) - int(unit);
    if (units % 2 == 0) {
        if (left > 0) store(target, pair);
    } else {  // rows of pairs are not aligned
        if (left > 0) target[0] = first;
        if (left > 1) target[1] = second;
    }
#else
    store(target, pair);
#endif
}

// Zeros in so many rows, `step_bytes` apart, the first at `target`.
INLINE void store_zeros(storage_t* target, int64 step_bytes, int rows, int64 unit, int64 units) {
    #pragma unroll 1
    for (int r = 0; r < rows; ++r, target = advanced(target, step_bytes))
        store_inside(target, Pair{}, unit, units);
}

// The offset in a copied fragment of rows x 8 units from which a lane reads.
INLINE int fragment_offset(int lane) {
    return NARROW ? lane * 16 : ((lane & 3) * 16 + (lane >> 2)) * 4;
}

// COUNT fragments in 16 bits, 128 bytes each, transposed as they are read. source: with
// `fragment_offset`, of which a read of fewer than four takes that of the first lanes only.
template <int COUNT>
INLINE void load_transposed(const unsigned char* source, uint32 (&bits)[COUNT]) {
#if NARROW
    const uint32 place = shared_address(source);
    #pragma unroll
    for (int i = 0; i + 4 <= COUNT; i += 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[i]), "=r"(bits[i + 1]), "=r"(bits[i + 2]), "=r"(bits[i + 3])
                     : "r"(place + i * 128) : "memory");
    if (COUNT & 2) {
        constexpr int PAIR = COUNT & 2 ? COUNT & ~3 : 0;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(bits[PAIR]), "=r"(bits[PAIR + 1 < COUNT ? PAIR + 1 : PAIR])
                     : "r"(place + PAIR * 128) : "memory");
    }
    if (COUNT & 1)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(bits[COUNT - 1]) : "r"(place + (COUNT - 1) * 128) : "memory");
#endif
}

// Adds COUNT shares of the sums of a lane's two cells, always in the same order. shares: the lane's
// first, of [share, sum, 64 cells] in shared memory.
template <int COUNT, int SUMS_OF_CELL>
INLINE void add_shares(const float* shares, float (&sums)[SUMS_OF_CELL][2]) {
    #pragma unroll
    for (int from = 0; from < COUNT; ++from)
        #pragma unroll
        for (int which = 0; which < SUMS_OF_CELL; ++which) {
            const float* const place = shares + (from * SUMS_OF_CELL + which) * 64;
            const float2 share = *reinterpret_cast<const float2*>(place);
            sums[which][0] += share.x;
            sums[which][1] += share.y;
        }
}

// COUNT fragments as floats of this lane's two cells
template <int COUNT>
INLINE void load_fragments(const unsigned char* source, float (*cells)[2]) {
#if NARROW
    uint32 bits[COUNT];
    load_transposed<COUNT>(source, bits);
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        cells[i][0] = widen(storage_t(bits[i]));
        cells[i][1] = widen(storage_t(bits[i] >> 16));
    }
#else
    #pragma unroll
    for (int i = 0; i < COUNT; ++i)
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            cells[i][c] = reinterpret_cast<const float*>(source)[i * 64 + c * 8];
#endif
}
