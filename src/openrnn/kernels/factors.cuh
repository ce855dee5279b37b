// What backward needs of the step, before gradients of states come.

// The factors of a lane's two cells from what is kept, computed where this stands: while shares of
// dh are awaited. The compiler would rather compute them where they are read.
INLINE void find_factors(const float (&values)[2][KEPT + 4], const float (&vector)[VECTORS + 1],
                         float (&factor)[2][FACTORS + 1]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        factors(values[c], vector, factor[c]);
        #pragma unroll
        for (int k = 0; k < FACTORS; ++k) asm volatile("" : "+f"(factor[c][k]));
    }
}
