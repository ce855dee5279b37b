// A step's derivative: what it needs before gradients of states come, what adds up over steps, what is left.

// Where all units are the layer's and rows live to the end, only sums over rows must store_end out those
// past the batch. Nothing else mixes rows, so that theirs may be anything; cells of no slot are never written.
constexpr bool ALL_LIVE = !LENGTHS && !PADDED;

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

// A cell's part of dh from all blocks' shares, NEXT bytes apart, by pairs in the order of blocks: always the
// same, and half as long a chain of sums.
template <int COUNT, int NEXT>
INLINE void add_shares(float (&d_state)[2][STATES], const unsigned char* shares) {
    float found[2];
    #pragma unroll
    for (int from = 0; from < COUNT; from += 2) {
        const float2 one = *reinterpret_cast<const float2*>(shares + from * NEXT);
        const float2 other = COUNT > 1 ? *reinterpret_cast<const float2*>(shares + (from + 1) * NEXT) : float2{};
        const float low = one.x + other.x, high = one.y + other.y;
        found[0] = from ? found[0] + low : low, found[1] = from ? found[1] + high : high;
    }
    d_state[0][0] += found[0], d_state[1][0] += found[1];
}

// Where forward began reread after the step: what comes from later is of the fresh states, not of the step's.
INLINE void end_at_reset(float (&d_state)[STATES], float (&d_start)[FRESH ? STATES : 1]) {
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (FRESH) d_start[FRESH ? k : 0] += d_state[k];
        d_state[k] = 0.0f;
    }
}

INLINE void add_up(float (&total)[PLANES + VECTORS], const float (&d_gate)[PLANES],
                   const float (&d_vector)[VECTORS + 1]) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p) total[p] += d_gate[p];
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) total[PLANES + v] += d_vector[v];
}

// Zeros for so many steps that no row of a tile lives to: this lane's two units of all planes, from `row` of
// (T * B) rows on, the same sequence each step.
INLINE void store_no_gradients(storage_t* d_gates, int64 row, int64 batch, int unit, int steps) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p)
        store_zeros(d_gates + (row * PLANES + p) * UNITS + unit, batch * (PLANES * UNITS * SIZE), steps, unit, UNITS);
}

// A cell's gradients of initial states, and of those that it began reread with; replaced: forward's first
// states were such, because the row was reset before its first step. count: of cells, at: this one.
INLINE void store_first(const float (&d_state)[STATES], const float (&d_start)[FRESH ? STATES : 1],
                        bool replaced, float* carry, storage_t* const (&d_initial)[STATES],
                        storage_t* const (&d_fresh)[STATES], int64 count, int64 at) {
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (carry || d_initial[k])
            store_end(carry, d_initial[k], k * count, at, replaced ? 0.0f : d_state[k]);
        if (FRESH && d_fresh[k])
            d_fresh[k][at] = narrow(d_start[FRESH ? k : 0] + (replaced ? d_state[k] : 0.0f));
    }
}
