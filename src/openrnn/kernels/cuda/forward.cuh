// The forward time loop of one layer and direction in blocks or clusters that each own all of R.
//
// A cluster has FLIGHT tiles of TILES * 8 rows of the batch. Its R stays in registers, and in
// shared memory where those are full. A warp owns PER_WARP groups of 8 units with all their gates:
// an mma has 16 rows, 8 of one gate and 8 of the next, so that a lane's sums are all gates of unit
// lane / 4 in rows 2 * (lane % 4) and the next, and the cell needs no other lane.
//
// A step waits at an mbarrier for h, multiplies, applies the cell, and stores h into every block's
// other buffer of h. Nothing else synchronises: a warp that sends h of step t + 1 has received all
// of h of step t, so every warp has read h of step t - 1, whose buffer it writes. Warpgroups with
// idle warps (UNEVEN) have a barrier of their own.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int PER_WARP = PER;
constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int BLOCK_GROUPS = WARPS * PER_WARP;
constexpr int MMA_ROWS = (PER_WARP * GATES + 1) / 2;
constexpr int K_TILES = (UNITS + K_TILE - 1) / K_TILE;
constexpr int HIDDEN_BYTES = K_TILES * TILES * 512;  // a buffer of h
constexpr int ROWS = TILES * 8;
constexpr int GATE_BYTES = 64 * SIZE;                // inputs of one gate of a group in a tile
constexpr int INPUT_BYTES = PER_WARP * TILES * SLOT_BYTES;  // of a warp, a step
constexpr int COPIES = (INPUT_BYTES / 16 + 31) / 32;
constexpr int ENTRY_BYTES = INPUT_BYTES + TILES * RESET_BYTES;
constexpr int MESSAGE_BYTES = UNITS * sizeof(operand_t) * ROWS;  // h that a block receives a step
constexpr int TILE_SAVED = GROUPS * (64 * SAVED);

#include "product.cuh"
#include "forward_cell.cuh"

