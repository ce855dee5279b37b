// The forward time loop of one layer and direction where R fits no cluster: h travels through L2.

#define K UNITS
#define SUMS GATES
#include "grid.cuh"
#include "forward_cell.cuh"

constexpr int GATE_BYTES = 64 * SIZE;
static_assert(SCALED == 0, "sums are halved in the step");
constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;

// This block's part of the first h of all rows, into the operand of step 0.
INLINE void store_first_hidden(const ForwardArgs& args, const Place& here, const int* rows,
                               int count, unsigned char* shared) {
    constexpr int HERE = CHUNKS * CHUNK_K;  // of K, this block
    for (int at = threadIdx.x; at < ROWS * HERE; at += THREADS) {
        const int r = at / HERE, k = at % HERE, b = rows[r];
        const int unit = here.first_chunk() * CHUNK_K + k;
        if (b < 0 || unit >= args.units) continue;
        unsigned char* chunk = shared + AT_OPERAND + operand_offset(k / CHUNK_K, r / 8, r % 8);
        reinterpret_cast<operand_t*>(chunk)[k % CHUNK_K] =
            operand_of(narrow(first_state(args, count, 0, b, unit)));
    }
}

// The flag buffer by which h travels: a buffer of its own, or y.
struct Flags {
    operand_t* place;
    int64 step_bytes, row;

    INLINE Flags(const ForwardArgs& args, int way) {
        const bool own = args.flag_buffer;
        place = own ? args.flag_buffer : reinterpret_cast<operand_t*>(args.y);
        step_bytes = own ? way * args.batch * (UNITS * int(sizeof(operand_t))) : args.y_step_bytes;
        row = own ? UNITS : args.y_row;
    }
};

// The cells of a warp, what its lanes store, and its ring buffer of inputs.
struct Cells {
    UnitConstants units[SLOTS];
    float state[SLOTS][2][STATES];
    int row[SLOTS], length[SLOTS];  // that a lane stores
    Resets resets[SLOTS];           // of that row
    storage_t *y[SLOTS], *saved[SLOTS];
    operand_t* message[SLOTS];
    bool owned[SLOTS], has_saved[SLOTS];
    SavedPlace saved_place;
    RowBits bits;
    bool works;  // whether the warp waits for shares; the first thread always opens the mbarrier
    const storage_t* source[SLOTS][COPIES];
    int taken[SLOTS][COPIES];  // bytes: 16, or 0 where there is nothing to copy
    uint32 reset_turn;
    int later;  // resets that count after a step are those of the next one, in reverse its own

    INLINE Cells(const ForwardArgs& args, const Place& here, const Time& time, const Flags& flags,
                 const int* rows) : row{}, length{}, saved_place(here.lane) {
        bits.pair[0] = 1u << here.thread_in_group * 8;
        bits.pair[1] = 1u << (here.thread_in_group * 8 + 4);
        bits.own = 1u << here.group_of_lane * 4;
        later = args.reverse ? 0 : 1;
        works = threadIdx.x < 32;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) begin_slot(args, here, time, flags, rows, s);
        reset_turn = uint32(args.reset_step_bytes) * 8;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) begin_inputs(args, here, time, rows, s);
    }
    INLINE void begin_slot(const ForwardArgs& args, const Place& here, const Time& time,
                           const Flags& flags, const int* rows, int s) {
        const Slot slot = here.slot(s);
        const int unit = here.unit(slot);
        const bool inside = slot.owned && unit < args.units;
        works |= slot.owned;
        owned[s] = slot.owned;
        units[s].load(args, unit, inside);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[here.pair_rows(slot) + c];
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                state[s][c][k] =
                    inside && b >= 0 ? first_state(args, time.count, k, b, unit) : 0.0f;
        }
        row[s] = owned[s] ? rows[slot.tile * 8 + here.group_of_lane] : -1;
        if (LENGTHS) length[s] = row[s] < 0 ? 0 : int(args.lengths[row[s]]);
        if (RESET)
            resets[s].begin(args.reset, args.batch, row[s], time.first + later, length[s]);
        const int64 tile = here.first_row / 8 + slot.tile;
        y[s] = advanced(args.y, time.moved * args.y_step_bytes) + row[s] * args.y_row +
               here.pair_unit(slot);
        message[s] = advanced(flags.place, time.moved * flags.step_bytes) + row[s] * flags.row +
                     here.pair_unit(slot);
        has_saved[s] = KEEP && owned[s] && tile < (args.batch + 7) / 8;
        saved[s] = advanced(args.saved, time.moved * args.saved_step_bytes) +
                   (tile * GROUPS + here.first_group + slot.group) * (64 * SAVED) +
                   saved_offset(here.lane);
    }
    INLINE void begin_inputs(const ForwardArgs& args, const Place& here, const Time& time,
                             const int* rows, int s) {
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            const int number = copy * 32 + here.lane, gate = number / (GATE_BYTES / 16);
            const Slot slot = here.slot(s);
            const int b = rows[slot.tile * 8 + number * CHUNK / 8 % 8];
            taken[s][copy] = b >= 0 && gate < GATES && slot.owned ? 16 : 0;
            source[s][copy] = taken[s][copy]
                ? advanced(args.x, time.moved * args.x_step_bytes) + b * args.x_row +
                      gate * args.x_gate + (here.first_group + slot.group) * 8 + number * CHUNK % 8
                : args.x;
        }
    }
    // The ring's entries are found from i: a grid's step takes as long as its way through L2, not
    // as its instructions.
    INLINE void copy_inputs(const ForwardArgs& args, const Place& here, const Time& time,
                            unsigned char* shared, int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared) + here.entry(s, i);
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                if (copy * 512 + here.lane * 16 < SLOT_BYTES)
                    copy_async<16>(target + copy * 512 + here.lane * 16, source[s][copy],
                                   i < time.count ? taken[s][copy] : 0);
                source[s][copy] = advanced(source[s][copy], args.x_step_bytes);
            }
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane), here.thread_in_group,
                               time.way, args.reset_step_bytes,
                               owned[s] && i + later < time.count);
        }
        commit_copies();
    }
    // The cell of a slot: h for the next step goes first, then y and saved activations.
    INLINE void step_slot(const ForwardArgs& args, const Place& here, const Time& time,
                          const int* rows, const unsigned char* shared, int s, int i,
                          const float (&given)[GATES][2], const TileRows& tile) {
        const Slot slot = here.slot(s);
        float sums[GATES][2], right[2][GATES];
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
            #pragma unroll
            for (int c = 0; c < 2; ++c) sums[gate][c] = units[s].start(gate, given[gate][c]);
        add_slot_shares(here, shared, s, i & 1, sums);
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate)
            #pragma unroll
            for (int c = 0; c < 2; ++c) right[c][gate] = sums[gate][c];
        float hidden[2], values[2][KEPT + 4] = {};
        step_cell(args, units[s], given, right, tile, bits, rows + here.pair_rows(slot),
                  here.unit(slot), true, time.first + time.way * i, state[s], hidden, values);
        const Pair pair = transposed(hidden[0], hidden[1]);
        const Message next =
            next_hidden(args, pair, hidden, tile.resets, row[s], here.pair_unit(slot));
        if (row[s] >= 0 && (!args.flag_buffer || i + 1 < time.count)) publish(message[s], next);
        if (row[s] >= 0 && args.flag_buffer)
            store_inside(y[s], bits.own_live(tile) ? pair : Pair{}, here.pair_unit(slot),
                         args.units);
        if (has_saved[s]) store_saved(saved[s], saved_place.rest, values);
    }
    INLINE void advance(const ForwardArgs& args, const Flags& flags, int s) {
        y[s] = advanced(y[s], args.y_step_bytes);
        message[s] = advanced(message[s], flags.step_bytes);
        saved[s] = advanced(saved[s], args.saved_step_bytes);
    }
};

