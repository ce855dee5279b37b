// The backward time loop of one layer and direction: gate gradients stay, sums of dh travel.
//
// A block owns BLOCK_GROUPS groups of 8 units: their cells, and the columns of R^T that their gate
// gradients meet. Its gradients go to memory and, through shared memory, to its own product, a part
// of dh for all units. The unit's owner adds parts by pairs in the order of blocks: always the same.

#include "device.cuh"
#include "saved.cuh"
#include "derivative.cuh"
#include "resets.cuh"

constexpr int BLOCK_GROUPS = PER;
constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILES * 8;
constexpr int OWN = BLOCK_GROUPS * 8;                            // units of a block
constexpr int K_TILES = (GATES * OWN + K_TILE - 1) / K_TILE;        // of K
constexpr int MMA_ROWS = ((GROUPS + 1) / 2 + WARPS - 1) / WARPS;  // of 16 units, a warp
constexpr int SLOTS = (BLOCK_GROUPS * TILES + WARPS - 1) / WARPS;  // of a warp
constexpr int RIGHT = PLANES - GATES;                            // first plane of the recurrent side

// Gates go to memory, and into biases' sums, after a step's letters: where sends are few, as products are
constexpr bool LATE = SHORT && SLOTS * FLIGHT == 1 && K_TILES * MMA_ROWS <= 16;

constexpr int DY_BYTES = 64 * SIZE;                               // of 8 units x 8 rows
constexpr int GATE_ROWS = K_TILES * TILES * 512;                    // bytes of gate gradients, a turn
constexpr int PARTS = CLUSTER * TILES * BLOCK_GROUPS * 256;      // bytes of one message's place

#include "product.cuh"

