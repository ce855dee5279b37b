// The forward time loop of one layer and direction: R stays in registers, h travels in the cluster.
//
// A cluster owns all of R and FLIGHT tiles of TILES * 8 rows of the batch. A warp owns PER_WARP
// groups of 8 units, all their gates: an mma has 16 rows, 8 of one gate and 8 of the next, so that a
// lane's sums are all gates of unit lane / 4 in rows 2 * (lane % 4) and the next: a cell needs no
// other lane. A step waits for h at a mbarrier, multiplies, applies the cell and sends h to every
// block's other h buffer. Nothing else synchronises, but for warpgroups with idle warps (UNEVEN):
// whoever writes h of step t + 1 has all of h of step t, so every warp that sent it has read h of
// step t - 1.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int PER_WARP = PER;
constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS_HERE = WARPS * PER_WARP;
constexpr int MMA_ROWS = (PER_WARP * GATES + 1) / 2;
constexpr int K_TILES = (UNITS + K_TILE - 1) / K_TILE;  // of K
constexpr int HIDDEN_BYTES = K_TILES * TILES * 512;   // of h of one turn
constexpr int ROWS = TILES * 8;
constexpr int GATE_BYTES = 64 * SIZE;                // of one gate of 8 units x 8 rows
constexpr int STAGE_BYTES = PER_WARP * TILES * SLOT_BYTES;
constexpr int COPIES = (STAGE_BYTES / 16 + 31) / 32;
constexpr int TURN_BYTES = STAGE_BYTES + TILES * RESET_BYTES;  // of the ring, a warp
constexpr int MESSAGE_BYTES = UNITS * sizeof(operand_t) * ROWS;

#include "product.cuh"

