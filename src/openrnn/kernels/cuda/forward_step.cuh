// One step of a warp in the forward loop: from sums and inputs to h, y and saved activations.
//
// Scalars are passed by value, and compound conditions get a name first: with struct fields or
// unnamed conditions some kernels spill.

// Waits until h of this step is here.
INLINE void wait_for_hidden(const Place& here, uint32 mbarrier, uint32 phase) {
#if CLUSTER > 1
    mbarrier_wait(mbarrier, phase);
    if (here.thread == 0) mbarrier_expect(mbarrier, MESSAGE_BYTES);
    if (UNEVEN) warpgroup_barrier(here.warp >> 2);
#endif
}

// Sums begin with what is known before h is: inputs and biases.
INLINE void start_sums(const Cells& cells, const float (&given)[GROUPS_OF_WARP][TILES][GATES][2],
                       Sums& sums) {
    #pragma unroll
    for (int j = 0; j < GROUPS_OF_WARP; ++j)
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int half = j * GATES + gate;
                    sums[half / 2][n][0][half % 2 * 2 + c] =
                        cells.units[j].start(gate, given[j][n][gate][c]);
                }
}

// The step of a group's cells in tile n, from the sums and the input side of its gates.
INLINE void step_cells(const ForwardArgs& args, const Place& here, const int* rows,
                       const Sums& sums, const float (&given)[GATES][2], const TileRows& tile,
                       const RowBits& bits, int f, int j, int n, int t, Cells& cells,
                       float (&hidden)[2], float (&values)[2][ACTIVATIONS + 4]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        float left[GATES], right[GATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const int half = j * GATES + gate;
            left[gate] = given[gate][c] + cells.units[j].bias_x[gate];
            right[gate] = chained(sums, half / 2, n, half % 2 * 2 + c);
        }
        hidden[c] = step_cell(args, left, right, cells.units[j].vectors, bits, tile, c,
                              rows, f * ROWS + n * 8 + (here.thread_in_group * 2 + c), here.unit(j),
                              here.first_group + j < here.end_group, t, cells.state[f][j][n][c],
                              values[c]);
    }
}

#if CLUSTER > 1
// h in 16 bytes to the blocks of `peers`, into the buffer that is not read in this step
INLINE void send_hidden(const Place& here, const uint32 (&peers)[SENDS], uint4 piece, int there,
                        int f, int read_mbarrier) {
    #pragma unroll
    for (int p = 0; p < SENDS; ++p)
        if (CLUSTER % PIECE_LANES == 0 || here.lane % PIECE_LANES + p * PIECE_LANES < CLUSTER)
            store_async(peers[p] + there, piece, peers[p] + f * 16 + 8 - read_mbarrier);
}
#endif

// y of a row and two units at time t. The layer above in a stack polls for it: where units are
// padded it polls for a copy with all of them.
INLINE void store_output(const ForwardArgs& args, storage_t* y, Pair pair, int row, int unit,
                         int t) {
#if LAYERS > 1 && !PADDED
    publish(y, pair);
#else
    store_inside(y, pair, unit, args.hidden);
#endif
#if LAYERS > 1 && PADDED
    storage_t* const copy = reinterpret_cast<storage_t*>(args.flag_buffer);
    if (copy) publish(copy + (t * args.batch + row) * UNITS + unit, pair);
#endif
}

// Saved activations of group j, where there is such a tile.
INLINE void store_tile_saved(const ForwardArgs& args, const Place& here, storage_t* saved, int f,
                             int n, int j, int rest, const float (&values)[2][ACTIVATIONS + 4]) {
    const bool has_tile = f + n == 0 || here.first_row + f * ROWS + n * 8 < args.batch;
    if (has_tile)
        store_saved(saved + (f * TILES + n) * TILE_SAVED + j * (64 * SAVED), rest, values);
}