constexpr int AT_ROWS = FLIGHT * 2 * 8;
constexpr int AT_GATES = (AT_ROWS + FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_PARTS = AT_GATES + FLIGHT * GATE_ROWS;
constexpr int AT_RING = AT_PARTS + FLIGHT * 2 * PARTS;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // of the ring, a slot
constexpr int AT_WEIGHTS = AT_RING + WARPS * SLOTS * STAGES * FLIGHT * ENTRY_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
static_assert(SHARED_BYTES == SHARED_GIVEN, "the plan counts shared memory otherwise");
static_assert(CLUSTER == 1 || CLUSTER % 2 == 0, "parts are added by pairs");

// a group of this block in one tile: two cells a lane
struct Slot {
    int group, tile;
    bool mine;

    INLINE Slot(int number, int groups) { group = number / TILES, tile = number % TILES, mine = group < groups; }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given) {
    const BackwardArgs args = given;  // read once: loads at each use cost the loop instructions
    extern __shared__ __align__(128) unsigned char shared[];
    const int thread = pin(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    const int group_of_lane = lane >> 2, thread_in_group = lane & 3;
    const int block = cluster_rank();
    const int64 cluster = blockIdx.x / CLUSTER, first_row = cluster * (FLIGHT * ROWS);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const int first_group = first_group_of(block), groups = first_group_of(block + 1) - first_group;

    number_rows<FLIGHT * ROWS, THREADS>(rows, first_row, args.batch, LENGTHS ? args.order : nullptr);
    for (int at = AT_GATES + threadIdx.x * 16; at < AT_PARTS; at += THREADS * 16)
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(0, 0, 0, 0);
    const uint32 mbarriers = shared_address(shared);
    const int message = groups * 256 * TILES * CLUSTER;
    mbarrier_init<FLIGHT * 2>(mbarriers, message);

    auto slot_of = [&](int s) { return Slot(warp * SLOTS + s, groups); };
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[FLIGHT][SLOTS][2][STATES], d_start[FLIGHT][SLOTS][2][FRESH ? STATES : 1];
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = slot_of(s);
        const int unit = (first_group + slot.group) * 8 + group_of_lane;
        const bool inside = slot.mine && unit < args.units;
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v) vector[s][v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
        #pragma unroll
        for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int b = rows[f * ROWS + slot.tile * 8 + thread_in_group * 2 + c];
                #pragma unroll
                for (int k = 0; k < STATES; ++k) {
                    const int64 at = int64(b) * args.units + unit;
                    d_state[f][s][c][k] = !inside || b < 0 ? 0.0f
                                          : args.chunk_in        ? args.chunk_in[k * args.batch * args.units + at]
                                          : args.d_final[k]     ? widen(args.d_final[k][at])
                                                           : 0.0f;
                    if (FRESH) d_start[f][s][c][k] = 0.0f;
                }
            }
    }

    // step i of this loop undoes step count - 1 - i of forward's: places in memory move with it
    const int count = int(LENGTHS ? args.lengths[args.order[first_row]] : args.steps);
    const int way = args.reverse ? 1 : -1, first = args.reverse ? 0 : count - 1;
    const int64 tiles = (args.batch + 7) / 8, moved = way * first;  // steps of the loop from where memory begins
    const storage_t *d_output[FLIGHT][SLOTS], *record[FLIGHT][SLOTS];
    storage_t* d_gate_at[FLIGHT][SLOTS];
    bool dy_here[FLIGHT][SLOTS], record_here[FLIGHT][SLOTS], gates_here[FLIGHT][SLOTS];
    auto length_at = [&](int b) { return b < 0 ? 0 : LENGTHS ? int(args.lengths[b]) : count; };
    const uint32 mine_of[2] = {pin_if_room(1u << thread_in_group * 8), pin_if_room(1u << (thread_in_group * 8 + 4))};
    const SavedPlace cells(lane);
    const int later = args.reverse ? 0 : 1;  // after a step the resets of the next one count, in reverse its own
    int length[FLIGHT][SLOTS][2];
    Resets resets[FLIGHT][SLOTS];  // of the row that this lane writes
    #pragma unroll
    for (int f = 0; f < FLIGHT; ++f)
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = slot_of(s);
            const int group = first_group + slot.group;
            const int* const tile_rows = rows + f * ROWS + slot.tile * 8;
            // dy: a lane copies 16 bytes of [row, 8 units]
            const int line = lane * CHUNK / 8, unit = group * 8 + lane * CHUNK % 8;
            const int b = slot.mine && lane * 16 < DY_BYTES ? tile_rows[line] : -1;
            dy_here[f][s] = args.dy && b >= 0;
            d_output[f][s] = dy_here[f][s] ? advanced(args.dy, moved * args.dy_step_bytes) + b * args.dy_row + unit : args.weight;
            const int64 tile = first_row / 8 + f * TILES + slot.tile;
            record_here[f][s] = slot.mine && tile < tiles;
            record[f][s] = record_here[f][s] ? advanced(args.saved, moved * args.saved_step_bytes) +
                                                   (tile * GROUPS + group) * (64 * SAVED) + saved_offset(lane) : args.weight;
            const int own = slot.mine ? tile_rows[group_of_lane] : -1;
            gates_here[f][s] = own >= 0;  // the row that this lane writes
            d_gate_at[f][s] = advanced(args.d_gates, moved * args.d_gates_step_bytes) + int64(own) * (PLANES * UNITS) + group * 8 + thread_in_group * 2;
            #pragma unroll
            for (int c = 0; c < 2; ++c)  // padding stays 0 for any cell
                length[f][s][c] = slot.mine && group * 8 + group_of_lane < args.units ? length_at(tile_rows[thread_in_group * 2 + c]) : 0;
            if (RESET) resets[f][s].begin(args.reset, args.batch, own, first + later, length_at(own));
        }
    constexpr int STAGE = FLIGHT * SLOTS * ENTRY_BYTES, RING = STAGES * STAGE;
    const int ring = AT_RING + warp * RING;
    int stage = 0, spare = RING - STAGE;  // of a step; and of the last, to be filled reread
    const uint32 ring_place = shared_address(shared + ring);
    const int dy_at = pin_if_room(lane * 16), reset_at = pin_if_room(SLOT_BYTES + reset_offset(lane));
    const uint32 reset_turn = uint32(args.reset_step_bytes) * 8;
    auto copy_inputs = [&](int i, int into, int f) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = ring_place + into + (f * SLOTS + s) * ENTRY_BYTES;
            if (lane * 16 < DY_BYTES)
                copy_async<16>(target + dy_at, d_output[f][s], i < count && dy_here[f][s] ? 16 : 0);
            copy_saved_async(target + DY_BYTES, record[f][s], cells, i < count && record_here[f][s]);
            if (RESET) resets[f][s].copy(target + reset_at, thread_in_group, way, args.reset_step_bytes, i < count && (i > 0 || !later));
            d_output[f][s] = advanced(d_output[f][s], args.dy_step_bytes), record[f][s] = advanced(record[f][s], args.saved_step_bytes);
        }
        commit_copies();
    };
    // R^T as A operands: rows are units of the whole layer, K this block's gates
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, thread);
    load_matrix(matrix, others, [&](int number, int s) {
        const int group = warp * MMA_ROWS * 2 + number, k = s * K_TILE + thread_in_group * CHUNK_K;
        const int plane = k / OWN, unit = first_group * 8 + k % OWN;
        uint4 found = {};
        if (group < GROUPS && plane < GATES && k % OWN < groups * 8)
            found = *reinterpret_cast<const uint4*>(
                args.weight + (int64(group * 8 + group_of_lane) * GATES + plane) * UNITS + unit);
        return found;
    });

    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f) copy_inputs(s, s * STAGE, f);

    // addresses that each step uses, computed once: at small B a step takes as long as its instructions
    const int begin = pin(operand_start(thread_in_group, group_of_lane)), side = pin_if_room(ring + fragment_offset(lane));
    int own_parts[SLOTS], own_gates[SLOTS][GATES], target[MMA_ROWS][2];
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = slot_of(s);
        own_parts[s] = pin((slot.tile * BLOCK_GROUPS + slot.group) * 256 + group_of_lane * 32 + thread_in_group * 8);
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const int k = gate * OWN + slot.group * 8 + thread_in_group * 2;
            const int place = AT_GATES + operand_offset(k / CHUNK_K, slot.tile, group_of_lane) + k % CHUNK_K * sizeof(operand_t);
            // where the pattern of places repeats from gate to gate, one is enough
            const bool same = OWN / CHUNK_K % 4 == 0 && gate > 0;
            own_gates[s][gate] = same ? own_gates[s][0] + gate * (OWN / CHUNK_K) * CHUNK_BYTES : pin(place);
        }
    }