// shared memory, in bytes
constexpr int AT_ROWS = FLIGHT * 2 * 8;
constexpr int AT_HIDDEN = (AT_ROWS + FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_RING = AT_HIDDEN + FLIGHT * 2 * HIDDEN_BYTES;
constexpr int AT_WEIGHTS = AT_RING + WARPS * STAGES * FLIGHT * TURN_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
static_assert(SHARED_BYTES == SHARED_GIVEN, "the plan counts shared memory otherwise");
static_assert(!WGMMA || CLUSTER == 1 || GROUPS / CLUSTER > (WARPS - 4) * PER_WARP,
              "a warpgroup without any units would wait for nobody, and miss a message");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given) {
    const ForwardArgs args = given;  // read once: loads at each use cost the loop instructions
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = pin(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    const int group_of_lane = lane >> 2, thread_in_group = lane & 3;
    const int block = cluster_rank();
    const int first_group = first_group_of(block) + warp * PER_WARP;
    const int end_group = first_group_of(block + 1);  // of this block
    const int64 first_row = int64(blockIdx.x / CLUSTER) * (FLIGHT * ROWS);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);

    number_rows<FLIGHT * ROWS, THREADS>(rows, first_row, args.batch, LENGTHS ? args.order : nullptr);
    for (int at = AT_HIDDEN + threadIdx.x * 16; at < AT_RING; at += THREADS * 16)
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(0, 0, 0, 0);
    const uint32 mbarriers = shared_address(shared);
    mbarrier_init<FLIGHT * 2, true>(mbarriers, MESSAGE_BYTES);
    const int count = int(LENGTHS ? args.lengths[args.order[first_row]] : args.steps);

    // whether a row starts from fresh states: it is reset before its first step
    auto starts_fresh = [&](int64 b) {
        return RESET && !args.reverse && count > 0 && args.reset[b] && (!LENGTHS || args.lengths[b] > 0);
    };
    auto first_state = [&](int k, int64 b, int64 unit) {
        const int64 at = b * args.units + unit;
        const bool again = starts_fresh(b);
        if (args.chunk_in && !again) return args.chunk_in[k * args.batch * args.units + at];
        const storage_t* source = again ? args.reset_state[k] : args.initial[k];
        return source ? widen(source[at]) : 0.0f;
    };
    for (int at = threadIdx.x; at < FLIGHT * ROWS * UNITS; at += THREADS) {
        const int r = at / UNITS, unit = at % UNITS, b = rows[r];
        if (b < 0 || unit >= args.units) continue;
        unsigned char* place = shared + AT_HIDDEN + r / ROWS * 2 * HIDDEN_BYTES +
                               operand_offset(unit / CHUNK_K, r % ROWS / 8, r % 8);
        reinterpret_cast<operand_t*>(place)[unit % CHUNK_K] = operand_of(narrow(first_state(0, b, unit)));
    }

    float from_x[PER_WARP][GATES], from_r[PER_WARP][GATES], vector[PER_WARP][VECTORS + 1];
    #pragma unroll
    for (int j = 0; j < PER_WARP; ++j) {
        const int unit = (first_group + j) * 8 + group_of_lane;
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const bool inside = unit < args.units;
            from_x[j][gate] = inside && args.bias_x ? widen(args.bias_x[gate * args.units + unit]) : 0.0f;
            from_r[j][gate] = inside && args.bias_r ? widen(args.bias_r[gate * args.units + unit]) : 0.0f;
            if (SUMMED >> gate & 1) {  // one register serves both sides
                from_r[j][gate] = scale_of(gate) * (from_r[j][gate] + from_x[j][gate]);
                from_x[j][gate] = 0.0f;
            }
        }
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vector[j][v] = unit < args.units ? widen(args.vectors[v * args.units + unit]) : 0.0f;
    }

    float state[FLIGHT][PER_WARP][TILES][2][STATES];
    #pragma unroll
    for (int f = 0; f < FLIGHT; ++f)
        #pragma unroll
        for (int j = 0; j < PER_WARP; ++j)
            #pragma unroll
            for (int n = 0; n < TILES; ++n)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[f * ROWS + n * 8 + thread_in_group * 2 + c];
                    const int unit = (first_group + j) * 8 + group_of_lane;
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k)
                        state[f][j][n][c][k] = b >= 0 && unit < args.units ? first_state(k, b, unit) : 0.0f;
                }

    // this lane's row of each tile, and its places in y and in what is kept: they move with time
    const int way = args.reverse ? -1 : 1, first = args.reverse ? count - 1 : 0;
    const int64 moved = way * first;  // steps of the loop from where memory begins
    int row[FLIGHT][TILES] = {}, length[FLIGHT][TILES] = {};
    Resets resets[FLIGHT][TILES];  // of this lane's row
    storage_t* output[FLIGHT][TILES];
    const SavedPlace cells(lane);
    const uint32 mine_of[2] = {uint32(pin(1 << thread_in_group * 8)), uint32(pin(1 << (thread_in_group * 8 + 4)))};
    const uint32 own_row = pin_if_room(1u << group_of_lane * 4);
    // after a step the resets of the next one count, in reverse its own
    const int later = args.reverse ? 0 : 1;
    #pragma unroll
    for (int f = 0; f < FLIGHT; ++f)
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            row[f][n] = rows[f * ROWS + n * 8 + group_of_lane];
            if (LENGTHS) length[f][n] = row[f][n] < 0 ? 0 : int(args.lengths[row[f][n]]);
            if (RESET) resets[f][n].begin(args.reset, args.batch, row[f][n], first + later, length[f][n]);
            output[f][n] = advanced(args.y, moved * args.y_step_bytes) + row[f][n] * args.y_row + first_group * 8 + thread_in_group * 2;
        }
    constexpr int TILE_RECORDS = GROUPS * (64 * SAVED);
    storage_t* record = advanced(args.saved, moved * args.saved_step_bytes) + first_row / 8 * TILE_RECORDS +
                     first_group * (64 * SAVED) + saved_offset(lane);

    // A warp without units sends nothing, so nobody would wait for it to see each message. Where its
    // warpgroup multiplies with it, the others of that wait.
    const bool idle = CLUSTER > 1 && !WGMMA && first_group >= end_group;
    constexpr bool UNEVEN = WGMMA && CLUSTER > 1 && GROUPS != CLUSTER * GROUPS_HERE;
    const int turns = idle ? 0 : count;

    // the ring of inputs: each warp copies what its own lanes read, [group, tile, gate, row, 8 units]
    constexpr int STAGE = FLIGHT * TURN_BYTES, RING = STAGES * STAGE;
    const int ring = AT_RING + warp * RING;
    int stage = 0, spare = RING - STAGE;  // of this step; and of the last, to be filled reread
    const storage_t* input[FLIGHT][COPIES];
    int taken[FLIGHT][COPIES];  // in how many steps
    #pragma unroll
    for (int f = 0; f < FLIGHT; ++f)
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            const int number = copy * 32 + lane, chunks = GATE_BYTES / 16;
            const int line = number * CHUNK / 8 % 8;
            const int gate = number / chunks % GATES, n = number / chunks / GATES % TILES;
            const int j = number / chunks / GATES / TILES, unit = number * CHUNK % 8;
            const int b = rows[f * ROWS + n * 8 + line];
            taken[f][copy] = b >= 0 && j < PER_WARP && first_group + j < end_group ? count : 0;
            input[f][copy] = taken[f][copy] ? advanced(args.x, moved * args.x_step_bytes) + b * args.x_row + gate * args.x_gate +
                                                  (first_group + j) * 8 + unit : args.x;
        }
    const uint32 ring_place = pin_if_room(shared_address(shared + ring + lane * 16));
    const int reset_at = pin_if_room(ring + STAGE_BYTES + reset_offset(lane));
    const uint32 reset_turn = uint32(args.reset_step_bytes) * 8;
    auto copy_inputs = [&](int i, int into, int f) {
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            if (copy * 512 + lane * 16 < STAGE_BYTES)
                copy_async<16>(ring_place + into + f * TURN_BYTES + copy * 512, input[f][copy],
                               i < taken[f][copy] ? 16 : 0);
            input[f][copy] = advanced(input[f][copy], args.x_step_bytes);
        }
        #pragma unroll
        for (int n = 0; RESET && n < TILES; ++n)
            resets[f][n].copy(mbarriers + reset_at + into + f * TURN_BYTES + n * RESET_BYTES, thread_in_group, way, args.reset_step_bytes,
                              i + later < turns);
        commit_copies();
    };
    // R as the A operands of this warp: the first RESIDENT pieces in registers
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, thread);
    load_matrix(matrix, others, [&](int number, int s) {
        const int j = number / GATES, group = first_group + j, k = s * K_TILE + thread_in_group * CHUNK_K;
        uint4 found = {};
        if (j < PER_WARP && group < end_group && k < UNITS)
            found = chunk_of(args.weight, number % GATES, group * 8 + group_of_lane, k, args.units);
        return found;
    });

    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f) copy_inputs(s, s * STAGE, f);

    // addresses that each step uses, computed once: at small B a step takes as long as its instructions
    const int begin = pin(operand_start(thread_in_group, group_of_lane)), side = pin_if_room(ring + fragment_offset(lane));
    int own_place[PER_WARP];
    #pragma unroll
    for (int j = 0; j < PER_WARP; ++j) {
        const int group = first_group + j, piece = SHORT ? group : group * 2 + (thread_in_group >> 1);
        own_place[j] = pin(2 * AT_HIDDEN + HIDDEN_BYTES + operand_offset(piece, 0, group_of_lane));
    }
    // the halves of h change places: what is read at one is written to their sum less it
    int read_at = AT_HIDDEN, read_box = 0;
    // Of the mbarrier that is read. The first one's phase 1 counts as over before it is opened, so that step 0
    // waits for nothing, and then opens it: nobody sends there before all of this block's step 0 has come.
    uint32 phase = 1;
