// One step of a warp in the backward loop: from dy and saved activations to gate gradients and dh.

// What a step needs before dh arrives: dy, the cells' factors, and the rows that were reset after
// the step (bit 4r of row r).
INLINE void load_slots(const Cells& cells, const SavedPlace& place, int ring_at, int fragment,
                       int stage, int reset_at, uint32 reset_shift, int f,
                       Resets (&resets)[TILES_IN_FLIGHT][SLOTS], float (&d_out)[SLOTS][2],
                       float (&factor)[SLOTS][2][FACTORS + 1], uint32 (&reset_rows)[SLOTS]) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const int entry = stage + (f * SLOTS + s) * ENTRY_BYTES;
        float values[2][ACTIVATIONS + 4];
        load_saved(shared + ring_at + entry + DY_BYTES, place, values);
        load_fragments<1>(shared + fragment + entry, &d_out[s]);
        const bool is_reset =
            RESET && resets[f][s].test(shared + ring_at + entry + reset_at, reset_shift);
        find_factors(values, cells.vector[s], factor[s]);
        if (RESET) reset_rows[s] = __ballot_sync(~0u, is_reset);
    }
}

// Waits until the shares of the step before are here.
INLINE void wait_for_shares(const Place& here, uint32 mbarriers, int f, int write_mbarrier,
                            uint32 phase, int message_bytes) {
#if CLUSTER > 1
    // A step's gate gradients are written over those that the step before multiplied. Messages say
    // that their senders have read them, not that this block's other warps have; with two products
    // in flight the other one's barrier says that. Here warps wait for messages anyway.
    if (TILES_IN_FLIGHT == 1) loop_barrier();
    const uint32 mbarrier = mbarriers + f * 16 + (8 - write_mbarrier);
    mbarrier_wait(mbarrier, phase);
    if (here.thread == 0) mbarrier_expect(mbarrier, message_bytes);
#endif
}

// Adds to dh the shares of all blocks, in one of two buffers.
INLINE void receive_shares(const Place& here, const int (&own_shares)[SLOTS], int f, int buffer,
                           Cells& cells) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s)
        if (here.slot(s).owned)
            add_shares<CLUSTER, SHARE_BYTES>(
                cells.d_state[f][s],
                shared + AT_SHARES + f * (2 * SHARES_BYTES) + buffer + own_shares[s]);
}

// Adds the gradients of the only slot to the sums over steps.
INLINE void add_live(const int (&length)[2], int t, const float (&d_gate)[2][PLANES],
                     const float (&d_vector)[2][VECTORS + 1], Cells& cells) {
    #pragma unroll
    for (int c = 0; c < 2; ++c)
        if (is_live(length, c, t)) add_up(cells.total[0], d_gate[c], d_vector[c]);
}

// Gate gradients of the lane's row of a slot to memory, where the layer below in a stack polls for
// them; then on to the next step's place.
INLINE void store_gates(const BackwardArgs& args, bool has_row, storage_t*& d_gates,
                        const Pair (&pairs)[PLANES]) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p)
#if LAYERS > 1
        if (has_row) publish(d_gates + p * UNITS, pairs[p]);
#else
        if (has_row) store(d_gates + p * UNITS, pairs[p]);
#endif
    d_gates = advanced(d_gates, args.d_gates_step_bytes);
}

// The derivative of a slot's cells; their gate gradients go to the product of the block.
INLINE void step_slot(const BackwardArgs& args, const Place& here, const int* rows,
                      const Slot& slot, int f, int s, int t, uint32 reset_rows,
                      const uint32 (&bits)[2], const int (&length)[2], const float (&d_out)[2],
                      const float (&factor)[2][FACTORS + 1], Cells& cells,
                      float (&d_gate)[2][PLANES], float (&d_vector)[2][VECTORS + 1]) {
    const int group = here.first_group + slot.group;
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        float (&d_here)[STATES] = cells.d_state[f][s][c];
        if (RESET && reset_rows & bits[c]) end_at_reset(d_here, cells.d_reset[f][s][c]);
        const bool live = is_live(length, c, t);
        float d_after[STATES], d_before[STATES], found[PLANES];
        #pragma unroll
        for (int k = 0; k < STATES; ++k) {
            d_after[k] = k == 0 ? d_here[k] + d_out[c] : d_here[k];
            const int64 b = rows[f * ROWS + slot.tile * 8 + here.thread_in_group * 2 + c];
            const int64 unit = group * 8 + here.group_of_lane;
            if (ALL_STATES && args.d_all_states[k] && slot.owned && live && b >= 0 &&
                unit < args.hidden)
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
        if (!LATE && live) add_up(cells.total[s], found, d_vector[c]);
    }
}

