// The functions of a cell's graph, in float32; those that choose keep nan.

#define LOG2_E 1.4426950408889634f

INLINE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float approximate_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float hyperbolic(float x) {
#if NARROW
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    // off by 2e-7 at most, where tf32 products are off by 1e-4
    return fmaf(-2.0f, approximate_reciprocal(1.0f + power_of_2(2.0f * LOG2_E * x)), 1.0f);
#endif
}

#if NARROW
INLINE float logistic_of_half(float x) { return 0.5f * hyperbolic(x) + 0.5f; }
#endif

INLINE float logistic(float x) {
#if NARROW
    return logistic_of_half(0.5f * x);
#else
    return approximate_reciprocal(1.0f + power_of_2(-LOG2_E * x));
#endif
}

INLINE float exponential(float x) { return power_of_2(LOG2_E * x); }
INLINE float reciprocal(float x) { return 1.0f / x; }
INLINE float logsigmoid(float x) { return fminf(x, 0.0f) - log1pf(exponential(-fabsf(x))); }
INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }
INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
INLINE float sign(float x) { return float(x > 0.0f) - float(x < 0.0f); }

// sin, cos and tan without the array of CUDA's own, which lies on the stack and would count as
// spilled registers. `turned` is x less the nearest multiple of pi/2, `quarter` which, modulo 4.

// 32 bits of 2/pi from bit 32 * place - 2 on
INLINE uint32 bits_of_2_over_pi(int place) {
    return place == 0 ? 0x28be60dbu : place == 1 ? 0x9391054au : place == 2 ? 0x7f09d5f4u
         : place == 3 ? 0x7d4d3770u : place == 4 ? 0x36d8a566u : place == 5 ? 0x4f10e410u : 0u;
}

INLINE float turned(float x, int& quarter) {
    const float far = fabsf(x);
    if (!(far > 65536.0f)) {
        const float count = rintf(x * 0.636619772f);
        quarter = int(count);
        float rest = fmaf(count, -1.57079601e+00f, x);  // pi/2 in three parts
        rest = fmaf(count, -3.13916473e-07f, rest);
        return fmaf(count, -5.39030253e-15f, rest);
    }
    // x = mantissa * 2^(exponent - 32); x * 2/pi modulo 4 as 64 bits, 62 of them a fraction
    const uint32 bits = __float_as_uint(far);
    const uint32 mantissa = bits << 8 | 0x80000000u;
    const int exponent = int(bits >> 23) - 126, place = exponent >> 5, shift = exponent & 31;
    const uint32 first = place ? bits_of_2_over_pi(place - 1) : 0u;
    const uint32 words[3] = {bits_of_2_over_pi(place), bits_of_2_over_pi(place + 1),
                             bits_of_2_over_pi(place + 2)};
    const uint32 high = shift ? first << shift | words[0] >> (32 - shift) : first;
    const uint32 middle = shift ? words[0] << shift | words[1] >> (32 - shift) : words[0];
    const uint32 low = shift ? words[1] << shift | words[2] >> (32 - shift) : words[1];
    unsigned long long product = (unsigned long long)mantissa * low;
    product = (unsigned long long)mantissa * middle + (product >> 32);
    product += (unsigned long long)(mantissa * high) << 32;
    const int count = int(product >> 62) + int(product >> 61 & 1);
    const auto fraction = (long long)(product - ((unsigned long long)count << 62));
    const float rest = float(double(fraction) * 3.4061215800523264e-19);
    quarter = x < 0.0f ? -count : count;
    return far > 3.402823466e38f ? x - x : x < 0.0f ? -rest : rest;
}

INLINE float sine_of(float x, int quarter) {
    const float square = x * x;
    float y;
    if (quarter & 1) {
        y = fmaf(2.44677067e-5f, square, -1.38877297e-3f);
        y = fmaf(y, square, 4.16666567e-2f);
        y = fmaf(y, square, -0.5f);
        y = fmaf(y, square, 1.0f);
    } else {
        y = fmaf(2.86567956e-6f, square, -1.98559923e-4f);
        y = fmaf(y, square, 8.33338592e-3f);
        y = fmaf(y, square, -1.66666672e-1f);
        y = fmaf(y, x * square, x);
    }
    return quarter & 2 ? -y : y;
}

INLINE float sine(float x) {
    int quarter;
    const float rest = turned(x, quarter);
    return sine_of(rest, quarter);
}

INLINE float cosine(float x) {
    int quarter;
    const float rest = turned(x, quarter);
    return sine_of(rest, quarter + 1);
}

INLINE float tangent(float x) {
    int quarter;
    const float rest = turned(x, quarter);
    return sine_of(rest, quarter) / sine_of(rest, quarter + 1);
}
