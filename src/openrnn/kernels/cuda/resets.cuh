// Rows that begin anew in the middle of a sequence.

constexpr int RESET_BYTES = RESET ? 32 : 0;  // of a tile and step, in the ring of inputs

// The resets of a row, copied some steps ahead as inputs are: a plain load is waited for with whatever
// other load shares its scoreboard. A copy has four bytes, the row's own and the three around it, from
// a multiple of four on; a page that has the one has them all.
struct Resets {
    const unsigned char* next;  // to be copied, of this lane's row
    int time, end;              // LENGTHS: of `next`; there are none outside [0, end)
    uint32 mask;                  // of the four bytes looked at next: the row's own, none where there is no row

    // t: of the first that is copied, and looked at
    INLINE void begin(const unsigned char* reset, int64 batch, int row, int t, int its_end) {
        next = reset + t * batch + max(row, 0), time = t, end = handy(its_end);
        mask = row < 0 ? 0 : 255u << (uint32(reinterpret_cast<int64>(next)) & 3) * 8;
    }
    // Whether the row begins anew; then on, by as many bits as its byte moves.
    INLINE bool look(const unsigned char* copied, uint32 turn) {
        const bool found = *reinterpret_cast<const uint32*>(copied) & mask;
        mask = __funnelshift_l(mask, mask, turn);
        return found;
    }
    // Into the ring, where the lane's row has its four bytes, by the first of its four lanes, if `there` or, with
    // LENGTHS, inside the row's; then a step on, by `way` and `move` bytes.
    INLINE void copy(uint32 target, int of4, int way, int64 move, bool there) {
        const int64 place = reinterpret_cast<int64>(next) & ~3ll;
        if (LENGTHS) there = unsigned(time) < unsigned(end);
        if (of4 == 0) copy_async<4>(target, reinterpret_cast<const void*>(place), there ? 4 : 0);
        next += move, time += way;
    }
};

// where in a tile's 32 bytes a lane's row has its four
INLINE int reset_place(int lane) { return lane & 28; }

// units `unit` and the next of a row of states (B, units), zeros where there is none
INLINE Pair pair_of_state(const storage_t* states, int64 row, int64 unit, int64 units) {
    storage_t pair[2] = {0, 0};
    if (states && unit < units) pair[0] = states[row * units + unit];
    if (states && unit + 1 < units) pair[1] = states[row * units + unit + 1];
    return pair_of(pair);
}

// a cell's states become the fresh ones (B, units), zeros where there are none
template <int N>
INLINE void begin_again(float (&states)[N], const storage_t* const (&fresh)[N], int64 row, int64 unit,
                        int64 units) {
    #pragma unroll
    for (int k = 0; k < N; ++k)
        states[k] = fresh[k] && unit < units ? widen(fresh[k][row * units + unit]) : 0.0f;
}

// Of a lane's two cells those in `reset_rows` begin anew, with zeros or, FRESH, what is given; mine_of:
// their rows' bits; rows: of the batch, of both.
template <int N>
INLINE void begin_rows(float (&states)[2][N], uint32 reset_rows, const uint32 (&mine_of)[2],
                       const storage_t* const (&fresh)[N], const int* rows, int64 unit, int64 units) {
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        #pragma unroll
        for (int k = 0; k < N; ++k)
            if (reset_rows & mine_of[c]) states[c][k] = 0.0f;
    if (FRESH && reset_rows)  // one way for the whole warp
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            if (reset_rows & mine_of[c]) begin_again(states[c], fresh, rows[c], unit, units);
}
