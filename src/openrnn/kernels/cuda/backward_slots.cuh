// Cells of backward loops whose gate gradients travel through L2: setup, derivative, end. Those of
// blocks and clusters, with several products in flight, are in backward_setup.cuh and
// backward_step.cuh.
//
// A kernel gives SLOTS of a warp, a Place with first_group and first_row, DY_BYTES, and entry_of:
// where in shared memory the inputs of a slot's step are.

// The cells of a warp: gradients of their states, and sums over steps.
struct Cells {
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[SLOTS][2][STATES], d_reset[SLOTS][2][RESET_STATE ? STATES : 1];

    // length: of a unit's two rows, 0 for padding, whose gradients stay 0
    INLINE void load(const BackwardArgs& args, const Place& here, const Time& time,
                     const int* tile_rows, const Slot& slot, int s, int (&length)[2]) {
        const int unit = here.unit(slot);
        const bool inside = slot.owned && unit < args.hidden;
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vector[s][v] = inside ? widen(args.vectors[v * args.hidden + unit]) : 0.0f;
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = slot.owned ? tile_rows[here.thread_in_group * 2 + c] : -1;
            length[c] = inside ? time.length(args, b) : 0;
            #pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const int64 at = int64(b) * args.hidden + unit;
                d_state[s][c][k] =
                    !inside || b < 0 ? 0.0f
                                     : final_gradient(args, k, args.batch * args.hidden, at);
                if (RESET_STATE) d_reset[s][c][k] = 0.0f;
            }
        }
    }
};

// What step i needs before dh arrives: dy, the cells' factors, and the rows that were reset after
// the step (bit 4r of row r).
INLINE void load_slots(const Place& here, const Cells& cells, const SavedPlace& place,
                       int fragment, uint32 reset_shift, int i, Resets (&resets)[SLOTS],
                       float (&d_out)[SLOTS][2], float (&factor)[SLOTS][2][FACTORS + 1],
                       uint32 (&reset_rows)[SLOTS]) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const unsigned char* entry = shared + entry_of(here, s, i);
        float values[2][ACTIVATIONS + 4];
        load_saved(entry + DY_BYTES, place, values);
        load_fragments<1>(entry + fragment, &d_out[s]);
        const bool is_reset =
            RESET && resets[s].test(entry + SLOT_BYTES + reset_offset(here.lane), reset_shift);
        find_factors(values, cells.vector[s], factor[s]);
        if (RESET) reset_rows[s] = __ballot_sync(~0u, is_reset);
    }
}

// The derivative of a slot's two cells.
INLINE void step_slot(const BackwardArgs& args, const Place& here, const int* rows,
                      const Slot& slot, int s, const int& t, uint32 reset_rows,
                      const uint32 (&bits)[2], const int (&length)[2], const float (&d_out)[2],
                      const float (&factor)[2][FACTORS + 1], Cells& cells,
                      float (&d_gate)[2][PLANES], float (&d_vector)[2][VECTORS + 1]) {
    const int unit = here.unit(slot);
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        float (&d_here)[STATES] = cells.d_state[s][c];
        const int64 b = rows[slot.tile * 8 + here.thread_in_group * 2 + c];
        if (RESET && reset_rows & bits[c]) end_at_reset(d_here, cells.d_reset[s][c]);
        const bool live = is_live(length, c, t);
        float d_after[STATES], d_before[STATES], found[PLANES];
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            d_after[k] = k == 0 ? d_here[k] + d_out[c] : d_here[k];
            if (ALL_STATES && args.d_all_states[k] && live && b >= 0 && unit < args.hidden)
                d_after[k] +=
                    widen(args.d_all_states[k][(t * args.batch + b) * args.hidden + unit]);
        }
        derivative(factor[c], d_after, found, d_before, d_vector[c]);
        if (ALL_LIVE || live) {
            #pragma unroll
            for (int k = 0; k < STATES; ++k) d_here[k] = d_before[k];
            #pragma unroll
            for (int p = 0; p < PLANES; ++p) d_gate[c][p] = found[p];
        }
    }
}

// Gradients of initial states, sums over steps, and zeros where no row lives.
INLINE void finish(const BackwardArgs& args, const Place& here, const Time& time, const int* rows,
                   const bool (&owned)[SLOTS], const int (&row)[SLOTS], const Cells& cells) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        if (!owned[s]) continue;
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group, unit = group * 8 + here.group_of_lane;
        if (LENGTHS && row[s] >= 0)
            store_no_gradients(args.d_gates, time.count * args.batch + row[s], args.batch,
                               group * 8 + here.thread_in_group * 2, int(args.steps) - time.count);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + here.thread_in_group * 2 + c];
            if (b < 0 || unit >= args.hidden) continue;
            const bool replaced =
                RESET && !args.reverse && time.length(args, b) > 0 && args.reset[b];
            store_first(args, cells.d_state[s][c], cells.d_reset[s][c], replaced,
                        args.batch * args.hidden, int64(b) * args.hidden + unit);
        }
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) {
            const float all = sum_over_rows(cells.total[s][p]);
            if (here.thread_in_group == 0)
                args.sums[((here.first_row / 8 + slot.tile) * (PLANES + VECTORS) + p) * UNITS +
                          unit] = all;
        }
    }
}
