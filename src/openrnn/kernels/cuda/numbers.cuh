// Conversions between storage, float32 and what tensor cores read; and one mma.

INLINE float widen(storage_t value) {
#if !NARROW
    return value;
#elif BFLOAT
    return __uint_as_float(uint32(value) << 16);
#else
    float wider;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wider) : "h"(value));
    return wider;
#endif
}

#if SHORT
// two floats as 16-bit operands, the first in the lower half
INLINE uint32 pack(float low, float high) {
    uint32 both;
#if BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#elif HALF_OPERANDS  // R and initial states may have any size: saturated for finite products
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
#endif

INLINE storage_t narrow(float value) {
#if NARROW
    return storage_t(pack(value, 0.0f));
#else
    return value;
#endif
}

// Rounds a float to tf32, ties away from zero. Tensor cores ignore the last 13 bits, so adding half
// a unit in the last place is enough; cvt.rna.tf32, which clears them, takes two instructions more.
// Infinities and NaNs stay as they are.
INLINE uint32 rounded(uint32 bits) {
#if SHORT
    return bits;
#else
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000) ? bits + 0x1000 : bits;
#endif
}

INLINE operand_t operand_of(storage_t value) {
#if HALF_OPERANDS
    return operand_t(pack(value, 0.0f));
#elif NARROW
    return value;
#else
    return __uint_as_float(rounded(__float_as_uint(value)));
#endif
}

// sum += A B: A has 16 rows (of units and gates), B 8 columns (rows of the batch), K is 16 or 8
INLINE void multiply(float (&sum)[4], uint4 a, uint32 b0, uint32 b1) {
#if !SHORT
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#elif BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The factor of a gate's sums. Those of SCALED gates are read by a sigmoid only, which begins with
// a multiplication by one half: R, inputs and biases are halved instead. That is exact, but for
// float16 below 2^-13.
INLINE constexpr float scale_of(int gate) { return SCALED >> gate & 1 ? 0.5f : 1.0f; }

#if NARROW
// a pair of 16-bit values times one half
INLINE uint32 halved(uint32 pair) {
    uint32 half;
#if BFLOAT
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(half) : "r"(pair), "r"(0x3f003f00), "r"(0x80008000));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(half) : "r"(pair), "r"(0x38003800), "r"(0x80008000));
#endif
    return half;
}
#endif