#if CLUSTER > 1
    uint32 owners[MMA_ROWS][2];
#endif
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {  // each half of 8 units goes to its owner
            const int group = min((warp * MMA_ROWS + m) * 2 + half, GROUPS - 1);
            const int owner = owner_of(group), its = group - first_group_of(owner);
            target[m][half] = pin(AT_PARTS + (block * TILES * BLOCK_GROUPS + its) * 256 + group_of_lane * 32 +
                                     thread_in_group * 8);
#if CLUSTER > 1
            owners[m][half] = pin(remote(mbarriers, owner));
#endif
        }
#if CLUSTER > 1
    cluster_barrier();
#else
    __syncthreads();
#endif

    // the parts of dh that the blocks found in the step before, which stand in the other half
    auto add_parts = [&](int f, int half) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            if (slot_of(s).mine)
                add_shares<CLUSTER, TILES * BLOCK_GROUPS * 256>(
                    d_state[f][s], shared + AT_PARTS + f * (2 * PARTS) + half + own_parts[s]);
    };

    int parts_now = 0, box_now = 0;  // of a step: the halves of parts change places
    uint32 phase = 1;                  // of the other half's mbarrier
    auto take_step = [&](int i) {
        const int t = first + way * i;
        int before = i;
        asm volatile("" : "+r"(before));  // of four steps together the compiler would know it
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            await_copies<(STAGES - 1) * FLIGHT - 1>();
            __syncwarp();
            float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
            uint32 again[SLOTS];  // whether what came after the step began reread: bit 4r of row r
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const int place = stage + (f * SLOTS + s) * ENTRY_BYTES;
                float values[2][KEPT + 4];
                load_saved(shared + ring + place + DY_BYTES, cells, values);
                load_fragments<1>(shared + side + place, &d_out[s]);
                const bool begins = RESET && resets[f][s].test(shared + ring + place + reset_at, reset_turn);
                find_factors(values, vector[s], factor[s]);
                if (RESET) again[s] = __ballot_sync(~0u, begins);
            }
            copy_inputs(i + STAGES - 1, spare, f);
            // a branch, past which the compiler does not move factors: they would wait for letters, too
            if (before > 0) {
#if CLUSTER > 1
                // Gates are written over what the step before read. Letters say so of their senders only;
                // with two turns the other's barrier does. Here warps wait for letters anyway.
                if (FLIGHT == 1) __syncthreads();
                const uint32 mbarrier = mbarriers + f * 16 + (8 - box_now);
                mbarrier_wait(mbarrier, phase);
                if (thread == 0) mbarrier_expect(mbarrier, message);
#endif
                add_parts(f, PARTS - parts_now);
            }
            float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
            Pair pairs[SLOTS][PLANES];
            auto lives = [&](int s, int c) { return (LENGTHS ? t : 0) < length[f][s][c]; };
            auto leave_gates = [&](int s) {
                #pragma unroll
                for (int p = 0; p < PLANES; ++p)
                    if (gates_here[f][s]) store(d_gate_at[f][s] + p * UNITS, pairs[s][p]);
                d_gate_at[f][s] = advanced(d_gate_at[f][s], args.d_gates_step_bytes);
            };
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const Slot slot = slot_of(s);
                const int group = first_group + slot.group;
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float (&d_here)[STATES] = d_state[f][s][c];
                    if (RESET && again[s] & mine_of[c]) end_at_reset(d_here, d_start[f][s][c]);
                    const bool live = lives(s, c);
                    float d_after[STATES], d_before[STATES], found[PLANES];
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k) {
                        d_after[k] = k == 0 ? d_here[k] + d_out[s][c] : d_here[k];
                        const int64 b = rows[f * ROWS + slot.tile * 8 + thread_in_group * 2 + c], unit = group * 8 + group_of_lane;
                        if (EVERY && args.d_all_states[k] && slot.mine && live && b >= 0 && unit < args.units)
                            d_after[k] += widen(args.d_all_states[k][(t * args.batch + b) * args.units + unit]);
                    }
                    derivative(factor[s][c], d_after, found, d_before, d_vector[s][c]);
                    if (ALL_LIVE || live) {
                        #pragma unroll
                        for (int k = 0; k < STATES; ++k) d_here[k] = d_before[k];
                        #pragma unroll
                        for (int p = 0; p < PLANES; ++p) d_gate[s][c][p] = found[p];
                    }
                    if (!LATE && live) add_up(total[s], found, d_vector[s][c]);
                }
                if (!LATE && !slot.mine) continue;
                #pragma unroll
                for (int p = 0; p < PLANES; ++p) {
                    pairs[s][p] = transposed(d_gate[s][0][p], d_gate[s][1][p]);
                    if (p >= RIGHT && slot.mine)
                        store(reinterpret_cast<storage_t*>(shared + f * GATE_ROWS + own_gates[s][max(p - RIGHT, 0)]),
                             rounded(pairs[s][p]));
                }
                if (!LATE) leave_gates(s);
            }
            __syncthreads();
            // dh = R^T dr, this block's part of all units; nobody waits for warps without units
            const bool multiplies = CLUSTER == 1 || (WGMMA ? warp & ~3 : warp) * MMA_ROWS * 2 < GROUPS;
            Sums sums_of_rows = {};
            if (multiplies) product(sums_of_rows, matrix, others, shared + AT_GATES + f * GATE_ROWS + begin);
            #pragma unroll
            for (int m = 0; m < MMA_ROWS && multiplies; ++m)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int group = (warp * MMA_ROWS + m) * 2 + half;
                    if (WARPS * MMA_ROWS * 2 > GROUPS && group >= GROUPS) continue;
                    #pragma unroll
                    for (int n = 0; n < TILES; ++n) {
                        const float low = chained(sums_of_rows, m, n, half * 2);
                        const float high = chained(sums_of_rows, m, n, half * 2 + 1);
                        const int buffer = parts_now + f * (2 * PARTS);
                        const int there = target[m][half] + buffer + n * (BLOCK_GROUPS * 256);
#if CLUSTER > 1
                        store_async(owners[m][half] + there, low, high, owners[m][half] + f * 16 + box_now);
#else
                        *reinterpret_cast<float2*>(shared + there) = make_float2(low, high);
#endif
                    }
                }
