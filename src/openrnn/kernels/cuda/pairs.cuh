// Two cells of a lane, as they are stored and as they are sent.

// A lane holds, of 8 units x 8 rows, unit lane / 4 in rows 2 * (lane % 4) and the next.
// Afterwards it holds row lane / 4 of units 2 * (lane % 4) and the next.
struct Pair {
#if NARROW
    uint32 bits;
#else
    float low, high;
#endif
};

INLINE uint32 flipped(uint32 bits) {
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(bits));
    return bits;
}

INLINE Pair transposed(float first, float second) {
#if NARROW
    return {flipped(pack(first, second))};
#else
    const uint32 a = __float_as_uint(first), b = __float_as_uint(second);
    const uint32 low = flipped(__byte_perm(a, b, 0x5410)), high = flipped(__byte_perm(a, b, 0x7632));
    return {__uint_as_float(__byte_perm(low, high, 0x5410)),
            __uint_as_float(__byte_perm(low, high, 0x7632))};
#endif
}

// What is sent of a pair; in tf32 it is `rounded` before a product reads it. Where the pair's two values
// are at hand HALF packs them, and need not wait until the pair of floats has been transposed.
#if HALF
struct Letter {
    uint32 bits;
};
INLINE Letter letter_of(Pair pair) { return {pack(pair.low, pair.high)}; }
INLINE Letter letter_of(Pair, float first, float second) { return {flipped(pack(first, second))}; }
#else
typedef Pair Letter;
INLINE Letter letter_of(Pair pair) { return pair; }
INLINE Letter letter_of(Pair pair, float, float) { return pair; }
#endif

INLINE Pair pair_of(const storage_t* source) {
#if NARROW
    return {uint32(source[0]) | uint32(source[1]) << 16};
#else
    return {source[0], source[1]};
#endif
}

INLINE void keep(storage_t* target, Pair pair) {
#if NARROW
    *reinterpret_cast<uint32*>(target) = pair.bits;
#else
    *reinterpret_cast<float2*>(target) = make_float2(pair.low, pair.high);
#endif
}
#if HALF
INLINE void keep(operand_t* target, Letter letter) { *reinterpret_cast<uint32*>(target) = letter.bits; }
#endif

// A pair into a row of y: PADDED, H is no multiple of 8, and what is past it has no place there.
INLINE void keep_inside(storage_t* target, Pair pair, int64 unit, int64 units) {
#if PADDED
#if NARROW
    const storage_t first = storage_t(pair.bits), second = storage_t(pair.bits >> 16);
#else
    const storage_t first = pair.low, second = pair.high;
#endif
    if (unit + 1 < units && units % 2 == 0) return keep(target, pair);
    if (unit < units) target[0] = first;
    if (unit + 1 < units) target[1] = second;
#else
    keep(target, pair);
#endif
}

// zeros into so many rows, the first at `target`; move: bytes to the next
INLINE void keep_zeros(storage_t* target, int64 move, int rows, int64 unit, int64 units) {
    #pragma unroll 1
    for (int r = 0; r < rows; ++r, target = moved_by(target, move)) keep_inside(target, Pair{}, unit, units);
}

INLINE Letter rounded(Letter letter) {
#if SHORT
    return letter;
#else
    return {__uint_as_float(rounded(__float_as_uint(letter.low))),
            __uint_as_float(rounded(__float_as_uint(letter.high)))};
#endif
}

// 16 bytes of a row, gathered from the lanes beside: 8 units by four lanes, or 4 units by two
INLINE uint4 gathered(Letter letter) {
#if SHORT
    return make_uint4(__shfl_sync(~0u, letter.bits, 0, 4), __shfl_sync(~0u, letter.bits, 1, 4),
                      __shfl_sync(~0u, letter.bits, 2, 4), __shfl_sync(~0u, letter.bits, 3, 4));
#else
    const uint32 low = __float_as_uint(letter.low), high = __float_as_uint(letter.high);
    return make_uint4(__shfl_sync(~0u, low, 0, 2), __shfl_sync(~0u, high, 0, 2),
                      __shfl_sync(~0u, low, 1, 2), __shfl_sync(~0u, high, 1, 2));
#endif
}

[[maybe_unused]] constexpr int SHARERS = SHORT ? 4 : 2;  // lanes that hold the same gathered 16 bytes