// A group's cells in tile n of product f in step i, at time t: h for the next step, y and saved
// activations. given: the input side; row, y: what the lane stores of the tile; saved: see
// `first_saved`; rest: see SavedPlace; write_at, read_at: see `hidden_sum`; peers: the lane's.
INLINE void step_group(const ForwardArgs& args, const Place& here, const int* rows,
                       const Sums& sums, const float (&given)[GATES][2], const TileRows& tile,
                       const RowBits& bits, uint32 own_bit, int rest, int f, int j, int n, int t,
                       int i, int count, int row, storage_t* y, storage_t* saved, int write_at,
                       int read_at, const uint32 (&peers)[SENDS], int read_mbarrier,
                       Cells& cells) {
    float hidden[2] = {0.0f, 0.0f}, values[2][ACTIVATIONS + 4] = {};
    step_cells(args, here, rows, sums, given, tile, bits, f, j, n, t, cells, hidden, values);
    const Pair pair = transposed(hidden[0], hidden[1]);
    const Message message = rounded(next_hidden(args, pair, hidden[0], hidden[1], tile.resets,
                                                row, here.pair_unit(j)));
    const bool owned = GROUPS == CLUSTER * GROUPS_OF_BLOCK || here.first_group + j < here.end_group;
    const int there = write_at - read_at + f * (2 * HIDDEN_BYTES) + n * 128;
#if CLUSTER > 1
    const uint4 piece = gathered(message);
    if (owned && i + 1 < count) send_hidden(here, peers, piece, there, f, read_mbarrier);
#else
    if (owned)
        store(reinterpret_cast<operand_t*>(shared + there) +
                  here.thread_in_group % PIECE_LANES * 2, message);
#endif
    const bool live = !LENGTHS || tile.live & own_bit;
    const bool has_row = owned && row >= 0;
    if (has_row)
        store_output(args, y + j * 8, live ? pair : Pair{}, row, here.pair_unit(j), t);
    if (SAVE && owned) store_tile_saved(args, here, saved, f, n, j, rest, values);
}

// Resets cells of a tile: after their h was sent, so that no block waits for it.
INLINE void reset_tile(const ForwardArgs& args, const Place& here, const int* rows, uint32 reset,
                       const RowBits& bits, int f, int n, Cells& cells) {
    #pragma unroll
    for (int j = 0; j < GROUPS_OF_WARP; ++j)
        reset_cells(cells.state[f][j][n], reset, bits.pair, args.reset_state,
                    rows + here.pair_rows(f, n), here.unit(j), args.hidden);
}

// The final states of a unit in two rows, from number `first` on; cells: B * H.
INLINE void store_final(const ForwardArgs& args, const int* rows, int first, int unit, int64 cells,
                        const float (&state)[2][STATES]) {
    #pragma unroll
    for (int c = 0; c < 2; ++c) {
        const int b = rows[first + c];
        const bool inside = b >= 0 && unit < args.hidden;
        #pragma unroll
        for (int k = 0; k < STATES; ++k)
            if (inside)
                store_end(args.chunk_out, args.final[k], k * cells, int64(b) * args.hidden + unit,
                          state[c][k]);
    }
}

// Zeros of y past the rows' ends, and final states. Places are found again: what only the end
// needs is not held in the loop.
INLINE void finish(const ForwardArgs& args, const Time& time, const int* rows,
                   const int (&row)[TILES_IN_FLIGHT][TILES], const Cells& cells) {
    const int thread = reread_thread();
    const int group_of_lane = thread % 32 / 4, thread_in_group = thread % 4;
    const int block = cluster_rank();
    const int first_group = first_group_of(block) + thread / 32 * GROUPS_OF_WARP;
    const int end_group = first_group_of(block + 1);
    const int64 cells_each = reread(args.batch) * args.hidden;
    #pragma unroll
    for (int f = 0; f < TILES_IN_FLIGHT; ++f)
        #pragma unroll
        for (int at = 0; at < GROUPS_OF_WARP * TILES; ++at) {
            const int j = at / TILES, n = at % TILES, group = first_group + j;
            if (group >= end_group) continue;
            if (LENGTHS && row[f][n] >= 0)
                store_no_output(args, time.count, time.direction, row[f][n], group,
                                thread_in_group);
            store_final(args, rows, f * ROWS + n * 8 + thread_in_group * 2,
                        group * 8 + group_of_lane, cells_each, cells.state[f][j][n]);
        }
}
