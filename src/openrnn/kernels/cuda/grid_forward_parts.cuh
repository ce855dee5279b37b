// The parts of the forward loop of a grid: setup, the cells' step, the end. Those of blocks and
// clusters, by groups of a warp and tiles, are in forward_setup.cuh and forward_step.cuh.

// The cells of a warp: constants of its units and the states of two rows of each.
struct Cells {
    UnitConstants units[SLOTS];
    float state[SLOTS][2][STATES];

    INLINE void load(const ForwardArgs& args, const Place& here, const int* rows, int count,
                     const Slot& slot, int s) {
        const int unit = here.unit(slot);
        const bool inside = slot.owned && unit < args.hidden;
        units[s].load(args, unit, inside);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + here.thread_in_group * 2 + c];
            const bool exists = inside && b >= 0;
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                state[s][c][k] = exists ? first_state_inline(args, count, k, b, unit) : 0.0f;
        }
    }
};

// A warp's ring buffer of inputs: it copies what its own lanes read, STAGES - 1 steps ahead.
struct Inputs {
    const storage_t* source[SLOTS][COPIES];
    int taken[SLOTS][COPIES];  // bytes: 16, or 0 where there is nothing to copy

    INLINE void begin(const ForwardArgs& args, const Place& here, const Time& time,
                      const int* rows) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const int number = copy * 32 + here.lane, gate = number / (GATE_BYTES / 16);
                const Slot slot = here.slot(s);
                const int b = rows[slot.tile * 8 + number * PIECE / 8 % 8];
                taken[s][copy] = b >= 0 && gate < GATES && slot.owned ? 16 : 0;
                source[s][copy] = taken[s][copy]
                    ? advanced(args.x, time.to_first * args.x_step_bytes) + b * args.x_row +
                          gate * args.x_gate + (here.first_group + slot.group) * 8 +
                          number * PIECE % 8
                    : args.x;
            }
    }
    // The ring's entries are found from i: a grid's step takes as long as its way through L2, not
    // as its instructions. later: 1 where resets after step i are those of step i + 1, 0 in
    // reverse, where they are those of step i.
    INLINE void copy(const ForwardArgs& args, const Place& here, const Time& time,
                     const int& ring_at, const int& later, const bool (&owned)[SLOTS],
                     Resets (&resets)[SLOTS], int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target =
                shared_address(shared) + ring_at + (s * STAGES + i % STAGES) * ENTRY_BYTES;
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                if (copy * 512 + here.lane * 16 < SLOT_BYTES)
                    copy_async<16>(target + copy * 512 + here.lane * 16, source[s][copy],
                                   i < time.count ? taken[s][copy] : 0);
                source[s][copy] = advanced(source[s][copy], args.x_step_bytes);
            }
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane),
                               here.thread_in_group, time.direction, args.reset_step_bytes,
                               owned[s] && i + later < time.count);
        }
        commit_copies();
    }
};

// The step of a slot's cells, whose shares of sums are in buffer `now`.
INLINE void step_cells(const ForwardArgs& args, const Place& here, const int* rows,
                       const Slot& slot, const UnitConstants& constants,
                       const float (&given)[GATES][2], const TileRows& tile, const RowBits& bits,
                       int s, int now, int t, float (&state)[2][STATES], float (&hidden)[2],
                       float (&values)[2][ACTIVATIONS + 4]) {
    float sums[GATES][2];
    start_sums(constants, given, sums);
    add_slot_shares(here, s, now, sums);
    step_pair(args, constants, given, sums, bits, tile, rows,
              slot.tile * 8 + here.thread_in_group * 2, here.unit(slot), t, state, hidden, values);
}

// A slot's h of two units of the lane's row: published for the next step first, if there is one,
// then y and saved activations. unit: the first of the two; rest: see SavedPlace.
INLINE void store_results(const ForwardArgs& args, const TileRows& tile, uint32 own_bit, int row,
                          int unit, int i, int count, const float (&hidden)[2],
                          const float (&values)[2][ACTIVATIONS + 4], operand_t* message_at,
                          storage_t* y,
                          bool has_saved, storage_t* saved, int rest) {
    const Pair pair = transposed(hidden[0], hidden[1]);
    const Message message =
        next_hidden(args, pair, hidden[0], hidden[1], tile.resets, row, unit);
    const bool live = !LENGTHS || tile.live & own_bit;
    const bool publishes = row >= 0 && (!args.flag_buffer || i + 1 < count);
    if (publishes) publish(message_at, message);
    const bool stores = row >= 0 && args.flag_buffer;
    if (stores) store_inside(y, live ? pair : Pair{}, unit, args.hidden);
    if (has_saved) store_saved(saved, rest, values);
}

// Zeros of y past the rows' ends, and final states.
INLINE void finish(const ForwardArgs& args, const Place& here, const Time& time, const int* rows,
                   const int (&row)[SLOTS], const Cells& cells) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group;
        if (LENGTHS && slot.owned && row[s] >= 0)
            store_no_output(args, time.count, time.direction, row[s], group, here.thread_in_group);
        const int unit = group * 8 + here.group_of_lane;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + here.thread_in_group * 2 + c];
            const bool inside = slot.owned && b >= 0 && unit < args.hidden;
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                if (inside)
                    store_end(args.chunk_out, args.final[k], k * args.batch * args.hidden,
                              int64(b) * args.hidden + unit, cells.state[s][c][k]);
        }
    }
}