#if CLUSTER > 1
    constexpr int SENDS = (CLUSTER + CHUNK_LANES - 1) / CHUNK_LANES;
    uint32 peers[SENDS];
    #pragma unroll
    for (int i = 0; i < SENDS; ++i)
        peers[i] = pin(remote(mbarriers, ((lane % CHUNK_LANES) + i * CHUNK_LANES + block) % CLUSTER));
    cluster_barrier();
#else
    __syncthreads();
#endif

    for (int i = 0; i < turns; ++i) {
        const int t = first + way * i;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            await_copies<(STAGES - 1) * FLIGHT - 1>();
            __syncwarp();
            // sums start from what is known before h is: inputs and biases
            Sums sums = {};
            float given[PER_WARP][TILES][GATES][2];
            load_fragments<PER_WARP * TILES * GATES>(shared + side + stage + f * TURN_BYTES,
                                                 &given[0][0][0]);
            #pragma unroll
            for (int j = 0; j < PER_WARP; ++j)
                #pragma unroll
                for (int n = 0; n < TILES; ++n)
                    #pragma unroll
                    for (int gate = 0; gate < GATES; ++gate)
                        #pragma unroll
                        for (int c = 0; c < 2; ++c) {
                            const int half = j * GATES + gate;
                            const bool summed = SUMMED >> gate & 1;
                            sums[half / 2][n][0][half % 2 * 2 + c] =
                                from_r[j][gate] + (summed ? scale_of(gate) * given[j][n][gate][c] : 0.0f);
                        }
            copy_inputs(i + STAGES - 1, spare, f);
            uint32 live_rows[TILES], reset_rows[TILES];  // bit 4r of row r
            bool begins[TILES];  // reread, this lane's row: the warp votes while it multiplies
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                if (LENGTHS) live_rows[n] = __ballot_sync(~0u, t < length[f][n]);
                if (RESET)
                    begins[n] = resets[f][n].test(
                        shared + reset_at + stage + f * TURN_BYTES + n * RESET_BYTES, reset_turn);
            }
