// Rows that begin anew in the middle of a sequence.

// The resets of one row, eight steps at a time, looked up eight steps ahead: who looked when it needs to
// know would wait for memory. The four lanes of a row look at two each.
struct Resets {
    int row, end;
    word coming[2], now;

    // before step 0, of time t; there are none outside [0, end)
    INLINE void begin(int its_row, int its_end, const unsigned char* reset, wide batch, int t, int way,
                      int of4) {
        row = its_row, end = its_end;
        look(reset, batch, t, way, of4);
    }
    // Which rows of a warp's tile are reset in step i, of time t: bit 4r of row r. Asked for each step.
    INLINE word rows(int i, const unsigned char* reset, wide batch, int t, int way, int of4) {
        if (i % 8 == 0) {
            now = word(coming[0] != 0) << of4 * 2 | word(coming[1] != 0) << (of4 * 2 + 1);
            now |= __shfl_xor_sync(~0u, now, 1);
            now |= __shfl_xor_sync(~0u, now, 2);
            look(reset, batch, t + way * 8, way, of4);
        }
        return __ballot_sync(~0u, now >> (i % 8) & 1);
    }

private:
    INLINE void look(const unsigned char* reset, wide batch, int t, int way, int of4) {
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
            const int time = t + way * (of4 * 2 + k);
            coming[k] = 0;
            if (unsigned(time) < unsigned(end)) coming[k] = reset[time * batch + row];
        }
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

// Of a lane's two cells those in `reset_rows` begin anew, with the fresh states or zeros; mine_of: their
// rows' bits; rows: of the batch, of both.
template <int N>
INLINE void begin_rows(float (&states)[2][N], word reset_rows, const word (&mine_of)[2], bool chosen,
                       const stored* const (&fresh)[N], const int* rows, wide unit, wide units) {
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        #pragma unroll
        for (int k = 0; k < N; ++k)
            if (reset_rows & mine_of[c]) states[c][k] = 0.0f;
    if (chosen && reset_rows)  // one way for the whole warp
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            if (reset_rows & mine_of[c]) begin_again(states[c], fresh, rows[c], unit, units);
}