// A slot's gate gradients, transposed, into the operand of the block's product.
INLINE void place_gates(bool owned, int f, const int (&own_gates)[GATES],
                        const float (&d_gate)[2][PLANES], Pair (&pairs)[PLANES]) {
    #pragma unroll
    for (int p = 0; p < PLANES; ++p) {
        pairs[p] = transposed(d_gate[0][p], d_gate[1][p]);
        if (p >= RIGHT && owned)
            store(reinterpret_cast<storage_t*>(shared + f * OPERAND_BYTES +
                                               own_gates[max(p - RIGHT, 0)]),
                  rounded(pairs[p]));
    }
}

// This block's share of dh to the owners of its units.
INLINE void send_shares(const Place& here, const Sums& sums, const int (&share_at)[MMA_ROWS][2],
                        const uint32 (&owners)[MMA_ROWS][2], int f, int write_buffer,
                        int write_mbarrier) {
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int group = (here.warp * MMA_ROWS + m) * 2 + half;
            if (WARPS * MMA_ROWS * 2 > GROUPS && group >= GROUPS) continue;
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const float low = chained(sums, m, n, half * 2);
                const float high = chained(sums, m, n, half * 2 + 1);
                const int buffer = write_buffer + f * (2 * SHARES_BYTES);
                const int there = share_at[m][half] + buffer + n * (GROUPS_OF_BLOCK * 256);
#if CLUSTER > 1
                store_async(owners[m][half] + there, low, high,
                            owners[m][half] + f * 16 + write_mbarrier);
#else
                *reinterpret_cast<float2*>(shared + there) = make_float2(low, high);
#endif
            }
        }
}

// Adds the shares of the last of `count` steps.
INLINE void receive_last(const Place& here, uint32 mbarriers, const int (&own_shares)[SLOTS],
                         int count, Cells& cells) {
    #pragma unroll
    for (int f = 0; f < TILES_IN_FLIGHT && count > 0; ++f) {
#if CLUSTER > 1
        mbarrier_wait(mbarriers + f * 16 + (count - 1) % 2 * 8, uint32(count - 1) / 2 % 2);
#endif
        receive_shares(here, own_shares, f, (count - 1) % 2 * SHARES_BYTES, cells);
    }
}

// Gradients of initial states, sums over steps, and zeros where no row lives. Places are found
// again: what only the end needs is not held in the loop.
INLINE void finish(const BackwardArgs& args, const Place& here, const Time& time, const int* rows,
                   const Cells& cells) {
    const int thread = reread_thread();
    const int group_of_lane = thread % 32 / 4, thread_in_group = thread % 4;
    const int block = cluster_rank();
    const int first_group = first_group_of(block);
    const int groups = first_group_of(block + 1) - first_group;
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot(thread / 32 * SLOTS + s, groups);
        if (!slot.owned) continue;
        const int group = first_group + slot.group, unit = group * 8 + group_of_lane;
        #pragma unroll
        for (int f = 0; f < TILES_IN_FLIGHT; ++f) {
            const int64 row = rows[f * ROWS + slot.tile * 8 + group_of_lane];
            if (LENGTHS && row >= 0)
                store_no_gradients(args.d_gates, time.count * args.batch + row, args.batch,
                                   group * 8 + thread_in_group * 2,
                                   int(args.steps) - time.count);
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int b = rows[f * ROWS + slot.tile * 8 + thread_in_group * 2 + c];
                if (b < 0 || unit >= args.hidden) continue;
                const bool replaced =
                    RESET && !args.reverse && time.length(args, b) > 0 && args.reset[b];
                store_first(args, cells.d_state[f][s][c], cells.d_reset[f][s][c], replaced,
                            reread(args.batch) * args.hidden, int64(b) * args.hidden + unit);
            }
        }
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) {
            const float all = sum_over_rows(cells.total[s][p]);
            if (thread_in_group == 0)
                args.sums[((here.cluster * TILES + slot.tile) * (PLANES + VECTORS) + p) * UNITS +
                          unit] = all;
        }
    }
}
