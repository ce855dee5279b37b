// The derivative of the cell, as all backward loops take it: what it needs before dh
// arrives, a step, sums over steps, the end.

constexpr int RIGHT = PLANES - GATES;  // first plane of the recurrent side

// Where no row ends early and no unit is padding, gradients of rows past the batch may be anything:
// only sums over rows mix rows, and leave those out, and nothing of theirs is ever stored.
constexpr bool ALL_LIVE = !LENGTHS && !PADDED;

// The order of steps: step i undoes step count - 1 - i of forward, and memory moves with it.
struct Time {
    int count, direction, first;
    int64 to_first;  // strides from time 0 to `first`; number and strides: negative unless reverse

    INLINE Time(const BackwardArgs& args, int number) {
        count = number;
        direction = args.reverse ? 1 : -1, first = args.reverse ? 0 : count - 1;
        to_first = direction * first;
    }
    INLINE int length(const BackwardArgs& args, int b) const {
        return b < 0 ? 0 : LENGTHS ? int(args.lengths[b]) : count;
    }
};

// The factors of a lane's two cells from saved activations, computed here, while shares of dh are
// awaited: the compiler would move them to where they are used.
INLINE void find_factors(const float (&values)[2][ACTIVATIONS + 4],
                         const float (&vector)[VECTORS + 1],
                         float (&factor)[2][FACTORS + 1]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        factors(values[c], vector, factor[c]);
        #pragma unroll
        for (int k = 0; k < FACTORS; ++k) asm volatile("" : "+f"(factor[c][k]));
    }
}

// Adds the shares of dh of COUNT blocks, NEXT bytes apart, by pairs in the order of blocks: always
// in the same order, and in half as long a chain of sums.
template <int COUNT, int NEXT>
INLINE void add_shares(float (&d_state)[2][STATES], const unsigned char* shares) {
    float found[2];
    #pragma unroll
    for (int from = 0; from < COUNT; from += 2) {
        const float2 one = *reinterpret_cast<const float2*>(shares + from * NEXT);
        const float2 other = from + 1 < COUNT
            ? *reinterpret_cast<const float2*>(shares + (from + 1) * NEXT) : float2{};
        const float low = one.x + other.x, high = one.y + other.y;
        found[0] = from ? found[0] + low : low, found[1] = from ? found[1] + high : high;
    }
    d_state[0][0] += found[0], d_state[1][0] += found[1];
}

// Where forward reset the state after the step: gradients of later steps belong to the reset state.
INLINE void end_at_reset(float (&d_state)[STATES], float (&d_reset)[RESET_STATE ? STATES : 1]) {
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (RESET_STATE) d_reset[RESET_STATE ? k : 0] += d_state[k];
        d_state[k] = 0.0f;
    }
}

// Whether row c of two has not ended at time t, and is no padding.
INLINE bool is_live(const int (&length)[2], int c, const int& t) {
    return (LENGTHS ? t : 0) < length[c];
}

// Sums of a step's gradients, for those of biases and per-unit vectors.
INLINE void add_up(float (&total)[PLANES + VECTORS], const float (&d_gate)[PLANES],
                   const float (&d_vector)[VECTORS + 1]) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p) total[p] += d_gate[p];
    #pragma unroll
    for (int v = 0; v < VECTORS; ++v) total[PLANES + v] += d_vector[v];
}

// The gradient of a cell's final state, or what the time chunk that ran before left; the cell is
// number `at` of `count`.
INLINE float final_gradient(const BackwardArgs& args, int k, int64 count, int64 at) {
    return args.chunk_in       ? args.chunk_in[k * count + at]
           : args.d_final[k]   ? widen(args.d_final[k][at])
                               : 0.0f;
}

// Zeros for so many steps to which no row of a tile lives: this lane's two units of all planes,
// from `row` of (T * B) rows on.
INLINE void store_no_gradients(storage_t* d_gates, int64 row, int64 batch, int unit, int steps) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p)
        store_zeros(d_gates + (row * PLANES + p) * UNITS + unit, batch * (PLANES * UNITS * SIZE),
                    steps, unit, UNITS);
}

// A cell's gradients of initial and reset states. replaced: forward's first states were reset ones,
// because the row was reset before its first step.
INLINE void store_first(const BackwardArgs& args, const float (&d_state)[STATES],
                        const float (&d_reset)[RESET_STATE ? STATES : 1], bool replaced,
                        int64 count,
                        int64 at) {
    #pragma unroll
    for (int k = 0; k < STATES; ++k) {
        if (args.chunk_out || args.d_initial[k])
            store_end(args.chunk_out, args.d_initial[k], k * count, at,
                      replaced ? 0.0f : d_state[k]);
        if (RESET_STATE && args.d_reset_state[k])
            args.d_reset_state[k][at] =
                narrow(d_reset[RESET_STATE ? k : 0] + (replaced ? d_state[k] : 0.0f));
    }
}
