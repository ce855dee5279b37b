// The parts of the backward loop with multicast: R, sums of the blocks that share K, the cells.

#include "multicast_messages.cuh"

// This warp's rows of R^T, of the block's part of K: of each half [GATES, SPLIT_GROUPS, 8 units].
// In a stack the first half is the transposed W_ih of the layer above.
INLINE void load_weights(const BackwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    const int m_warp = here.warp % 4, first_tile = here.warp / 4 * K_TILES;
    load_matrix(matrix, others, [&](int which, int k_tile) {
        const int group = m_warp * MMA_ROWS * 2 + which, tile = first_tile + k_tile;
        const int half = tile / HALF_TILES;
        const bool other = STACK && half == OTHER_LAYER;
        if (group >= SUM_GROUPS || (other && !has_layer(here, LAYER_BEFORE)))
            return make_uint4(0, 0, 0, 0);
        const int piece = tile % HALF_TILES * 4 + here.thread_in_group, part = here.part_of_k();
        const int first = (STACK ? part : part * HALVES + half) * SPLIT_GROUPS;
        const int64 unit = (here.block / K_PARTS * SUM_GROUPS + group) * 8 + here.group_of_lane;
        return *reinterpret_cast<const uint4*>(
            (other ? args.w_above : args.weight) +
            (unit * GATES + piece / SPLIT_GROUPS) * UNITS + (first + piece % SPLIT_GROUPS) * 8);
    });
    share_weights();
}

// The sums of this lane's cells in slot s of the owner, a block `away` blocks after this one.
INLINE float2 sums_of(const Place& here, int away, int s, int turn) {
    const Slot slot = here.slot(s);
    if (!slot.owned) return {};
    const int group = (here.part_of_k() + away) * GROUPS_OF_BLOCK + slot.group;
    const unsigned char* const shares = shares_of(here, group, slot.tile, turn);
    float2 sums = *reinterpret_cast<const float2*>(shares);
    if (K_WARPGROUPS > 1) {
        const float2 other = *reinterpret_cast<const float2*>(shares + 256);
        sums.x += other.x, sums.y += other.y;
    }
    return sums;
}

// A block's own cells' sums over its part of K.
typedef float2 OwnSums[SLOTS];

// Reads the sums of a turn: its own cells' stay here, those of the other blocks' cells are sent.
INLINE void send_sums(const Place& here, const Exchange& exchange, int set, int step, int turn,
                      OwnSums& own) {
    const int part = here.part_of_k();
    #pragma unroll
    for (int next = 1; next < K_PARTS; ++next) {
        const int away = (part + next) % K_PARTS - part;
        const int sender = away > 0 ? part : part - 1;
        uint32 words[MESSAGE_WORDS];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const float2 sums = sums_of(here, away, s, turn);
            words[2 * s] = tagged(sums.x, step), words[2 * s + 1] = tagged(sums.y, step);
        }
        send_message(here, exchange, away, sender, set, step, words);
    }
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) own[s] = sums_of(here, 0, s, turn);
    arrive_warp(here, AT_READ + (turn & 1) * 8);
}

// Adds everything to dh, part by part of K. Messages through memory were read once, and are polled
// until they are of this step.
INLINE void receive_sums(const Place& here, const Exchange& exchange, int set, int step,
                         const OwnSums& own, Messages& messages, Cells& cells) {
    const int part = here.part_of_k();
#if SPIN_LIMIT
    for (int tries = 0; !messages.are_of(step); ++tries) {
        if (tries > SPIN_LIMIT) __trap();
#else
    while (!messages.are_of(step)) {
#endif
        messages.read(here, exchange, set, step);
    }
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        float2 total = {};
        #pragma unroll
        for (int k = 0; k < K_PARTS; ++k) {
            float2 sums = own[s];
            if (k < part && k < K_PARTS - 1) sums = untagged(messages.words[k] + 2 * s);
            if (k > part) sums = untagged(messages.words[max(k - 1, 0)] + 2 * s);
            total.x += sums.x, total.y += sums.y;
        }
        cells.d_state[s][0][0] += total.x, cells.d_state[s][1][0] += total.y;
    }
}

// The cells of a warp in one set. What can be found again in each step holds no register.
struct SetCells {
    int set;
    Cells cells;
    int length[SLOTS][2];  // LENGTHS: of a unit's two rows
    Resets resets[SLOTS];  // of the row that a lane stores

