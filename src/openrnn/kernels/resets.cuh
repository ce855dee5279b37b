// Rows that begin anew in the middle of a sequence.

// The resets of one row, eight steps at a time, looked up eight steps ahead: who looked when it needs to
// know would wait for memory. The four lanes of a row look at two each.
struct Resets {
    word coming[2], now;

    // those of the eight times from t on, or back; none outside [0, end)
    INLINE void look(const unsigned char* reset, wide batch, int row, int end, int t, int way, int of4) {
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int time = t + way * (of4 * 2 + k);
            coming[k] = 0;
            if (unsigned(time) < unsigned(end)) coming[k] = reset[time * batch + row];
        }
    }
    // Which rows of a warp's tile are reset in step i, bit 4r of row r; the others as for `look`, t of
    // step i. Asked for each step from 0 on.
    INLINE word rows(int i, const unsigned char* reset, wide batch, int row, int end, int t, int way,
                     int of4) {
        if (i % 8 == 0) {
            now = word(coming[0] != 0) << of4 * 2 | word(coming[1] != 0) << (of4 * 2 + 1);
            now |= __shfl_xor_sync(~0u, now, 1);
            now |= __shfl_xor_sync(~0u, now, 2);
            look(reset, batch, row, end, t + way * 8, way, of4);
        }
        return __ballot_sync(~0u, now >> (i % 8) & 1);
    }
};

// units `unit` and the next of a row of states (B, units), zeros where there is none
INLINE Pair pair_of_state(const stored* states, wide row, wide unit, wide units) {
    stored pair[2] = {0, 0};
    if (states && unit < units) pair[0] = states[row * units + unit];
    if (states && unit + 1 < units) pair[1] = states[row * units + unit + 1];
    return pair_of(pair);
}

// whether any fresh state is given, other than zeros
template <int N>
INLINE bool begins_with_some(const stored* const (&fresh)[N]) {
    bool some = false;
    #pragma unroll
    for (int k = 0; k < N; ++k) some = some || fresh[k];
    return some;
}

// a cell's states become the fresh ones (B, units), zeros where there are none
template <int N>
INLINE void begin_again(float (&states)[N], const stored* const (&fresh)[N], wide row, wide unit,
                        wide units) {
    #pragma unroll
    for (int k = 0; k < N; ++k)
        states[k] = fresh[k] && unit < units ? widen(fresh[k][row * units + unit]) : 0.0f;
}