#if CLUSTER == 1
            __syncthreads();
#endif
            if (LATE) {  // while letters travel
                leave_gates(0);
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (lives(0, c)) add_up(total[0], d_gate[0][c], d_vector[0][c]);
            }
        }
    };
    // Short steps by fours, as far as that was faster: what alternates is known then, a tenth of the work.
    constexpr int FEW = !SHORT ? 8 : WARPS > 4 ? 16 : 12;
    constexpr int ROUND = K_TILES * MMA_ROWS <= FEW && SLOTS * FLIGHT == 1 ? 4 : 1;
    static_assert(ROUND == 1 || 4 % STAGES == 0, "after four steps all stands where it began");
    for (int i = 0; i < count;) {
        if (ROUND == 4) stage = 0, spare = RING - STAGE, parts_now = 0, box_now = 0, phase = 1;
        #pragma unroll
        for (int j = 0; j < ROUND && (j == 0 || i < count); ++j, ++i) {
            take_step(i);
            spare = stage, stage = stage + STAGE == RING ? 0 : stage + STAGE;
            parts_now = PARTS - parts_now, box_now = 8 - box_now, phase ^= uint32(box_now) >> 3;
        }
    }

    #pragma unroll
    for (int f = 0; f < FLIGHT && count > 0; ++f) {
#if CLUSTER > 1
        mbarrier_wait(mbarriers + f * 16 + (count - 1) % 2 * 8, uint32(count - 1) / 2 % 2);
#endif
        add_parts(f, (count - 1) % 2 * PARTS);
    }
    {   // places reread: what only the end needs is not held in the loop
        const int thread = reread_thread(), group_of_lane = thread % 32 / 4, thread_in_group = thread % 4, block = cluster_rank();
        const int first_group = first_group_of(block), groups = first_group_of(block + 1) - first_group;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot(thread / 32 * SLOTS + s, groups);
            if (!slot.mine) continue;
            const int group = first_group + slot.group, unit = group * 8 + group_of_lane;
            #pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                const int64 own = rows[f * ROWS + slot.tile * 8 + group_of_lane];
                if (LENGTHS && own >= 0)
                    store_no_gradients(args.d_gates, count * args.batch + own, args.batch, group * 8 + thread_in_group * 2, int(args.steps) - count);
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[f * ROWS + slot.tile * 8 + thread_in_group * 2 + c];
                    if (b < 0 || unit >= args.units) continue;
                    const bool replaced = RESET && !args.reverse && length_at(b) > 0 && args.reset[b];
                    store_first(d_state[f][s][c], d_start[f][s][c], replaced, args.chunk_out, args.d_initial, args.d_reset_state,
                                reread(args.batch) * args.units, int64(b) * args.units + unit);
                }
            }
            #pragma unroll
            for (int p = 0; p < PLANES + VECTORS; ++p) {
                const float all = sum_over_rows(total[s][p]);
                if (thread_in_group == 0)
                    args.sums[((cluster * TILES + slot.tile) * (PLANES + VECTORS) + p) * UNITS + unit] = all;
            }
        }
    }
#if CLUSTER > 1
    cluster_barrier();
#endif
}