    INLINE void begin(const BackwardArgs& args, const Place& block, const Time& time,
                      const int* block_rows, int number) {
        set = number;
        const Place here = place(block);
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            cells.load(args, here, time, rows(block_rows) + slot.tile * 8, slot, s, length[s]);
            const int b = row(block, block_rows, slot);
            if (RESET)
                resets[s].begin(args.reset, args.batch, b, time.first + !args.reverse,
                                time.length(args, b));
        }
    }
    // As if the set were the block's only one.
    INLINE Place place(const Place& block) const {
        Place found = block;
        found.set = set, found.first_row += set * SET_ROWS;
        return found;
    }
    INLINE const int* rows(const int* block_rows) const { return block_rows + set * SET_ROWS; }
    // The row that this lane stores.
    INLINE int row(const Place& block, const int* block_rows, const Slot& slot) const {
        return slot.owned ? rows(block_rows)[slot.tile * 8 + block.group_of_lane] : -1;
    }
    // Copies the inputs of step i.
    INLINE void copy_inputs(const BackwardArgs& args, const Place& block, const Time& time,
                            const int* block_rows, const SavedPlace& saved_place, int i) {
        const Place here = place(block);
        const int* const rows = this->rows(block_rows);
        const bool exists = i < time.count;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            const uint32 target = shared_address(shared) + entry_of(here, s, i);
            if (here.lane * 16 < DY_BYTES) {  // 16 bytes of dy: [row, 8 units]
                const int b = slot.owned ? rows[slot.tile * 8 + here.lane] : -1;
                const bool has_dy = exists && args.dy && b >= 0;
                copy_async<16>(
                    target + here.lane * 16,
                    has_dy ? advanced(args.dy, (time.to_first + i) * args.dy_step_bytes) +
                                 b * args.dy_row + here.group(slot) * 8
                           : args.weight,
                    has_dy ? 16 : 0);
            }
            const int64 tile = here.first_row / 8 + slot.tile;
            const bool has_saved = exists && slot.owned && tile * 8 < args.batch;
            copy_saved_async(
                target + DY_BYTES,
                has_saved ? advanced(args.saved, (time.to_first + i) * args.saved_step_bytes) +
                                (tile * GROUPS + here.group(slot)) * (64 * SAVED) +
                                saved_offset(here.lane)
                          : args.weight,
                saved_place, has_saved);
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane),
                               here.thread_in_group, time.direction, args.reset_step_bytes,
                               slot.owned && exists && (i > 0 || args.reverse));
        }
        commit_copies();
    }
};

// What a step needs before dh arrives, see load_slots.
struct Given {
    float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
    uint32 reset_rows[SLOTS];

    // Reads those of step i and has the next ones copied.
    INLINE void read(const BackwardArgs& args, const Place& block, const Time& time,
                     const int* block_rows, const SavedPlace& saved_place, int fragment,
                     SetCells& at, int i) {
        await_copies<SETS_OF_WARP - 1>();
        __syncwarp();
        load_slots(at.place(block), at.cells, saved_place, fragment,
                   uint32(args.reset_step_bytes) * 8, i, at.resets, d_out, factor, reset_rows);
        __syncwarp();  // all lanes have read the inputs
        at.copy_inputs(args, block, time, block_rows, saved_place, i + 1);
    }
};

// Gate gradients of a turn, for the products after the loop. CELLS_WAIT: they are stored in the
// next turn, as the publishing thread's fence waits for all stores of the multiprocessor.
struct Results {
    storage_t* d_gates[SLOTS] = {};  // null: none
    Pair pairs[SLOTS][PLANES];

    INLINE void store_all() {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!d_gates[s]) continue;
            #pragma unroll
            for (int p = 0; p < PLANES; ++p) store(d_gates[s] + p * UNITS, pairs[s][p]);
        }
    }
};

