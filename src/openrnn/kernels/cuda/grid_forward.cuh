// The forward time loop of one layer and direction where R fits no cluster: h travels through L2.

#define K UNITS
#define SUMS GATES
#include "grid.cuh"

constexpr int GATE_BYTES = 64 * SIZE;
static_assert(SCALED == 0, "sums are halved in the step");
constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given) {
    const ForwardArgs args = given;  // read once: loads at each use cost the loop instructions
    const Place here(args.first_row);
    const int lane = here.lane, group_of_lane = here.group_of_lane, thread_in_group = here.thread_in_group;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const uint32 mbarriers = shared_address(shared);

    number_rows<ROWS, THREADS>(rows, here.first_row, args.batch, LENGTHS ? args.order : nullptr);
    clear_shared<THREADS>(AT_OPERAND, AT_SHARES);
    mbarrier_init<2>(mbarriers, here.share_bytes());
    const int count = int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
    const int way = args.reverse ? -1 : 1, first = args.reverse ? count - 1 : 0;
    const int64 moved = way * first;  // steps of the loop from where memory begins

    // whether a row starts from fresh states: it is reset before its first step
    auto first_state = [&](int k, int64 b, int64 unit) {
        const bool again = RESET && !args.reverse && count > 0 && args.reset[b] && (!LENGTHS || args.lengths[b] > 0);
        const int64 at = b * args.units + unit;
        if (args.chunk_in && !again) return args.chunk_in[k * args.batch * args.units + at];
        const storage_t* source = again ? args.reset_state[k] : args.initial[k];
        return source ? widen(source[at]) : 0.0f;
    };
    constexpr int HERE = CHUNKS * CHUNK_K;  // of K, this block
    for (int at = threadIdx.x; at < ROWS * HERE; at += THREADS) {
        const int r = at / HERE, k = at % HERE, unit = here.first_chunk() * CHUNK_K + k, b = rows[r];
        if (b < 0 || unit >= args.units) continue;
        unsigned char* place = shared + AT_OPERAND + operand_offset(k / CHUNK_K, r / 8, r % 8);
        reinterpret_cast<operand_t*>(place)[k % CHUNK_K] = operand_of(narrow(first_state(0, b, unit)));
    }
    float from_x[SLOTS][GATES], from_r[SLOTS][GATES], vector[SLOTS][VECTORS + 1];
    float state[SLOTS][2][STATES];
    int row[SLOTS] = {}, length[SLOTS] = {};
    Resets resets[SLOTS];  // of this lane's row
    storage_t *output[SLOTS], *record[SLOTS];
    operand_t* message_at[SLOTS];
    bool mine[SLOTS], recorded[SLOTS];
    operand_t* const box = args.flag_buffer ? args.flag_buffer : reinterpret_cast<operand_t*>(args.y);
    const int64 tiles = (args.batch + 7) / 8, box_move = args.flag_buffer ? way * args.batch * (UNITS * int(sizeof(operand_t))) : args.y_step_bytes;
    const int64 box_row = args.flag_buffer ? UNITS : args.y_row;
    const SavedPlace cells(lane);
    const uint32 mine_of[2] = {1u << thread_in_group * 8, 1u << (thread_in_group * 8 + 4)}, own_row = 1u << group_of_lane * 4;
    // after a step the resets of the next one count, in reverse its own
    const int later = args.reverse ? 0 : 1;
    bool works = threadIdx.x < 32;  // the first thread renews the mbarrier
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group, unit = group * 8 + group_of_lane;
        const bool inside = slot.owned && unit < args.units;
        works |= slot.owned;
        mine[s] = slot.owned;
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            from_x[s][gate] = inside && args.bias_x ? widen(args.bias_x[gate * args.units + unit]) : 0.0f;
            from_r[s][gate] = inside && args.bias_r ? widen(args.bias_r[gate * args.units + unit]) : 0.0f;
            if (SUMMED >> gate & 1) {  // one register serves both sides
                from_r[s][gate] += from_x[s][gate];
                from_x[s][gate] = 0.0f;
            }
        }
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vector[s][v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + thread_in_group * 2 + c];
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                state[s][c][k] = inside && b >= 0 ? first_state(k, b, unit) : 0.0f;
        }
        row[s] = mine[s] ? rows[slot.tile * 8 + group_of_lane] : -1;
        if (LENGTHS) length[s] = row[s] < 0 ? 0 : int(args.lengths[row[s]]);
        if (RESET) resets[s].begin(args.reset, args.batch, row[s], first + later, length[s]);
        const int64 tile = here.first_row / 8 + slot.tile;
        output[s] = advanced(args.y, moved * args.y_step_bytes) + row[s] * args.y_row + group * 8 + thread_in_group * 2;
        message_at[s] = advanced(box, moved * box_move) + row[s] * box_row + group * 8 + thread_in_group * 2;
        recorded[s] = KEEP && mine[s] && tile < tiles;
        record[s] = advanced(args.saved, moved * args.saved_step_bytes) + (tile * GROUPS + group) * (64 * SAVED) + saved_offset(lane);
    }

    // the ring of inputs: each warp copies what its own lanes read
    const int ring = AT_RING + here.warp * SLOTS * STAGES * ENTRY_BYTES;
    const storage_t* input[SLOTS][COPIES];
    int taken[SLOTS][COPIES];
    const uint32 reset_turn = uint32(args.reset_step_bytes) * 8;
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s)
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            const int number = copy * 32 + lane, gate = number / (GATE_BYTES / 16);
            const Slot slot = here.slot(s);
            const int b = rows[slot.tile * 8 + number * CHUNK / 8 % 8];
            taken[s][copy] = b >= 0 && gate < GATES && slot.owned ? 16 : 0;
            input[s][copy] = taken[s][copy] ? advanced(args.x, moved * args.x_step_bytes) + b * args.x_row + gate * args.x_gate +
                                 (here.first_group + slot.group) * 8 + number * CHUNK % 8 : args.x;
        }
    // places in the ring by i: what a grid's step takes is its way through L2, not its instructions
    auto copy_inputs = [&](int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared) + ring + (s * STAGES + i % STAGES) * ENTRY_BYTES;
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                if (copy * 512 + lane * 16 < SLOT_BYTES)
                    copy_async<16>(target + copy * 512 + lane * 16, input[s][copy],
                                   i < count ? taken[s][copy] : 0);
                input[s][copy] = advanced(input[s][copy], args.x_step_bytes);
            }
            if (RESET) resets[s].copy(target + SLOT_BYTES + reset_offset(lane), thread_in_group, way, args.reset_step_bytes,
                                      mine[s] && i + later < count);
        }
        commit_copies();
    };
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, threadIdx.x);
    load_part(here, matrix, others, [&](int group, int gate, int k) {
        return chunk_of(args.weight, gate, group * 8 + group_of_lane, k, args.units);
    });

    #pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_inputs(i);
    const int side = ring + fragment_offset(lane);
