// Rows whose state is reset in the middle of a sequence.

constexpr int RESET_BYTES = RESET ? 32 : 0;  // of a tile's 8 rows and a step, in the ring buffer

// The resets of one row. They are copied some steps ahead, as inputs are: a plain load would have
// to be waited for in the step. cp.async takes four bytes at least, the row's own and those around
// it from a multiple of four on; a page of memory that has one of them has all.
struct Resets {
    const unsigned char* next;  // of this lane's row, to be copied next
    int time, end;              // LENGTHS: the step of `next`; there are no resets outside [0, end)
    uint32 mask;                // the row's own byte of the four that are tested next; 0: no row

    // step: of the reset that is copied, and tested, first
    INLINE void begin(const unsigned char* reset, int64 batch, int row, int step, int length) {
        next = reset + step * batch + max(row, 0), time = step, end = keep_if_room(length);
        mask = row < 0 ? 0 : 255u << (uint32(reinterpret_cast<int64>(next)) & 3) * 8;
    }
    // Whether the row is reset; then the mask is rotated by `shift` bits to where its byte is next.
    INLINE bool test(const unsigned char* copied, uint32 shift) {
        const bool found = *reinterpret_cast<const uint32*>(copied) & mask;
        mask = __funnelshift_l(mask, mask, shift);
        return found;
    }
    // Copies the row's four bytes, by the first of the four lanes that have the row, if `exists`
    // or, with LENGTHS, inside the row's length; then moves on by a step.
    INLINE void copy(uint32 target, int thread_in_group, int way, int64 step_bytes, bool exists) {
        const int64 place = reinterpret_cast<int64>(next) & ~3ll;
        if (LENGTHS) exists = unsigned(time) < unsigned(end);
        if (thread_in_group == 0)
            copy_async<4>(target, reinterpret_cast<const void*>(place), exists ? 4 : 0);
        next += step_bytes, time += way;
    }
};

// where in a tile's 32 bytes a lane's row has its four
INLINE int reset_offset(int lane) { return lane & 28; }

// units `unit` and the next of a row of states (B, units), zeros where there is none
INLINE Pair load_state_pair(const storage_t* states, int64 row, int64 unit, int64 units) {
    storage_t pair[2] = {0, 0};
    if (states && unit < units) pair[0] = states[row * units + unit];
    if (states && unit + 1 < units) pair[1] = states[row * units + unit + 1];
    return load_pair(pair);
}

// a cell's states from tensors (B, units), zeros where there is none
template <int N>
INLINE void load_states(float (&states)[N], const storage_t* const (&from)[N], int64 row,
                        int64 unit, int64 units) {
    #pragma unroll
    for (int k = 0; k < N; ++k)
        states[k] = from[k] && unit < units ? widen(from[k][row * units + unit]) : 0.0f;
}

// Resets those of a lane's two cells whose rows are in `reset_rows`, to zeros or (RESET_STATE) to
// what was given. row_bits: the bits of both rows; rows: their places in the batch.
template <int N>
INLINE void reset_cells(float (&states)[2][N], uint32 reset_rows, const uint32 (&row_bits)[2],
                        const storage_t* const (&given)[N], const int* rows, int64 unit,
                        int64 units) {
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        #pragma unroll
        for (int k = 0; k < N; ++k)
            if (reset_rows & row_bits[c]) states[c][k] = 0.0f;
    if (RESET_STATE && reset_rows)  // uniform: one branch for the whole warp
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            if (reset_rows & row_bits[c]) load_states(states[c], given, rows[c], unit, units);
}