// shared memory, in bytes: mbarriers, numbers of rows, two buffers of h, ring of inputs, R
constexpr int AT_ROWS = FLIGHT * 2 * 8;
constexpr int AT_HIDDEN = (AT_ROWS + FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_RING = AT_HIDDEN + FLIGHT * 2 * HIDDEN_BYTES;
constexpr int STAGE_BYTES = FLIGHT * ENTRY_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;  // of a warp
constexpr int AT_WEIGHTS = AT_RING + WARPS * RING_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/tiles.py counts shared memory otherwise");
static_assert(!WGMMA || CLUSTER == 1 || GROUPS / CLUSTER > (WARPS - 4) * PER_WARP,
              "a warpgroup without any units would wait for nobody, and miss a message");

// A warp without units sends nothing, so nobody would wait for it to see each message: it leaves.
// Where the other warps of its warpgroup multiply with it, they wait for it instead.
constexpr bool UNEVEN = WGMMA && CLUSTER > 1 && GROUPS != CLUSTER * BLOCK_GROUPS;

#include "forward_parts.cuh"

// The loop of one warp: what its steps read and change.
struct Loop {
    const ForwardArgs& args;
    const Place& here;
    const Time& time;
    const int* rows;
    unsigned char* shared;
    Cells& cells;
    Inputs& inputs;
    Outputs& out;
    Exchange& exchange;
    const Matrix& matrix;
    unsigned char* others;
    int operand, fragment;  // offsets at which a lane reads h, and the ring

    // Sums begin with what is known before h is: inputs and biases.
    INLINE void start_sums(const float (&given)[PER_WARP][TILES][GATES][2], Sums& sums) const {
        #pragma unroll
        for (int j = 0; j < PER_WARP; ++j)
            #pragma unroll
            for (int n = 0; n < TILES; ++n)
                #pragma unroll
                for (int gate = 0; gate < GATES; ++gate)
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int half = j * GATES + gate;
                        sums[half / 2][n][0][half % 2 * 2 + c] =
                            cells.units[j].start(gate, given[j][n][gate][c]);
                    }
    }

    // A group's cells in tile n: their step, h for the next one, y and saved activations.
    INLINE void step_group(const Sums& sums, const float (&given)[GATES][2], const TileRows& tile,
                           int f, int j, int n, int i) {
        const int group = here.first_group + j, t = time.first + time.way * i;
        float hidden[2] = {0.0f, 0.0f}, values[2][KEPT + 4] = {}, right[2][GATES];
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate) {
                const int half = j * GATES + gate;
                right[c][gate] = chained(sums, half / 2, n, half % 2 * 2 + c);
            }
        step_cell(args, cells.units[j], given, right, tile, out.bits, rows + here.pair_rows(f, n),
                  here.unit(j), group < here.end_group, t, cells.state[f][j][n], hidden, values);
        const Pair pair = transposed(hidden[0], hidden[1]);
        const Message message =
            next_hidden(args, pair, hidden, tile.resets, out.row[f][n], here.pair_unit(j));
        const bool owned = GROUPS == CLUSTER * BLOCK_GROUPS || group < here.end_group;
        exchange.send(here, shared, f, j, n, rounded(message), owned, i + 1 == time.count);
        if (owned && out.row[f][n] >= 0)
            store_inside(out.y[f][n] + j * 8, out.bits.own_live(tile) ? pair : Pair{},
                         here.pair_unit(j), args.units);
        if (KEEP && owned && (f + n == 0 || here.first_row + f * ROWS + n * 8 < args.batch))
            store_saved(out.saved + (f * TILES + n) * TILE_SAVED + j * (64 * SAVED),
                        out.saved_place.rest, values);
    }

    // Step i of turn f: the tiles that share one product. turns: steps that this warp takes.
    INLINE void step(int i, int f, int turns) {
        await_copies<(STAGES - 1) * FLIGHT - 1>();
        __syncwarp();
        Sums sums = {};
        float given[PER_WARP][TILES][GATES][2];
        const int entry = inputs.stage + f * ENTRY_BYTES;
        load_fragments<PER_WARP * TILES * GATES>(shared + fragment + entry, &given[0][0][0]);
        start_sums(given, sums);
        inputs.copy(args, here, time, turns, exchange.mbarriers, i + STAGES - 1, inputs.spare, f);
        TileRows tile[TILES];
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            if (LENGTHS)
                tile[n].live = __ballot_sync(~0u, time.first + time.way * i < out.length[f][n]);
            if (RESET)
                tile[n].resets = inputs.resets[f][n].test(
                    shared + inputs.reset_at + entry + n * RESET_BYTES, inputs.reset_turn);
        }
        exchange.wait(here, f);
        // r = R h
        product(sums, matrix, others,
                shared + f * (2 * HIDDEN_BYTES) + exchange.read_at + operand);
        #pragma unroll
        for (int n = 0; RESET && n < TILES; ++n)  // votes here, while the product runs
            tile[n].reset = __ballot_sync(~0u, tile[n].resets);
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            #pragma unroll
            for (int j = 0; j < PER_WARP; ++j) step_group(sums, given[j][n], tile[n], f, j, n, i);
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            out.y[f][n] = advanced(out.y[f][n], args.y_step_bytes);
            #pragma unroll
            for (int j = 0; RESET && j < PER_WARP; ++j)  // after sending: nobody waits for it
                reset_cells(cells.state[f][j][n], tile[n].reset, out.bits.pair, args.reset_state,
                            rows + here.pair_rows(f, n), here.unit(j), args.units);
        }
    }

    INLINE void run(int turns) {
        for (int i = 0; i < turns; ++i) {
            #pragma unroll
            for (int f = 0; f < FLIGHT; ++f) step(i, f, turns);
            out.saved = advanced(out.saved, args.saved_step_bytes);
            inputs.advance();
            exchange.advance();
        }
    }

    // Zeros of y past the rows' ends, and final states. Places are found again: what only the end
    // needs is not held in the loop.
    INLINE void finish() {
        const int thread = reread_thread(), block = cluster_rank();
        const int group_of_lane = thread % 32 / 4, thread_in_group = thread % 4;
        const int first_group = first_group_of(block) + thread / 32 * PER_WARP;
        const int end_group = first_group_of(block + 1);
        const int64 cells_each = reread(args.batch) * args.units;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int at = 0; at < PER_WARP * TILES; ++at) {
                const int j = at / TILES, n = at % TILES, group = first_group + j;
                if (group >= end_group) continue;
                if (LENGTHS && out.row[f][n] >= 0)
                    store_no_output(args, time.count, time.way, out.row[f][n],
                                    group * 8 + thread_in_group * 2);
                store_final(args, rows + f * ROWS + n * 8 + thread_in_group * 2,
                            group * 8 + group_of_lane, cells_each, cells.state[f][j][n]);
            }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given_args) {
    const ForwardArgs args = given_args;  // read once: loads at each use cost the loop more
    extern __shared__ __align__(128) unsigned char shared[];
    const Place here;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    Exchange exchange;
    exchange.mbarriers = shared_address(shared);
    number_rows<FLIGHT * ROWS, THREADS>(rows, here.first_row, args.batch,
                                        LENGTHS ? args.order : nullptr);
    clear_shared<THREADS>(shared, AT_HIDDEN, AT_RING);
    mbarrier_init<FLIGHT * 2, true>(exchange.mbarriers, MESSAGE_BYTES);
    // R first, while registers are free: loaded after the rest some kernels spill
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, here.thread);
    load_weights(args, here, matrix, others);
    const int count = int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
    store_first_hidden(args, rows, count, shared);
    Cells cells;
    cells.load(args, here, rows, count);
    const Time time(args, count);
    Inputs inputs;
    Outputs out(args, here, time, rows, inputs.resets);
    const bool idle = CLUSTER > 1 && !WGMMA && here.first_group >= here.end_group;
    const int turns = idle ? 0 : count;
    inputs.begin(args, here, time, rows, shared);
    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            inputs.copy(args, here, time, turns, exchange.mbarriers, s, s * STAGE_BYTES, f);
    // computed once: with few rows a step takes as long as its instructions
    const int operand = pin(operand_start(here.thread_in_group, here.group_of_lane));
    const int fragment = pin_if_room(inputs.base + fragment_offset(here.lane));
    exchange.begin(here);

    Loop loop{args, here, time, rows, shared, cells, inputs, out, exchange, matrix, others,
              operand, fragment};
    loop.run(turns);
    loop.finish();
    cluster_barrier();  // no block leaves while another may still write to it
}