#if CLUSTER > 1
            mbarrier_wait(mbarriers + f * 16 + read_box, phase);
            if (thread == 0) mbarrier_expect(mbarriers + f * 16 + read_box, MESSAGE_BYTES);
            if (UNEVEN) warpgroup_barrier(warp >> 2);
#endif
            // r = R h
            product(sums, matrix, others, shared + f * (2 * HIDDEN_BYTES) + read_at + begin);
            #pragma unroll
            for (int n = 0; RESET && n < TILES; ++n) reset_rows[n] = __ballot_sync(~0u, begins[n]);
            #pragma unroll
            for (int n = 0; n < TILES; ++n)
                #pragma unroll
                for (int j = 0; j < PER_WARP; ++j) {
                    const int group = first_group + j;
                    const bool inside = !PADDED || group * 8 + group_of_lane < args.units;  // else 0 for any cell
                    float sent[2] = {0.0f, 0.0f}, values[2][KEPT + 4] = {};
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float left[GATES], right[GATES], after[STATES];
                        #pragma unroll
                        for (int gate = 0; gate < GATES; ++gate) {
                            const int half = j * GATES + gate;
                            left[gate] = given[j][n][gate][c] + from_x[j][gate];
                            right[gate] = chained(sums, half / 2, n, half % 2 * 2 + c);
                        }
                        float (&before)[STATES] = state[f][j][n][c];
                        step(left, right, before, vector[j], after, values[c]);
                        const int column = thread_in_group * 2 + c;
                        const bool live = !LENGTHS || live_rows[n] & mine_of[c];
                        if (EVERY && live && group < end_group && rows[f * ROWS + n * 8 + column] >= 0) {
                            const int64 b = rows[f * ROWS + n * 8 + column], unit = group * 8 + group_of_lane;
                            #pragma unroll
                            for (int k = 0; k < STATES; ++k)
                                if (unit < args.units)
                                    args.all_states[k][(t * args.batch + b) * args.units + unit] = narrow(after[k]);
                        }
                        #pragma unroll
                        for (int k = 0; k < STATES; ++k) {
                            if (live) before[k] = after[k];
                            if (k == 0) sent[c] = inside ? before[k] : 0.0f;
                        }
                    }
                    const Pair hidden_pair = transposed(sent[0], sent[1]);
                    Message message = message_of(hidden_pair, sent[0], sent[1]);
                    if (RESET && begins[n]) message = {};
                    if (RESET && FRESH && begins[n])
                        message = message_of(load_state_pair(args.reset_state[0], row[f][n], group * 8 + thread_in_group * 2, args.units));
                    message = rounded(message);
                    const bool mine = GROUPS == CLUSTER * GROUPS_HERE || group < end_group;
                    const int there = own_place[j] - read_at + f * (2 * HIDDEN_BYTES) + n * 128;
