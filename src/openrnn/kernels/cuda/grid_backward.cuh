// The backward time loop where R fits no cluster: gate gradients travel through L2.
//
// Step i first finds dh of the step that it undoes: R^T times the gate gradients of the step
// before, whose flag buffer is d_gates itself. Then it takes the derivative of the cell. One more
// product follows the last step, for the gradient of the initial state.

#define K (GATES * UNITS)
#define SUMS 1
#include "grid.cuh"
#include "backward_cell.cuh"

static_assert(SLOT_BYTES == 64 * SIZE * (1 + SAVED), "codegen/tiles.py counts the ring otherwise");
constexpr int DY_BYTES = 64 * SIZE;
constexpr int64 GATES_ROW = PLANES * UNITS;  // values from a row of d_gates to the next

// The cells of a warp: gradients of their states, sums over steps, and what a lane stores.
struct Cells {
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[SLOTS][2][STATES], d_reset[SLOTS][2][FRESH ? STATES : 1];
    int length[SLOTS][2];  // of a unit's two rows; 0 for padding, whose gradients stay 0
    int row[SLOTS];        // that a lane stores
    storage_t* d_gates[SLOTS];
    bool owned[SLOTS];
    bool works;  // whether the warp waits for shares; the first thread always opens the mbarrier
    uint32 row_bits[2];  // of a unit's two rows in masks: bit 4r of row r
    SavedPlace place;

    INLINE explicit Cells(const Place& here) : place(here.lane) {
        row_bits[0] = 1u << here.thread_in_group * 8;
        row_bits[1] = 1u << (here.thread_in_group * 8 + 4);
        works = threadIdx.x < 32;
    }
    INLINE void begin_slot(const BackwardArgs& args, const Place& here, const Time& time,
                           const int* tile_rows, const Slot& slot, int s) {
        const int unit = here.unit(slot);
        const bool inside = slot.owned && unit < args.units;
        works |= slot.owned;
        owned[s] = slot.owned;
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vector[s][v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = slot.owned ? tile_rows[here.thread_in_group * 2 + c] : -1;
            length[s][c] = inside ? time.length(args, b) : 0;
            #pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const int64 at = int64(b) * args.units + unit;
                d_state[s][c][k] = !inside || b < 0 ? 0.0f
                    : final_gradient(args, k, args.batch * args.units, at);
                if (FRESH) d_reset[s][c][k] = 0.0f;
            }
        }
        row[s] = slot.owned ? tile_rows[here.group_of_lane] : -1;
        d_gates[s] = advanced(args.d_gates, time.moved * args.d_gates_step_bytes) +
                     row[s] * GATES_ROW + here.pair_unit(slot);
    }
    INLINE bool live(int s, int c, int t) const { return (LENGTHS ? t : 0) < length[s][c]; }

    // The derivative of a slot's two cells.
    INLINE void step_slot(const BackwardArgs& args, const Place& here, const int* rows, int s,
                          int t, uint32 reset_rows, const float (&d_out)[2],
                          const float (&factor)[2][FACTORS + 1], float (&d_gate)[2][PLANES],
                          float (&d_vector)[2][VECTORS + 1]) {
        const Slot slot = here.slot(s);
        const int unit = here.unit(slot);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int64 b = rows[here.pair_rows(slot) + c];
            if (RESET && reset_rows & row_bits[c]) end_at_reset(d_state[s][c], d_reset[s][c]);
            const bool is_live = live(s, c, t);
            float found[PLANES];
            derive_cell(args, factor[c], d_state[s][c], d_out[c], is_live,
                        is_live && b >= 0 && unit < args.units,
                        (t * args.batch + b) * args.units + unit, d_gate[c], d_vector[c], found);
        }
        #pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            const Pair pair = transposed(d_gate[0][p], d_gate[1][p]);
            if (row[s] >= 0) publish(d_gates[s] + p * UNITS, pair);
        }
        d_gates[s] = advanced(d_gates[s], args.d_gates_step_bytes);
    }
};

// A warp's ring buffer of inputs: dy, saved activations and resets of its slots.
struct Inputs {
    const storage_t *dy[SLOTS], *saved[SLOTS];
    bool has_dy[SLOTS], has_saved[SLOTS];
    Resets resets[SLOTS];  // of the row that a lane stores
    uint32 reset_turn;
    int later;  // resets that count after a step are those of the next one, in reverse its own

