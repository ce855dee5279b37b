// The backward time loop where R fits no cluster: gate gradients travel through L2.
//
// Step i first finds dh of the step that it undoes: R^T times the gate gradients of the step
// before, whose flag buffer is d_gates itself. Then it takes the derivative of the cell. One more
// product follows the last step, for the gradient of the initial state.

#define K (GATES * UNITS)
#define SUMS 1
#include "grid.cuh"
#include "backward_cell.cuh"

static_assert(SLOT_BYTES == 64 * SIZE * (1 + SAVED), "codegen/config.py counts the ring otherwise");
constexpr int DY_BYTES = 64 * SIZE;
constexpr int64 GATES_ROW = PLANES * UNITS;  // values from a row of d_gates to the next

#include "grid_backward_inputs.cuh"
#include "backward_slots.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given_args) {
    const BackwardArgs args = given_args;  // read once: loads at each use cost the loop more
    const Place here(args.first_row);
    const int lane = here.lane;
    const int group_of_lane = here.group_of_lane, thread_in_group = here.thread_in_group;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);
    begin_block(args, here, rows, mbarriers);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));

    const uint32 bits[2] = {1u << thread_in_group * 8, 1u << (thread_in_group * 8 + 4)};
    const SavedPlace place(lane);
    Cells cells;
    Inputs inputs;
    bool owned[SLOTS];
    int length[SLOTS][2], row[SLOTS];  // of a unit's two rows; that a lane stores
    Resets resets[SLOTS];              // of the row that a lane stores
    const int later = args.reverse ? 0 : 1;
    storage_t* d_gates[SLOTS];
    const int64 tiles = (args.batch + 7) / 8;
    const uint32 reset_shift = uint32(args.reset_step_bytes) * 8;
    bool works = threadIdx.x < 32;  // waits for shares; the first thread always opens the mbarrier
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int* const tile_rows = rows + slot.tile * 8;
        works |= slot.owned;
        owned[s] = slot.owned;
        cells.load(args, here, time, tile_rows, slot, s, length[s]);
        inputs.find(args, here, time, tiles, tile_rows, slot, s);
        row[s] = slot.owned ? tile_rows[group_of_lane] : -1;
        if (RESET)
            resets[s].begin(args.reset, args.batch, row[s], time.first + later,
                            time.length(args, row[s]));
        d_gates[s] = advanced(args.d_gates, time.to_first * args.d_gates_step_bytes) +
                     row[s] * GATES_ROW + (here.first_group + slot.group) * 8 +
                     thread_in_group * 2;
    }
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    Streamed streamed(args.streamed, int64(blockIdx.x) * WARPS + here.warp, lane);
    load_part(here, matrix, others, streamed, [&](int group, int, int k) {
        return *reinterpret_cast<const uint4*>(args.weight + int64(group * 8 + group_of_lane) * K +
                                               k);
    });
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        inputs.copy(args, here, time, place, later, owned, resets, i);
    const int fragment = keep_if_room(fragment_offset(lane));
    cluster_barrier();

    uint32 wait = uint32(args.delay) * FINE;  // before the first poll
    for (int i = 0; i <= time.count && time.count > 0; ++i) {
        const int t = time.first + time.direction * i, now = (i - 1) & 1;
        if (i > 0) {
            streamed.begin();
            fetch(here, wait,
                  advanced(args.d_gates, (time.to_first + i - 1) * args.d_gates_step_bytes) +
                      RIGHT * UNITS,
                  GATES_ROW, rows, shared + AT_OPERAND + now * OPERAND_BYTES);
            __syncthreads();
            multiply_and_send(here, matrix, others, streamed, mbarriers, now);
#if CLUSTER == 1
            __syncthreads();
#endif
        }
        float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
        uint32 reset_rows[SLOTS];
        if (i < time.count) {
            await_copies<STAGES - 2>();
            __syncwarp();
            load_slots(here, cells, place, fragment, reset_shift, i, resets, d_out, factor,
                       reset_rows);
            inputs.copy(args, here, time, place, later, owned, resets, i + STAGES - 1);
        }
        if (i > 0 && works) wait_for_shares(here, mbarriers, i - 1);
        float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!owned[s]) continue;
            const Slot slot = here.slot(s);
            if (i > 0) {
                float found[1][2] = {};
                add_slot_shares(here, s, now, found);
                cells.d_state[s][0][0] += found[0][0];
                cells.d_state[s][1][0] += found[0][1];
            }
            if (i == time.count) continue;
            step_slot(args, here, rows, slot, s, t, reset_rows[s], bits, length[s], d_out[s],
                      factor[s], cells, d_gate[s], d_vector[s]);
            #pragma unroll
            for (int p = 0; p < PLANES; ++p) {
                const Pair pair = transposed(d_gate[s][0][p], d_gate[s][1][p]);
                if (row[s] >= 0) publish(d_gates[s] + p * UNITS, pair);
            }
            d_gates[s] = advanced(d_gates[s], args.d_gates_step_bytes);
        }
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)  // after gates were published: nobody waits for it
            #pragma unroll
            for (int c = 0; c < 2; ++c)
                if (i < time.count && owned[s] && is_live(length[s], c, t))
                    add_up(cells.total[s], d_gate[s][c], d_vector[s][c]);
    }
    finish(args, here, time, rows, owned, row, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