#if CLUSTER > 1
    cluster_barrier();
#endif

    uint32 wait = uint32(args.delay) * FINE;  // before a test
    for (int i = 0; i < count; ++i) {
        const int t = first + way * i, now = i & 1;
        if (i > 0)
            fetch(here, wait, advanced(box, (moved + i - 1) * box_move), box_row, rows,
                  shared + AT_OPERAND + now * OPERAND_BYTES);
        __syncthreads();
        multiply_and_send(here, matrix, others, mbarriers, now);
#if CLUSTER == 1
        __syncthreads();
#endif
        await_copies<STAGES - 2>();
        __syncwarp();
        float given[SLOTS][GATES][2];
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            load_fragments<GATES>(shared + (side + (s * STAGES + i % STAGES) * ENTRY_BYTES), given[s]);
        copy_inputs(i + STAGES - 1);
        uint32 live_rows[SLOTS], reset_rows[SLOTS];  // bit 4r of row r
        bool begins[SLOTS];                        // reread, this lane's row
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (LENGTHS) live_rows[s] = __ballot_sync(~0u, t < length[s]);
            if (RESET)
                begins[s] = resets[s].test(shared + ring + (s * STAGES + i % STAGES) * ENTRY_BYTES +
                                                   SLOT_BYTES + reset_offset(lane), reset_turn);
            if (RESET) reset_rows[s] = __ballot_sync(~0u, begins[s]);
        }
        if (works) wait_for_shares(here, mbarriers, i);
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            if (!mine[s]) continue;
            const Slot slot = here.slot(s);
            const int group = here.first_group + slot.group;
            float sums[GATES][2];
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate)
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    sums[gate][c] = from_r[s][gate] + (SUMMED >> gate & 1 ? given[s][gate][c] : 0.0f);
            add_slot_shares(here, s, now, sums);
            float sent[2], values[2][KEPT + 4] = {};
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                float left[GATES], right[GATES], after[STATES];
                #pragma unroll
                for (int gate = 0; gate < GATES; ++gate) {
                    left[gate] = given[s][gate][c] + from_x[s][gate];
                    right[gate] = sums[gate][c];
                }
                float (&before)[STATES] = state[s][c];
                step(left, right, before, vector[s], after, values[c]);
                const int column = thread_in_group * 2 + c, unit = group * 8 + group_of_lane;
                const bool live = !LENGTHS || live_rows[s] & mine_of[c];
                const int64 b = rows[slot.tile * 8 + column];
                if (EVERY && live && b >= 0 && unit < args.units)
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k)
                        args.all_states[k][(t * args.batch + b) * args.units + unit] = narrow(after[k]);
                #pragma unroll
                for (int k = 0; k < STATES; ++k) {
                    if (live) before[k] = after[k];
                    if (k == 0) sent[c] = !PADDED || unit < args.units ? before[k] : 0.0f;
                }
            }
            const Pair hidden_pair = transposed(sent[0], sent[1]);
            Message message = message_of(hidden_pair, sent[0], sent[1]);
            if (RESET && begins[s]) message = {};
            if (RESET && FRESH && begins[s])
                message = message_of(load_state_pair(args.reset_state[0], row[s], group * 8 + thread_in_group * 2, args.units));
            const bool live = !LENGTHS || live_rows[s] & own_row;
            if (row[s] >= 0 && (!args.flag_buffer || i + 1 < count)) publish(message_at[s], message);
            if (row[s] >= 0 && args.flag_buffer)
                store_inside(output[s], live ? hidden_pair : Pair{}, group * 8 + thread_in_group * 2, args.units);
            if (recorded[s]) store_saved(record[s], cells.rest, values);
            output[s] = advanced(output[s], args.y_step_bytes), message_at[s] = advanced(message_at[s], box_move);
            record[s] = advanced(record[s], args.saved_step_bytes);
            if (RESET)  // after h was posted: nobody waits for it
                reset_cells(state[s], reset_rows[s], mine_of, args.reset_state,
                           rows + slot.tile * 8 + thread_in_group * 2, group * 8 + group_of_lane, args.units);
        }
    }

    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        const int group = here.first_group + slot.group;
        if (LENGTHS && slot.owned && row[s] >= 0)
            store_zeros(advanced(args.y, count * way * args.y_step_bytes) + row[s] * args.y_row + group * 8 + thread_in_group * 2, way * args.y_step_bytes,
                       int(args.steps) - count, group * 8 + thread_in_group * 2, args.units);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int b = rows[slot.tile * 8 + thread_in_group * 2 + c], unit = group * 8 + group_of_lane;
            #pragma unroll
            for (int k = 0; k < STATES; ++k)
                if (slot.owned && b >= 0 && unit < args.units)
                    store_end(args.chunk_out, args.final[k], k * args.batch * args.units, int64(b) * args.units + unit, state[s][c][k]);
        }
    }
#if CLUSTER > 1
    cluster_barrier();  // no block leaves while another may still write to it
#endif
}
