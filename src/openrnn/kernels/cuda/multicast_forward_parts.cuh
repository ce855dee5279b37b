// The parts of the forward loop with multicast: R, the product, the cells.

// This warp's rows of R, half of K; in a stack one half is W_ih, the other R.
INLINE void load_weights(const ForwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    const int m_warp = here.warp % 4, half_of_k = here.warp / 4;
    load_matrix(matrix, others, [&](int which, int k_tile) {
        const int number = m_warp * MMA_ROWS * 2 + which;
        const int group = number / GATES, gate = number % GATES;
        const bool other = STACK && half_of_k == OTHER_LAYER;
        if (group >= GROUPS_OF_BLOCK || (other && !has_layer(here, LAYER_BEFORE)))
            return make_uint4(0, 0, 0, 0);
        return piece_of(other ? args.w_ih : args.weight, gate,
                        (here.block * GROUPS_OF_BLOCK + group) * 8 + here.group_of_lane,
                        ((STACK ? 0 : half_of_k * K_TILES) + k_tile) * K_TILE +
                            here.thread_in_group * PIECE_K);
    });
    share_weights();
}

// Stores two units of a row of h where other blocks will copy it from.
INLINE void store_hidden(const Place& here, const Slot& slot, unsigned char* exchange,
                         Message message) {
    *reinterpret_cast<uint32*>(exchange +
                               ((here.group(slot) * TILES + slot.tile) * 8 + here.group_of_lane) *
                                   16 + here.thread_in_group * 4) = message.bits;
}

// The cells of a warp in one set, and the inputs of their next step.
struct SetCells {
    float state[SLOTS][2][STATES];
    int64 source[SLOTS][COPIES];    // offset of inputs in a step, -1: none
    int row[SLOTS], length[SLOTS];  // of the row that a lane stores
    Resets resets[SLOTS];
    int set;

    INLINE int entry(const Place& here, int s) const {
        return AT_INPUTS +
               ((set * CELL_WARPS + here.cell_warp()) * SLOTS + s) * ENTRY_BYTES;
    }
    INLINE const int* rows_of(const int* rows, const Slot& slot) const {
        return rows + set * SET_ROWS + slot.tile * 8;
    }

    // Loads the states and stores h of step 0.
    INLINE void begin(const ForwardArgs& args, const Place& here, const Exchange& exchange,
                      const Time& time, const int* rows, int number) {
        set = number;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            const int* const tile_rows = rows_of(rows, slot);
            row[s] = slot.owned ? tile_rows[here.group_of_lane] : -1;
            length[s] = !LENGTHS || row[s] < 0 ? 0 : int(args.lengths[row[s]]);
            if (RESET)
                resets[s].begin(args.reset, args.batch, row[s],
                                time.first + (args.reverse ? 0 : 1), length[s]);
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int b = slot.owned ? tile_rows[here.thread_in_group * 2 + c] : -1;
                #pragma unroll
                for (int k = 0; k < STATES; ++k)
                    state[s][c][k] = b < 0 || (PADDED && here.unit(slot) >= args.hidden)
                        ? 0.0f
                        : first_state_inline(args, time.count, k, b, here.unit(slot));
            }
            const Pair pair = transposed(state[s][0][0], state[s][1][0]);
            if (slot.owned) store_hidden(here, slot, exchange.operand_of(set, 0), message_of(pair));
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const int place = copy * 32 + here.lane, gate = place / (GATE_BYTES / 16);
                const bool given = !STACK || here.layer == 0;  // else the layer below gives it
                const int b = slot.owned && gate < GATES && given
                    ? tile_rows[place * PIECE / 8 % 8] : -1;
                source[s][copy] = b < 0 ? -1
                    : b * args.x_row + gate * args.x_gate + here.group(slot) * 8 +
                          place * PIECE % 8;
            }
        }
        if (time.count > 0) signal_stored(here, set);
        copy(args, here, time, 0);
    }
    // Copies the inputs of step i.
    INLINE void copy(const ForwardArgs& args, const Place& here, const Time& time, int i) {
        const storage_t* const x = advanced(args.x, (time.to_first + i) * args.x_step_bytes);
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared) + entry(here, s);
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const bool exists = source[s][copy] >= 0 && i < time.count;
                if (copy * 512 + here.lane * 16 < SLOT_BYTES)
                    copy_async<16>(target + copy * 512 + here.lane * 16,
                                   exists ? x + source[s][copy] : args.x, exists ? 16 : 0);
            }
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane),
                               here.thread_in_group, time.direction, args.reset_step_bytes,
                               row[s] >= 0 && i + (args.reverse ? 0 : 1) < time.count);
        }
        commit_copies();
    }
};