    INLINE explicit Inputs(const BackwardArgs& args) {
        later = args.reverse ? 0 : 1, reset_turn = uint32(args.reset_step_bytes) * 8;
    }
    INLINE void begin_slot(const BackwardArgs& args, const Place& here, const Time& time,
                           const int* tile_rows, const Slot& slot, int own_row, int s) {
        const int group = here.first_group + slot.group;
        // a lane copies 16 bytes of dy: [row, 8 units]
        const bool copies = slot.owned && here.lane * 16 < DY_BYTES;
        const int b = copies ? tile_rows[here.lane * CHUNK / 8] : -1;
        has_dy[s] = args.dy && b >= 0;
        dy[s] = has_dy[s] ? advanced(args.dy, time.moved * args.dy_step_bytes) + b * args.dy_row +
                                group * 8 + here.lane * CHUNK % 8
                          : args.weight;
        const int64 tile = here.first_row / 8 + slot.tile;
        has_saved[s] = slot.owned && tile < (args.batch + 7) / 8;
        saved[s] = has_saved[s] ? advanced(args.saved, time.moved * args.saved_step_bytes) +
                                      (tile * GROUPS + group) * (64 * SAVED) +
                                      saved_offset(here.lane)
                                : args.weight;
        if (RESET)
            resets[s].begin(args.reset, args.batch, own_row, time.first + later,
                            time.length(args, own_row));
    }
    INLINE void copy(const BackwardArgs& args, const Place& here, const Time& time,
                     const Cells& cells, unsigned char* shared, int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared + here.entry(s, i));
            if (here.lane * 16 < DY_BYTES)
                copy_async<16>(target + here.lane * 16, dy[s],
                               i < time.count && has_dy[s] ? 16 : 0);
            copy_saved_async(target + DY_BYTES, saved[s], cells.place,
                             i < time.count && has_saved[s]);
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane), here.thread_in_group,
                               time.way, args.reset_step_bytes,
                               cells.owned[s] && i < time.count && (i > 0 || !later));
            dy[s] = advanced(dy[s], args.dy_step_bytes);
            saved[s] = advanced(saved[s], args.saved_step_bytes);
        }
        commit_copies();
    }
    // What a slot's step needs before dh arrives; the rows that were reset after it.
    INLINE uint32 load(const Place& here, const Cells& cells, const unsigned char* entry, int side,
                       int s, float (&d_out)[2], float (&factor)[2][FACTORS + 1]) {
        float values[2][KEPT + 4];
        load_saved(entry + DY_BYTES, cells.place, values);
        load_fragments<1>(entry + side, &d_out);
        const bool is_reset =
            RESET && resets[s].test(entry + SLOT_BYTES + reset_offset(here.lane), reset_turn);
        find_factors(values, cells.vector[s], factor);
        return RESET ? __ballot_sync(~0u, is_reset) : 0;
    }
};

// Gradients of initial states, sums over steps, and zeros where no row lives.
INLINE void finish(const BackwardArgs& args, const Place& here, const Time& time, const int* rows,
                   const Cells& cells) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        if (!cells.owned[s]) continue;
        const Slot slot = here.slot(s);
        const int unit = here.unit(slot);
        if (LENGTHS && cells.row[s] >= 0)
            store_no_gradients(args.d_gates, time.count * args.batch + cells.row[s], args.batch,
                               here.pair_unit(slot), int(args.steps) - time.count);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[here.pair_rows(slot) + c];
            if (b < 0 || unit >= args.units) continue;
            const bool replaced =
                RESET && !args.reverse && time.length(args, b) > 0 && args.reset[b];
            store_first(args, cells.d_state[s][c], cells.d_reset[s][c], replaced,
                        args.batch * args.units, int64(b) * args.units + unit);
        }
        const int64 tile = here.first_row / 8 + slot.tile;
        store_sums(args.sums + tile * (PLANES + VECTORS) * UNITS, cells.total[s], unit,
                   here.thread_in_group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given_args) {
    const BackwardArgs args = given_args;  // read once: loads at each use cost the loop more
    extern __shared__ __align__(128) unsigned char shared[];
    const Place here(args.first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);
    // the matrix first, while registers are free: loaded after the rest some kernels spill
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    load_part(here, matrix, others, [&](int group, int, int k) {
        return *reinterpret_cast<const uint4*>(
            args.weight + int64(group * 8 + here.group_of_lane) * K + k);
    });
    begin_block(here, rows, args.batch, LENGTHS ? args.order : nullptr, shared, mbarriers);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    Cells cells(here);
    Inputs inputs(args);
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        cells.begin_slot(args, here, time, rows + slot.tile * 8, slot, s);
        inputs.begin_slot(args, here, time, rows + slot.tile * 8, slot, cells.row[s], s);
    }
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) inputs.copy(args, here, time, cells, shared, i);
    const int side = pin_if_room(fragment_offset(here.lane));
    cluster_barrier();

    uint32 wait = uint32(args.delay) * FINE;  // before the first poll
    for (int i = 0; i <= time.count && time.count > 0; ++i) {
        const int t = time.first + time.way * i, now = (i - 1) & 1;
        if (i > 0) {
            fetch(here, wait,
                  advanced(args.d_gates, (time.moved + i - 1) * args.d_gates_step_bytes) +
                      RIGHT * UNITS,
                  GATES_ROW, rows, shared + AT_OPERAND + now * OPERAND_BYTES);
            __syncthreads();
            multiply_and_send(here, matrix, others, shared, mbarriers, now);
#if CLUSTER == 1
            __syncthreads();
#endif
        }
        float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
        uint32 reset_rows[SLOTS];
        if (i < time.count) {
            await_copies<STAGES - 2>();
            __syncwarp();
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s)
                reset_rows[s] = inputs.load(here, cells, shared + here.entry(s, i), side, s,
                                            d_out[s], factor[s]);
            inputs.copy(args, here, time, cells, shared, i + STAGES - 1);
        }
        if (i > 0 && cells.works) wait_for_shares(here, mbarriers, i - 1);
        float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!cells.owned[s]) continue;
            if (i > 0) {
                float found[1][2] = {};
                add_slot_shares(here, shared, s, now, found);
                cells.d_state[s][0][0] += found[0][0];
                cells.d_state[s][1][0] += found[0][1];
            }
            if (i == time.count) continue;
            cells.step_slot(args, here, rows, s, t, reset_rows[s], d_out[s], factor[s], d_gate[s],
                            d_vector[s]);
        }
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)  // after gates were published: nobody waits for it
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                if (i < time.count && cells.owned[s] && cells.live(s, c, t))
                    add_up(cells.total[s], d_gate[s][c], d_vector[s][c]);
    }
    finish(args, here, time, rows, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
