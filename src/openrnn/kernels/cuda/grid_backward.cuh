// The backward time loop where R fits no cluster: gate gradients travel through L2.
//
// Step i first gives dh of the step that it undoes: R^T times the gate gradients of the step before,
// which stand in d_gates, their mbarrier; then the derivative of the cell. One product more follows
// the last step, for the gradient of the initial state.

#define K (GATES * UNITS)
#define SUMS 1
#include "grid.cuh"
#include "backward_cell.cuh"

static_assert(SLOT_BYTES == 64 * SIZE * (1 + SAVED), "the plan counts records otherwise");
constexpr int DY_BYTES = 64 * SIZE;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given) {
    const BackwardArgs args = given;  // read once: loads at each use cost the loop instructions
    const Place here(args.first_row);
    const int lane = here.lane, group_of_lane = here.group_of_lane, thread_in_group = here.thread_in_group;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);

    number_rows<ROWS, THREADS>(rows, here.first_row, args.batch, LENGTHS ? args.order : nullptr);
    clear_shared<THREADS>(AT_OPERAND, AT_SHARES);
    mbarrier_init<2>(mbarriers, here.share_bytes());
    const int count = int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
    const int way = args.reverse ? 1 : -1, first = args.reverse ? 0 : count - 1;

    auto length_at = [&](int b) { return b < 0 ? 0 : LENGTHS ? int(args.lengths[b]) : count; };
    const uint32 mine_of[2] = {1u << thread_in_group * 8, 1u << (thread_in_group * 8 + 4)};
    const SavedPlace cells(lane);
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[SLOTS][2][STATES], d_start[SLOTS][2][FRESH ? STATES : 1];
    bool mine[SLOTS], dy_here[SLOTS], record_here[SLOTS];
    int length[SLOTS][2], row[SLOTS];
    Resets resets[SLOTS];  // of the row that this lane writes
    const int later = args.reverse ? 0 : 1;  // after a step the resets of the next one count, in reverse its own
    const storage_t *d_output[SLOTS], *record[SLOTS];
    storage_t* d_gate_at[SLOTS];
    const int64 tiles = (args.batch + 7) / 8, moved = way * first;  // steps of the loop from where memory begins
    const int64 gates_row = PLANES * UNITS;
    const uint32 reset_turn = uint32(args.reset_step_bytes) * 8;
    bool works = threadIdx.x < 32;  // the first thread renews the mbarrier
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group, unit = group * 8 + group_of_lane;
        const bool inside = slot.owned && unit < args.units;
        const int* const tile_rows = rows + slot.tile * 8;
        works |= slot.owned;
        mine[s] = slot.owned;
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) vector[s][v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = slot.owned ? tile_rows[thread_in_group * 2 + c] : -1;
            length[s][c] = inside ? length_at(b) : 0;  // padding stays 0 for any cell
            #pragma unroll
            for (int k = 0; k < STATES; ++k) {
                const int64 at = int64(b) * args.units + unit;
                d_state[s][c][k] = !inside || b < 0 ? 0.0f
                                   : args.chunk_in        ? args.chunk_in[k * args.batch * args.units + at]
                                   : args.d_final[k]     ? widen(args.d_final[k][at])
                                                    : 0.0f;
                if (FRESH) d_start[s][c][k] = 0.0f;
            }
        }
        // dy: a lane copies 16 bytes of [row, 8 units]
        const int b = slot.owned && lane * 16 < DY_BYTES ? tile_rows[lane * CHUNK / 8] : -1;
        dy_here[s] = args.dy && b >= 0;
        d_output[s] = dy_here[s] ? advanced(args.dy, moved * args.dy_step_bytes) + b * args.dy_row + group * 8 + lane * CHUNK % 8 : args.weight;
        const int64 tile = here.first_row / 8 + slot.tile;
        record_here[s] = slot.owned && tile < tiles;
        record[s] = record_here[s] ? advanced(args.saved, moved * args.saved_step_bytes) + (tile * GROUPS + group) * (64 * SAVED) +
                                         saved_offset(lane) : args.weight;
        row[s] = slot.owned ? tile_rows[group_of_lane] : -1;  // this lane writes
        if (RESET) resets[s].begin(args.reset, args.batch, row[s], first + later, length_at(row[s]));
        d_gate_at[s] = advanced(args.d_gates, moved * args.d_gates_step_bytes) + row[s] * gates_row + group * 8 + thread_in_group * 2;
    }
    auto stage_of = [&](int s, int i) {
        return AT_RING + ((here.warp * SLOTS + s) * STAGES + i % STAGES) * ENTRY_BYTES;
    };
    auto copy_inputs = [&](int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared + stage_of(s, i));
            if (lane * 16 < DY_BYTES)
                copy_async<16>(target + lane * 16, d_output[s], i < count && dy_here[s] ? 16 : 0);
            copy_saved_async(target + DY_BYTES, record[s], cells, i < count && record_here[s]);
            if (RESET) resets[s].copy(target + SLOT_BYTES + reset_offset(lane), here.thread_in_group, way, args.reset_step_bytes,
                                      mine[s] && i < count && (i > 0 || !later));
            d_output[s] = advanced(d_output[s], args.dy_step_bytes), record[s] = advanced(record[s], args.saved_step_bytes);
        }
        commit_copies();
    };
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    load_part(here, matrix, others, [&](int group, int, int k) {
        return *reinterpret_cast<const uint4*>(args.weight + int64(group * 8 + group_of_lane) * K + k);
    });

    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_inputs(i);
    const int side = pin_if_room(fragment_offset(lane));