// What a step's cells read besides sums: their inputs, and the rows of their tiles.
struct Given {
    float inputs[SLOTS][GATES][2];
    TileRows tiles[SLOTS];

    // Reads those of step i and has the next ones copied.
    INLINE void read(const ForwardArgs& args, const Place& here, const Time& time, SetCells& cells,
                     int i) {
        await_copies<SETS_OF_WARP - 1>();
        __syncwarp();
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!here.slot(s).owned) continue;
            const unsigned char* const entry = shared + cells.entry(here, s);
            load_fragments<GATES>(entry + fragment_offset(here.lane), inputs[s]);
            tiles[s].read(time.first + time.direction * i, cells.length[s], cells.resets[s],
                          entry + SLOT_BYTES + reset_offset(here.lane),
                          uint32(args.reset_step_bytes) * 8);
            tiles[s].vote();
        }
        __syncwarp();  // all lanes have read them
        cells.copy(args, here, time, i + 1);
    }
};

// y and saved activations of a turn. CELLS_WAIT: they are stored before the next one, as the
// publishing thread's fence waits for all stores that the multiprocessor began before it.
struct Results {
    storage_t *y[SLOTS] = {}, *saved[SLOTS] = {};  // null: none
    Pair output[SLOTS];
    // Where ACTIVATIONS % 4 is 3 a fourth value is stored beside the last three. Nothing sets it:
    // backward loads it, and no derivative reads it.
    float values[SLOTS][2][ACTIVATIONS + 4];

    INLINE void store(const ForwardArgs& args, const Place& here, const SavedPlace& saved_place) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const int first = here.group(here.slot(s)) * 8 + here.thread_in_group * 2;
            if (y[s]) store_inside(y[s], output[s], first, args.hidden);
            if (SAVE && saved[s]) store_saved(saved[s], saved_place.rest, values[s]);
        }
    }
};