// Step i of a set's cells, after dh. total: over all steps, sets and slots.
INLINE void step_set(const BackwardArgs& args, const Place& block, const int* block_rows,
                     const Exchange& exchange, const Time& time, const uint32 (&bits)[2],
                     const Given& given, SetCells& at,
                     float (&total)[GROUPS_OF_WARP][PLANES + VECTORS], Results& results, int i) {
    const int t = time.first + time.direction * i;
    const Place here = at.place(block);
    const int* const rows = at.rows(block_rows);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        if (!slot.owned) continue;
        int length[2];
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + here.thread_in_group * 2 + c];
            length[c] = LENGTHS ? at.length[s][c] : b >= 0 && here.unit(slot) < args.hidden;
        }
        float d_gate[2][PLANES] = {}, d_vector[2][VECTORS + 1];
        step_slot(args, here, rows, slot, s, t, given.reset_rows[s], bits, length, given.d_out[s],
                  given.factor[s], at.cells, d_gate, d_vector);
        const int group = here.group(slot);
        unsigned char* const operand =
            exchange.operand_of(here.set, i) + group / SPLIT_GROUPS * SPLIT_BYTES;
        #pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            results.pairs[s][p] = transposed(d_gate[0][p], d_gate[1][p]);
            if (p < FIRST_PLANE) continue;
            const int piece = (p - FIRST_PLANE) * SPLIT_GROUPS + group % SPLIT_GROUPS;
            *reinterpret_cast<uint32*>(operand + operand_offset(piece, slot.tile,
                                                                here.group_of_lane) +
                                       here.thread_in_group * 4) = results.pairs[s][p].bits;
        }
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            if (is_live(length, c, t)) add_up(total[s / TILES_OF_WARP], d_gate[c], d_vector[c]);
    }
    signal_stored(here, here.set);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int row = at.row(block, block_rows, slot);
        results.d_gates[s] = row < 0 ? nullptr
            : advanced(args.d_gates, (time.to_first + i) * args.d_gates_step_bytes) +
                  row * GATES_ROW + here.group(slot) * 8 + here.thread_in_group * 2;
    }
    if (!CELLS_WAIT) results.store_all();
}

// The warps that compute cells.
INLINE void compute(const BackwardArgs& args, const Place& here, const Exchange& exchange,
                    const Time& time, const int* rows) {
    const uint32 bits[2] = {1u << here.thread_in_group * 8, 1u << (here.thread_in_group * 8 + 4)};
    const SavedPlace saved_place(here.lane);
    const int fragment = keep_if_room(fragment_offset(here.lane));
    SetCells sets[SETS_OF_WARP];  // every CELL_WARPGROUPS-th
    #pragma unroll
    for (int number = 0; number < SETS_OF_WARP; ++number)
        sets[number].begin(args, here, time, rows,
                           number * CELL_WARPGROUPS + here.cell_warpgroup());
    float total[GROUPS_OF_WARP][PLANES + VECTORS] = {};
    #pragma unroll
    for (int number = 0; number < SETS_OF_WARP; ++number)
        sets[number].copy_inputs(args, here, time, rows, saved_place, 0);
    Results results;
    #pragma unroll 1
    for (int number = 0; FIRST_PRODUCT > 0 && number < SETS_OF_WARP && time.count > 0; ++number) {
        Given given;
        given.read(args, here, time, rows, saved_place, fragment, sets[0], 0);
        if (CELLS_WAIT) results.store_all();
        step_set(args, here, rows, exchange, time, bits, given, sets[0], total, results, 0);
        rotate(sets);
    }
    for (int product = 0; product < steps_of_products(time.count); ++product)
        #pragma unroll 1
        for (int number = 0; number < SETS_OF_WARP; ++number) {
            const int i = product + FIRST_PRODUCT;
            const int set = number * CELL_WARPGROUPS + here.cell_warpgroup();
            const int turn = product * SETS + set;
            Given given;  // in each turn its own: else registers keep it from turn to turn
            OwnSums sums;
            Messages messages;
            auto read_given = [&] {
                if (i < time.count)
                    given.read(args, here, time, rows, saved_place, fragment, sets[0], i);
            };
            if (CELLS_WAIT) read_given();
            await_turn(AT_SUMMED_UP, turn);
            send_sums(here, exchange, set, product, turn, sums);
            if (CELLS_WAIT) results.store_all();
            if (!CELLS_WAIT) read_given();
            messages.read(here, exchange, set, product);
            receive_sums(here, exchange, set, product, sums, messages, sets[0].cells);
            if (i < time.count)
                step_set(args, here, rows, exchange, time, bits, given, sets[0], total, results, i);
            rotate(sets);
        }
    #pragma unroll
    for (int g = 0; g < GROUPS_OF_WARP; ++g)
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p)
            sets[0].cells.total[g * TILES_OF_WARP][p] = total[g][p];
    #pragma unroll
    for (int number = 0; number < SETS_OF_WARP; ++number) {
        const SetCells& at = sets[number];
        bool owned[SLOTS];
        int row[SLOTS];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            owned[s] = slot.owned, row[s] = at.row(here, rows, slot);
        }
        finish(args, at.place(here), time, at.rows(rows), owned, row, at.cells);
    }
}