// Step i, when its operand is in shared memory.
INLINE void take_step(const ForwardArgs& args, const Place& here, const Time& time,
                      const Flags& flags, const int* rows, unsigned char* shared,
                      uint32 mbarriers, const Matrix& matrix, const unsigned char* others, int i,
                      Cells& cells) {
    multiply_and_send(here, matrix, others, shared, mbarriers, i & 1);
#if CLUSTER == 1
    __syncthreads();
#endif
    await_copies<STAGES - 2>();
    __syncwarp();
    float given[SLOTS][GATES][2];
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s)
        load_fragments<GATES>(shared + (fragment_offset(here.lane) + here.entry(s, i)), given[s]);
    cells.copy_inputs(args, here, time, shared, i + STAGES - 1);
    TileRows tile[SLOTS];
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        if (LENGTHS)
            tile[s].live = __ballot_sync(~0u, time.first + time.way * i < cells.length[s]);
        if (RESET)
            tile[s].resets = cells.resets[s].test(
                shared + here.entry(s, i) + SLOT_BYTES + reset_offset(here.lane),
                cells.reset_turn);
        if (RESET) tile[s].reset = __ballot_sync(~0u, tile[s].resets);
    }
    if (cells.works) wait_for_shares(here, mbarriers, i);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        if (!cells.owned[s]) continue;
        const Slot slot = here.slot(s);
        cells.step_slot(args, here, time, rows, shared, s, i, given[s], tile[s]);
        cells.advance(args, flags, s);
        if (RESET)  // after h was published: nobody waits for it
            reset_cells(cells.state[s], tile[s].reset, cells.bits.pair, args.reset_state,
                        rows + here.pair_rows(slot), here.unit(slot), args.units);
    }
}

// Zeros of y past the rows' ends, and final states.
INLINE void finish(const ForwardArgs& args, const Place& here, const Time& time, const int* rows,
                   const Cells& cells) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        if (LENGTHS && slot.owned && cells.row[s] >= 0)
            store_no_output(args, time.count, time.way, cells.row[s], here.pair_unit(slot));
        if (slot.owned)
            store_final(args, rows + here.pair_rows(slot), here.unit(slot),
                        args.batch * args.units, cells.state[s]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given_args) {
    const ForwardArgs args = given_args;  // read once: loads at each use cost the loop more
    extern __shared__ __align__(128) unsigned char shared[];
    const Place here(args.first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);
    // the matrix first, while registers are free: loaded after the rest some kernels spill
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    load_part(here, matrix, others, [&](int group, int gate, int k) {
        return chunk_of(args.weight, gate, group * 8 + here.group_of_lane, k, args.units);
    });
    begin_block(here, rows, args.batch, LENGTHS ? args.order : nullptr, shared, mbarriers);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    store_first_hidden(args, here, rows, time.count, shared);
    const Flags flags(args, time.way);
    Cells cells(args, here, time, flags, rows);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) cells.copy_inputs(args, here, time, shared, i);
    cluster_barrier();

    uint32 wait = uint32(args.delay) * FINE;  // before the first poll
    for (int i = 0; i < time.count; ++i) {
        if (i > 0)
            fetch(here, wait, advanced(flags.place, (time.moved + i - 1) * flags.step_bytes),
                  flags.row, rows, shared + AT_OPERAND + (i & 1) * OPERAND_BYTES);
        __syncthreads();
        take_step(args, here, time, flags, rows, shared, mbarriers, matrix, others, i, cells);
    }
    finish(args, here, time, rows, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
