// One step of the cell in a forward loop, as both kinds of loop take it: a lane has one unit in two
// rows, and stores and sends two units of one row.

// The order of steps: `count` of them from `first` on, `moved` of the loop's strides from time 0.
struct Time {
    int count, way, first;
    int64 moved;

    INLINE Time(const ForwardArgs& args, int number) {
        count = number;
        way = args.reverse ? -1 : 1, first = args.reverse ? count - 1 : 0;
        moved = way * first;
    }
};

// What a unit adds to its gates in each step, and its per-unit parameters.
struct UnitConstants {
    float from_x[GATES], from_r[GATES], vector[VECTORS + 1];

    // inside: the unit is one of this lane's and no padding
    INLINE void load(const ForwardArgs& args, int unit, bool inside) {
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const int64 at = gate * args.units + unit;
            from_x[gate] = inside && args.bias_x ? widen(args.bias_x[at]) : 0.0f;
            from_r[gate] = inside && args.bias_r ? widen(args.bias_r[at]) : 0.0f;
            if (SUMMED >> gate & 1) {  // one register serves both sides
                from_r[gate] = scale_of(gate) * (from_r[gate] + from_x[gate]);
                from_x[gate] = 0.0f;
            }
        }
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vector[v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
    }

    // The part of a gate's sum that is known before h is; given: the input side.
    INLINE float start(int gate, float given) const {
        return from_r[gate] + (SUMMED >> gate & 1 ? scale_of(gate) * given : 0.0f);
    }
};

// A state before the first step: that of the time chunk before, the initial one or, if the row is
// reset before its first step, the reset one. count: steps of the loop.
INLINE float first_state(const ForwardArgs& args, int count, int k, int64 b, int64 unit) {
    const bool is_reset = RESET && !args.reverse && count > 0 && args.reset[b] &&
                          (!LENGTHS || args.lengths[b] > 0);
    const int64 at = b * args.units + unit;
    if (args.chunk_in && !is_reset) return args.chunk_in[k * args.batch * args.units + at];
    const storage_t* source = is_reset ? args.reset_state[k] : args.initial[k];
    return source ? widen(source[at]) : 0.0f;
}

// A tile's rows in one step; bit 4r of a mask stands for row r.
struct TileRows {
    uint32 live;   // LENGTHS: rows that have not ended
    uint32 reset;  // RESET: rows that are reset after the step
    bool resets;   // RESET: whether this lane's row is
};

// The bits of a lane's rows in such masks.
struct RowBits {
    uint32 pair[2];  // of the two rows of its unit
    uint32 own;      // of the row that it stores

    INLINE bool live(const TileRows& rows, int c) const { return !LENGTHS || rows.live & pair[c]; }
    INLINE bool own_live(const TileRows& rows) const { return !LENGTHS || rows.live & own; }
};

// A cell's step in two rows. `state` is replaced where a row is live; hidden: its h, 0 for padding;
// saved: activations for backward. rows: the places of both in the batch; owned: the unit is one of
// this lane's; t: the step in time.
INLINE void step_cell(const ForwardArgs& args, const UnitConstants& unit_constants,
                      const float (&given)[GATES][2], const float (&right)[2][GATES],
                      const TileRows& tile, const RowBits& bits, const int* rows, int unit,
                      bool owned, int t, float (&state)[2][STATES], float (&hidden)[2],
                      float (&saved)[2][KEPT + 4]) {
    const bool inside = !PADDED || unit < args.units;
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        float left[GATES], after[STATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
            left[gate] = given[gate][c] + unit_constants.from_x[gate];
        float (&before)[STATES] = state[c];
        step(left, right[c], before, unit_constants.vector, after, saved[c]);
        const bool live = bits.live(tile, c);
        if (EVERY && live && owned && rows[c] >= 0) {
            const int64 b = rows[c];
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                if (unit < args.units)
                    args.all_states[k][(t * args.batch + b) * args.units + unit] = narrow(after[k]);
        }
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            if (live) before[k] = after[k];
            if (k == 0) hidden[c] = inside ? before[k] : 0.0f;
        }
    }
}

// What the next step multiplies: h of this lane's row and two units or, after a reset, the reset
// state. pair: the values of `hidden`, transposed.
INLINE Message next_hidden(const ForwardArgs& args, Pair pair, const float (&hidden)[2],
                           bool resets, int row, int unit) {
    Message message = message_of(pair, hidden[0], hidden[1]);
    if (RESET && resets) message = {};
    if (RESET && FRESH && resets)
        message = message_of(load_state_pair(args.reset_state[0], row, unit, args.units));
    return message;
}

// y of this lane's row and two units past the row's end: zeros. count, way: of the loop's steps.
INLINE void store_no_output(const ForwardArgs& args, int count, int way, int row, int unit) {
    storage_t* const first = advanced(args.y, count * way * args.y_step_bytes);
    store_zeros(first + row * args.y_row + unit, way * args.y_step_bytes, int(args.steps) - count,
                unit, args.units);
}

// The final states of a unit in two rows; cells: B * H.
INLINE void store_final(const ForwardArgs& args, const int* rows, int unit, int64 cells,
                        const float (&state)[2][STATES]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int b = rows[c];
        #pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (b >= 0 && unit < args.units)
                store_end(args.chunk_out, args.final[k], k * cells, int64(b) * args.units + unit,
                          state[c][k]);
    }
}
