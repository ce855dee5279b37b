// The functions of a cell's graph, in float32; those that choose keep nan.

#define LOG2_E 1.4426950408889634f

INLINE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

INLINE float inverse(float x) {
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
    return fmaf(-2.0f, inverse(1.0f + power_of_2(2.0f * LOG2_E * x)), 1.0f);
#endif
}

#if NARROW
INLINE float logistic_of_half(float x) { return 0.5f * hyperbolic(x) + 0.5f; }
#endif

INLINE float logistic(float x) {
#if NARROW
    return logistic_of_half(0.5f * x);
#else
    return inverse(1.0f + power_of_2(-LOG2_E * x));
#endif
}

INLINE float exponential(float x) { return power_of_2(LOG2_E * x); }
INLINE float inverse_of(float x) { return 1.0f / x; }
INLINE float logsigmoid(float x) { return fminf(x, 0.0f) - log1pf(exponential(-fabsf(x))); }
INLINE float maximum(float a, float b) { return a > b || a != a ? a : b; }
INLINE float minimum(float a, float b) { return a < b || a != a ? a : b; }
INLINE float sign(float x) { return float(x > 0.0f) - float(x < 0.0f); }