#if CLUSTER > 1
                    const uint4 chunk = gathered(message);
                    if (mine && i + 1 < count) {
                        #pragma unroll
                        for (int p = 0; p < SENDS; ++p)
                            if (CLUSTER % CHUNK_LANES == 0 || lane % CHUNK_LANES + p * CHUNK_LANES < CLUSTER)
                                store_async(peers[p] + there, chunk, peers[p] + f * 16 + 8 - read_box);
                    }
#else
                    if (mine)
                        store(reinterpret_cast<operand_t*>(shared + there) + thread_in_group % CHUNK_LANES * 2, message);
#endif
                    const bool live = !LENGTHS || live_rows[n] & own_row;
                    if (mine && row[f][n] >= 0)
                        store_inside(output[f][n] + j * 8, live ? hidden_pair : Pair{}, group * 8 + thread_in_group * 2, args.units);
                    if (KEEP && mine && (f + n == 0 || first_row + f * ROWS + n * 8 < args.batch))
                        store_saved(record + (f * TILES + n) * TILE_RECORDS + j * (64 * SAVED), cells.rest, values);
                }
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                output[f][n] = advanced(output[f][n], args.y_step_bytes);
                #pragma unroll
                for (int j = 0; RESET && j < PER_WARP; ++j)  // after letters went: nobody waits for it
                    reset_cells(state[f][j][n], reset_rows[n], mine_of, args.reset_state,
                               rows + f * ROWS + n * 8 + thread_in_group * 2, (first_group + j) * 8 + group_of_lane, args.units);
            }
        }
#if CLUSTER == 1
        __syncthreads();
#endif
        record = advanced(record, args.saved_step_bytes);
        spare = stage, stage = stage + STAGE == RING ? 0 : stage + STAGE;
        read_at = 2 * AT_HIDDEN + HIDDEN_BYTES - read_at, read_box = 8 - read_box;
        phase ^= uint32(read_box) >> 3;
    }

    {   // places reread: what only the end needs is not held in the loop
        const int thread = reread_thread(), group_of_lane = thread % 32 / 4, thread_in_group = thread % 4, block = cluster_rank();
        const int first_group = first_group_of(block) + thread / 32 * PER_WARP, end_group = first_group_of(block + 1);
        const int64 cells_each = reread(args.batch) * args.units;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int at = 0; at < PER_WARP * TILES; ++at) {
                const int j = at / TILES, n = at % TILES, group = first_group + j;
                if (group >= end_group) continue;
                if (LENGTHS && row[f][n] >= 0)
                    store_zeros(advanced(args.y, count * way * args.y_step_bytes) + row[f][n] * args.y_row + group * 8 + thread_in_group * 2, way * args.y_step_bytes,
                               int(args.steps) - count, group * 8 + thread_in_group * 2, args.units);
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[f * ROWS + n * 8 + thread_in_group * 2 + c], unit = group * 8 + group_of_lane;
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k)
                        if (b >= 0 && unit < args.units)
                            store_end(args.chunk_out, args.final[k], k * cells_each, int64(b) * args.units + unit, state[f][j][n][c][k]);
                }
            }
    }
#if CLUSTER > 1
    cluster_barrier();  // no block leaves while another may still write to it
#endif
}
