// The forward time loop of one layer and direction where R fits no cluster: h travels through L2.

#define K UNITS
#define SUMS GATES
#include "grid.cuh"
#include "forward_cell.cuh"
#include "first_hidden.cuh"

constexpr int GATE_BYTES = 64 * SIZE;
static_assert(SCALED == 0, "sums are halved in the step");
constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;

#include "grid_forward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given_args) {
    const ForwardArgs args = given_args;  // read once: loads at each use cost the loop more
    const Place here(args.first_row);
    const int lane = here.lane;
    const int group_of_lane = here.group_of_lane, thread_in_group = here.thread_in_group;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);
    begin_block(args, here, rows, mbarriers);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    store_first_hidden<ROWS, PIECES, THREADS>(  // of this block's part of K
        args, rows, time.count, here.first_piece(),
        [](int r, int piece) { return AT_OPERAND + operand_offset(piece, r / 8, r % 8); });

    Cells cells;
    int row[SLOTS] = {}, length[SLOTS] = {};  // of the row that a lane stores
    Resets resets[SLOTS];
    storage_t *y[SLOTS], *saved[SLOTS];
    operand_t* message_at[SLOTS];
    bool owned[SLOTS], has_saved[SLOTS];
    // the flag buffer by which h travels, a buffer of its own or y; and its strides
    operand_t* const flags =
        args.flag_buffer ? args.flag_buffer : reinterpret_cast<operand_t*>(args.y);
    const int64 tiles = (args.batch + 7) / 8;
    const int64 flags_step_bytes = args.flag_buffer
        ? time.direction * args.batch * (UNITS * int(sizeof(operand_t))) : args.y_step_bytes;
    const int64 flags_row = args.flag_buffer ? UNITS : args.y_row;
    const SavedPlace saved_place(lane);
    const RowBits bits(1u << thread_in_group * 8, 1u << (thread_in_group * 8 + 4));
    const uint32 own_bit = 1u << group_of_lane * 4;
    const int later = args.reverse ? 0 : 1;
    bool works = threadIdx.x < 32;  // waits for shares; the first thread always opens the mbarrier
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group;
        works |= slot.owned;
        owned[s] = slot.owned;
        cells.load(args, here, rows, time.count, slot, s);
        row[s] = owned[s] ? rows[slot.tile * 8 + group_of_lane] : -1;
        if (LENGTHS) length[s] = row[s] < 0 ? 0 : int(args.lengths[row[s]]);
        if (RESET)
            resets[s].begin(args.reset, args.batch, row[s], time.first + later, length[s]);
        const int64 tile = here.first_row / 8 + slot.tile;
        y[s] = advanced(args.y, time.to_first * args.y_step_bytes) + row[s] * args.y_row +
               group * 8 + thread_in_group * 2;
        message_at[s] = advanced(flags, time.to_first * flags_step_bytes) +
                        row[s] * flags_row + group * 8 + thread_in_group * 2;
        has_saved[s] = SAVE && owned[s] && tile < tiles;
        saved[s] = advanced(args.saved, time.to_first * args.saved_step_bytes) +
                   (tile * GROUPS + group) * (64 * SAVED) + saved_offset(lane);
    }
    const int ring_at = AT_RING + here.warp * SLOTS * STAGES * ENTRY_BYTES;
    const uint32 reset_shift = uint32(args.reset_step_bytes) * 8;
    Inputs inputs;
    inputs.begin(args, here, time, rows);
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    Streamed streamed(args.streamed, int64(blockIdx.x) * WARPS + here.warp, lane);
    load_part(here, matrix, others, streamed, [&](int group, int gate, int k) {
        return piece_of(args.weight, gate, group * 8 + group_of_lane, k);
    });
    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        inputs.copy(args, here, time, ring_at, later, owned, resets, i);
    const int fragment = ring_at + fragment_offset(lane);
    cluster_barrier();

    uint32 wait = uint32(args.delay) * FINE;  // before the first poll
    for (int i = 0; i < time.count; ++i) {
        const int t = time.first + time.direction * i, now = i & 1;
        streamed.begin();
        if (i > 0)
            fetch(here, wait, advanced(flags, (time.to_first + i - 1) * flags_step_bytes),
                  flags_row, rows, shared + AT_OPERAND + now * OPERAND_BYTES);
        __syncthreads();
        multiply_and_send(here, matrix, others, streamed, mbarriers, now);
#if CLUSTER == 1
        __syncthreads();
#endif
        await_copies<STAGES - 2>();
        __syncwarp();
        float given[SLOTS][GATES][2];  // input side of the gates
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            load_fragments<GATES>(shared + (fragment + (s * STAGES + i % STAGES) * ENTRY_BYTES),
                                  given[s]);
        inputs.copy(args, here, time, ring_at, later, owned, resets, i + STAGES - 1);
        TileRows tile[SLOTS];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            tile[s].read(t, length[s], resets[s],
                         shared + ring_at + (s * STAGES + i % STAGES) * ENTRY_BYTES + SLOT_BYTES +
                             reset_offset(lane),
                         reset_shift);
            tile[s].vote();
        }
        if (works) wait_for_shares(here, mbarriers, i);
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!owned[s]) continue;
            const Slot slot = here.slot(s);
            const int unit = (here.first_group + slot.group) * 8 + thread_in_group * 2;
            float hidden[2], values[2][ACTIVATIONS + 4] = {};
            step_cells(args, here, rows, slot, cells.units[s], given[s], tile[s], bits, s, now, t,
                       cells.state[s], hidden, values);
            store_results(args, tile[s], own_bit, row[s], unit, i, time.count, hidden, values,
                          message_at[s], y[s], has_saved[s], saved[s], saved_place.rest);
            y[s] = advanced(y[s], args.y_step_bytes);
            message_at[s] = advanced(message_at[s], flags_step_bytes);
            saved[s] = advanced(saved[s], args.saved_step_bytes);
            if (RESET)  // after h was published: nobody waits for it
                reset_cells(cells.state[s], tile[s].reset, bits.pair, args.reset_state,
                            rows + slot.tile * 8 + thread_in_group * 2, here.unit(slot),
                            args.hidden);
        }
    }
    finish(args, here, time, rows, row, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
