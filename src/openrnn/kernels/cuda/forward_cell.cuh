// One step of the cell, as all forward loops take it: a lane has one unit in two rows, and stores
// and sends two units of one row.

#include "unit_constants.cuh"

// The order of steps: `count` of them, from time `first` on.
struct Time {
    int count, direction, first;  // direction: 1 or, in reverse, -1
    int64 to_first;  // strides from time 0 to `first`; number and strides: negative in reverse

    INLINE Time(const ForwardArgs& args, int number) {
        count = number;
        direction = args.reverse ? -1 : 1, first = args.reverse ? count - 1 : 0;
        to_first = direction * first;
    }
};

// Whether a row is reset before its first step; count: steps of the loop.
INLINE bool starts_reset(const ForwardArgs& args, int count, int64 b) {
    return RESET && !args.reverse && count > 0 && args.reset[b] &&
           (!LENGTHS || args.lengths[b] > 0);
}

// As `first_state` of forward_setup.cuh, with `starts_reset` written out: a call of it changes the
// registers that some grids take. Used by all but the cells of forward.cuh.
INLINE float first_state_inline(const ForwardArgs& args, int count, int k, int64 b, int64 unit) {
    const bool is_reset = RESET && !args.reverse && count > 0 && args.reset[b] &&
                          (!LENGTHS || args.lengths[b] > 0);
    const int64 at = b * args.hidden + unit;
    if (args.chunk_in && !is_reset) return args.chunk_in[k * args.batch * args.hidden + at];
    const storage_t* source = is_reset ? args.reset_state[k] : args.initial[k];
    return source ? widen(source[at]) : 0.0f;
}

// A tile's rows in one step; bit 4r of a mask stands for row r.
struct TileRows {
    uint32 live;   // LENGTHS: rows that have not ended
    uint32 reset;  // RESET: rows that are reset after the step
    bool resets;   // RESET: whether this lane's row is

    // copied: the ring's resets of this lane's row; shift: see Resets
    INLINE void read(int t, int length, Resets& of_row, const unsigned char* copied,
                     uint32 shift) {
        if (LENGTHS) live = __ballot_sync(~0u, t < length);
        if (RESET) resets = of_row.test(copied, shift);
    }
    INLINE void vote() {
        if (RESET) reset = __ballot_sync(~0u, resets);
    }
};

// The bits of a lane's rows in such masks.
struct RowBits {
    uint32 pair[2];  // of the two rows of its unit

    INLINE RowBits(uint32 first, uint32 second) { pair[0] = first, pair[1] = second; }

    INLINE bool live(const TileRows& rows, int c) const { return !LENGTHS || rows.live & pair[c]; }
};

// A cell's step in row c of two. x, r: both sides of its gates; `state` is replaced where the row
// is live. Returns h, 0 for padding. saved: activations for backward. ALL_STATES: all states are
// stored at time t, in the batch's row rows[place], where the unit is `owned`, one of this lane's.
INLINE float step_cell(const ForwardArgs& args, const float (&x)[GATES], const float (&r)[GATES],
                       const float (&vectors)[VECTORS + 1], const RowBits& bits,
                       const TileRows& tile, int c, const int* rows, int place, int unit,
                       bool owned, int t, float (&state)[STATES], float (&saved)[ACTIVATIONS + 4]) {
    float after[STATES];
    step(x, r, state, vectors, after, saved);
    const bool live = bits.live(tile, c);
    if (ALL_STATES && live && owned && rows[place] >= 0) {
        const int64 b = rows[place];
        #pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (unit < args.hidden)
                args.all_states[k][(t * args.batch + b) * args.hidden + unit] = narrow(after[k]);
    }
    #pragma unroll
    for (int k = 0; k < STATES; ++k)
        if (live) state[k] = after[k];
    return !PADDED || unit < args.hidden ? state[0] : 0.0f;
}

// Sums of a lane's two cells begin with what is known before h is.
INLINE void start_sums(const UnitConstants& constants, const float (&given)[GATES][2],
                       float (&sums)[GATES][2]) {
    #pragma unroll
    for (int gate = 0; gate < GATES; ++gate)
        #pragma unroll
        for (int c = 0; c < 2; ++c) sums[gate][c] = constants.start(gate, given[gate][c]);
}

// The step of a lane's two cells, whose rows in the batch are rows[place] and the next, from the
// input side of their gates and the sums.
INLINE void step_pair(const ForwardArgs& args, const UnitConstants& constants,
                      const float (&given)[GATES][2], const float (&sums)[GATES][2],
                      const RowBits& bits, const TileRows& tile, const int* rows, int place,
                      int unit, int t, float (&state)[2][STATES], float (&hidden)[2],
                      float (&values)[2][ACTIVATIONS + 4]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        float left[GATES], right[GATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            left[gate] = given[gate][c] + constants.bias_x[gate];
            right[gate] = sums[gate][c];
        }
        hidden[c] = step_cell(args, left, right, constants.vectors, bits, tile, c, rows, place + c,
                              unit, true, t, state[c], values[c]);
    }
}

// What the next step multiplies: h of this lane's row and two units or, after a reset, the reset
// state. pair: `first` and `second`, h of one unit in two rows, transposed.
INLINE Message next_hidden(const ForwardArgs& args, Pair pair, float first, float second,
                           bool resets, int row, int unit) {
    Message message = message_of(pair, first, second);
    if (RESET && resets) message = {};
    if (RESET && RESET_STATE && resets)
        message = message_of(load_state_pair(args.reset_state[0], row, unit, args.hidden));
    return message;
}

// y of this lane's row and two units past the row's end: zeros. count, direction: as in Time.
INLINE void store_no_output(const ForwardArgs& args, int count, int direction, int row, int group,
                            int thread_in_group) {
    store_zeros(advanced(args.y, count * direction * args.y_step_bytes) + row * args.y_row +
                    group * 8 + thread_in_group * 2,
                direction * args.y_step_bytes, int(args.steps) - count,
                group * 8 + thread_in_group * 2, args.hidden);
}