#if CLUSTER > 1
    cluster_barrier();
#endif

    uint32 wait = uint32(args.delay) * FINE;  // before a test
    for (int i = 0; i <= count && count > 0; ++i) {
        const int t = first + way * i, now = (i - 1) & 1;
        if (i > 0) {
            fetch(here, wait, advanced(args.d_gates, (moved + i - 1) * args.d_gates_step_bytes) + RIGHT * UNITS, gates_row, rows,
                  shared + AT_OPERAND + now * OPERAND_BYTES);
            __syncthreads();
            multiply_and_send(here, matrix, others, mbarriers, now);
#if CLUSTER == 1
            __syncthreads();
#endif
        }
        float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
        uint32 again[SLOTS];  // whether what came after the step began reread: bit 4r of row r
        if (i < count) {
            await_copies<STAGES - 2>();
            __syncwarp();
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const unsigned char* stage = shared + stage_of(s, i);
                float values[2][KEPT + 4];
                load_saved(stage + DY_BYTES, cells, values);
                load_fragments<1>(stage + side, &d_out[s]);
                const bool begins = RESET && resets[s].test(stage + SLOT_BYTES + reset_offset(lane), reset_turn);
                find_factors(values, vector[s], factor[s]);
                if (RESET) again[s] = __ballot_sync(~0u, begins);
            }
            copy_inputs(i + STAGES - 1);
        }
        if (i > 0 && works) wait_for_shares(here, mbarriers, i - 1);
        float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
        auto lives = [&](int s, int c) { return (LENGTHS ? t : 0) < length[s][c]; };
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!mine[s]) continue;
            const Slot slot = here.slot(s);
            const int unit = (here.first_group + slot.group) * 8 + group_of_lane;
            if (i > 0) {
                float found[1][2] = {};
                add_slot_shares(here, s, now, found);
                d_state[s][0][0] += found[0][0];
                d_state[s][1][0] += found[0][1];
            }
            if (i == count) continue;
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                float (&d_here)[STATES] = d_state[s][c];
                const int64 b = rows[slot.tile * 8 + thread_in_group * 2 + c];
                if (RESET && again[s] & mine_of[c]) end_at_reset(d_here, d_start[s][c]);
                const bool live = lives(s, c);
                float d_after[STATES], d_before[STATES], found[PLANES];
                #pragma unroll
                for (int k = 0; k < STATES; ++k) {
                    d_after[k] = k == 0 ? d_here[k] + d_out[s][c] : d_here[k];
                    if (EVERY && args.d_all_states[k] && live && b >= 0 && unit < args.units)
                        d_after[k] += widen(args.d_all_states[k][(t * args.batch + b) * args.units + unit]);
                }
                derivative(factor[s][c], d_after, found, d_before, d_vector[s][c]);
                if (ALL_LIVE || live) {
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k) d_here[k] = d_before[k];
                    #pragma unroll
                    for (int p = 0; p < PLANES; ++p) d_gate[s][c][p] = found[p];
                }
            }
            #pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                const Pair pair = transposed(d_gate[s][0][p], d_gate[s][1][p]);
                if (row[s] >= 0) publish(d_gate_at[s] + p * UNITS, pair);
            }
            d_gate_at[s] = advanced(d_gate_at[s], args.d_gates_step_bytes);
        }
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)  // after gates were posted: nobody waits for it
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                if (i < count && mine[s] && lives(s, c)) add_up(total[s], d_gate[s][c], d_vector[s][c]);
    }

    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        if (!mine[s]) continue;
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group, unit = group * 8 + group_of_lane;
        if (LENGTHS && row[s] >= 0)
            store_no_gradients(args.d_gates, count * args.batch + row[s], args.batch, group * 8 + thread_in_group * 2, int(args.steps) - count);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + thread_in_group * 2 + c];
            if (b < 0 || unit >= args.units) continue;
            const bool replaced = RESET && !args.reverse && length_at(b) > 0 && args.reset[b];
            store_first(args, d_state[s][c], d_start[s][c], replaced, args.batch * args.units, int64(b) * args.units + unit);
        }
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) {
            const float all = sum_over_rows(total[s][p]);
            if (thread_in_group == 0)
                args.sums[((here.first_row / 8 + slot.tile) * (PLANES + VECTORS) + p) * UNITS + unit] = all;
        }
    }
#if CLUSTER > 1
    cluster_barrier();
#endif
}