// Step i of a set's cells, from their shares of sums.
INLINE void step_set(const ForwardArgs& args, const Place& here, const Exchange& exchange,
                     const Time& time, const int* rows,
                     const UnitConstants (&constants)[GROUPS_OF_WARP], const RowBits& bits,
                     Given& given, SetCells& cells, Results& results, int turn, int i) {
    const int t = time.first + time.direction * i;
    const int64 strides = time.to_first + i;  // of the loop, from time 0
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        if (!slot.owned) continue;
        const TileRows& tile = given.tiles[s];
        const UnitConstants& unit = constants[s / TILES_OF_WARP];
        const float* const shares =
            reinterpret_cast<const float*>(shares_of(here, slot.group, slot.tile, turn));
        float sums[GATES][2], hidden[2];
        if (STACK) add_shares<1>(shares, given.inputs[s]);  // those of W_ih
        start_sums(unit, given.inputs[s], sums);
        add_shares<STACK ? 1 : K_WARPGROUPS>(shares + (STACK ? GATES * 64 : 0), sums);
        step_pair(args, unit, given.inputs[s], sums, bits, tile, cells.rows_of(rows, slot),
                  here.thread_in_group * 2, here.unit(slot), t, cells.state[s], hidden,
                  results.values[s]);
        const Pair pair = transposed(hidden[0], hidden[1]);
        const int first = here.group(slot) * 8 + here.thread_in_group * 2;
        const Message message = next_hidden(args, pair, hidden[0], hidden[1], tile.resets,
                                            cells.row[s], first);
        if (i + 1 < steps_published(time.count))
            store_hidden(here, slot, exchange.operand_of(cells.set, i + 1), message);
        results.output[s] = !LENGTHS || tile.live & 1u << here.group_of_lane * 4 ? pair : Pair{};
    }
    arrive_warp(here, AT_READ + (turn & 1) * 8);  // all lanes have read sums
    if (i + 1 < steps_published(time.count)) signal_stored(here, cells.set);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        if (!slot.owned) continue;
        const int first = here.group(slot) * 8 + here.thread_in_group * 2;
        results.y[s] = cells.row[s] < 0 ? nullptr
            : advanced(args.y, strides * args.y_step_bytes) + cells.row[s] * args.y_row + first;
        const int64 tile = (here.first_row + cells.set * SET_ROWS) / 8 + slot.tile;
        results.saved[s] = !SAVE || tile * 8 >= args.batch ? nullptr
            : advanced(args.saved, strides * args.saved_step_bytes) +
                  (tile * GROUPS + here.group(slot)) * (64 * SAVED) + saved_offset(here.lane);
        if (RESET)
            reset_cells(cells.state[s], given.tiles[s].reset, bits.pair, args.reset_state,
                        cells.rows_of(rows, slot) + here.thread_in_group * 2, here.unit(slot),
                        args.hidden);
    }
}

// The warps that compute cells.
INLINE void compute(const ForwardArgs& args, const Place& here, const Exchange& exchange,
                    const Time& time, const int* rows) {
    UnitConstants constants[GROUPS_OF_WARP];
    #pragma unroll
    for (int g = 0; g < GROUPS_OF_WARP; ++g) {
        const Slot slot = here.slot(g * TILES_OF_WARP);
        constants[g].load(args, here.unit(slot), here.unit(slot) < args.hidden);
    }
    const RowBits bits(1u << here.thread_in_group * 8, 1u << (here.thread_in_group * 8 + 4));
    const SavedPlace saved_place(here.lane);
    SetCells cells[SETS_OF_WARP];
    #pragma unroll
    for (int set = 0; set < SETS; ++set) cells[set].begin(args, here, exchange, time, rows, set);
    Results results;
    int turn = 0;
    for (int i = 0; i < time.count; ++i)
        #pragma unroll 1
        for (int set = 0; set < SETS; ++set, ++turn) {
            Given given;
            if (CELLS_WAIT) given.read(args, here, time, cells[0], i);
            if (CELLS_WAIT) results.store(args, here, saved_place);
            await_turn(AT_SUMMED_UP, turn);
            if (!CELLS_WAIT) given.read(args, here, time, cells[0], i);
            step_set(args, here, exchange, time, rows, constants, bits, given, cells[0], results,
                     turn, i);
            if (!CELLS_WAIT) results.store(args, here, saved_place);
            rotate(cells);
        }
    if (CELLS_WAIT) results.store(args, here, saved_place);
    #pragma unroll
    for (int set = 0; set < SETS; ++set)
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            if (!slot.owned) continue;
            if (LENGTHS && cells[set].row[s] >= 0)
                store_no_output(args, time.count, time.direction, cells[set].row[s],
                                here.group(slot), here.thread_in_group);
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int b =
                    cells[set].rows_of(rows, slot)[here.thread_in_group * 2 + c];
                if (b < 0 || (PADDED && here.unit(slot) >= args.hidden)) continue;
                #pragma unroll
                for (int k = 0; k < STATES; ++k)
                    store_end(args.chunk_out, args.final[k], k * args.batch * args.hidden,
                              int64(b) * args.hidden + here.unit(slot), cells[set].state[s][c][k]);
            }
        }
}
