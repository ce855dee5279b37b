// The forward time loop of one layer and direction in blocks or clusters that each own all of R.
//
// A cluster has TILES_IN_FLIGHT tiles of TILES * 8 rows of the batch. Its R stays in registers, and
// in shared memory where those are full. A warp owns GROUPS_OF_WARP groups of 8 units, all gates of
// each: an mma has 16 rows, 8 of one gate and 8 of the next, so that a lane's sums are all gates of
// unit lane / 4 in rows 2 * (lane % 4) and the next, and the cell needs no other lane.
//
// A step multiplies h, applies the cell, and stores h into every block's other buffer of h. In a
// cluster it waits at an mbarrier for h, and nothing else orders its blocks and warps: a warp that
// sends h of step t + 1 has received all of h of step t, so every warp has read h of step t - 1,
// whose buffer it writes. Only warpgroups with idle warps (UNEVEN) have a barrier besides. A block
// that is its own cluster has no mbarrier for h: a barrier of its loop warps ends each step.
//
// In a stack (LAYERS > 1) each layer has clusters of its own, see stack_forward.cuh. There a loop
// warp also waits for its inputs, see `RingBarriers`.

#include "device.cuh"
#include "saved.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;  // of loop warps
constexpr bool STACK = LAYERS > 1;
constexpr int BLOCK_THREADS = (STACK ? 2 : 1) * THREADS;  // in a stack also of input warps
constexpr int GROUPS_OF_BLOCK = WARPS * GROUPS_OF_WARP;
constexpr int MMA_ROWS = (GROUPS_OF_WARP * GATES + 1) / 2;
constexpr int K_TILES = (UNITS + K_TILE - 1) / K_TILE;
constexpr int HIDDEN_BYTES = K_TILES * TILES * 512;  // a buffer of h
constexpr int ROWS = TILES * 8;
constexpr int GATE_BYTES = 64 * SIZE;                // inputs of one gate of a group in a tile
constexpr int INPUT_BYTES = GROUPS_OF_WARP * TILES * SLOT_BYTES;  // of a warp, a step
constexpr int COPIES = (INPUT_BYTES / 16 + 31) / 32;
constexpr int ENTRY_BYTES = INPUT_BYTES + TILES * RESET_BYTES;
constexpr int MESSAGE_BYTES = UNITS * sizeof(operand_t) * ROWS;  // h that a block receives a step
constexpr int TILE_SAVED = GROUPS * (64 * SAVED);

#include "product.cuh"
#include "forward_cell.cuh"
#include "first_hidden.cuh"

// shared memory, in bytes: mbarriers, numbers of rows, two buffers of h, in a stack two of h of the
// layer below, ring of inputs, R, in a stack W_ih
constexpr int AT_RING_BARRIERS = TILES_IN_FLIGHT * 2 * 8;
constexpr int AT_ROWS = AT_RING_BARRIERS + (STACK ? 2 * WARPS * STAGES * 8 : 0);
constexpr int AT_HIDDEN = (AT_ROWS + TILES_IN_FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_BELOW = AT_HIDDEN + TILES_IN_FLIGHT * 2 * HIDDEN_BYTES;
constexpr int AT_RING = AT_BELOW + (STACK ? 2 * HIDDEN_BYTES : 0);
constexpr int STAGE_BYTES = TILES_IN_FLIGHT * ENTRY_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;  // of a warp
constexpr int AT_WEIGHTS = AT_RING + WARPS * RING_BYTES;
constexpr int AT_INPUT_WEIGHTS = AT_WEIGHTS + WARPS * MATRIX_BYTES;
constexpr int SHARED_BYTES = AT_INPUT_WEIGHTS + (STACK ? WARPS * MATRIX_BYTES : 0);
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/config.py counts shared memory otherwise");
static_assert(!WGMMA || CLUSTER == 1 || GROUPS / CLUSTER > (WARPS - 4) * GROUPS_OF_WARP,
              "a warpgroup without any units would wait for nobody, and miss a message");

// A warp without units sends nothing, so senders cannot tell whether it has read h; it runs no
// steps. In a warpgroup it must multiply, so there the other warps wait for it (UNEVEN).
constexpr bool UNEVEN = WGMMA && CLUSTER > 1 && GROUPS != CLUSTER * GROUPS_OF_BLOCK;

constexpr int SENDS = (CLUSTER + PIECE_LANES - 1) / PIECE_LANES;  // blocks that a lane sends h to

#include "layers.cuh"
#include "forward_setup.cuh"
#include "forward_step.cuh"

#if LAYERS > 1
INLINE void multiply_inputs(const ForwardArgs& args, const Place& here, const int* rows,
                            int count, const ForwardArgs& lower);
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
forward(const __grid_constant__ Layers<ForwardArgs> all) {
    // read once: loads at each use cost the loop more
    const ForwardArgs args = all.layers[layer_of_block()];
    const Place here(all.layers[0].first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    number_rows<LENGTHS, TILES_IN_FLIGHT * ROWS, BLOCK_THREADS>(args, rows, here.first_row);
    clear_shared<BLOCK_THREADS>(AT_HIDDEN, AT_RING);
    const uint32 mbarriers = shared_address(shared);
    begin_ring_barriers(mbarriers + AT_RING_BARRIERS);
    open_mbarriers<TILES_IN_FLIGHT * 2, true>(mbarriers, MESSAGE_BYTES);
    const int count = int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps);
    store_first_hidden<TILES_IN_FLIGHT * ROWS, UNITS / PIECE_K, BLOCK_THREADS>(
        args, rows, count, 0, [](int r, int piece) {
            return AT_HIDDEN + r / ROWS * 2 * HIDDEN_BYTES +
                   operand_offset(piece, r % ROWS / 8, r % 8);
        });
#if LAYERS > 1
    if (threadIdx.x >= THREADS)
        return multiply_inputs(args, here, rows, count, all.layers[max(here.layer - 1, 0)]);
#endif
    Cells cells;
    cells.load(args, here, rows, count);

    const Time time(args, count);
    // of the row that a lane stores
    int row[TILES_IN_FLIGHT][TILES] = {}, length[TILES_IN_FLIGHT][TILES] = {};
    Resets resets[TILES_IN_FLIGHT][TILES];
    storage_t* y[TILES_IN_FLIGHT][TILES];
    const SavedPlace saved_place(here.lane);
    const RowBits bits(uint32(keep_in_register(1 << here.thread_in_group * 8)),
                       uint32(keep_in_register(1 << (here.thread_in_group * 8 + 4))));
    const uint32 own_bit = keep_if_room(1u << here.group_of_lane * 4);
    const int later = args.reverse ? 0 : 1;
    begin_rows(args, here, rows, time, later, row, length, resets, y);
    storage_t* saved = first_saved(args, here, time);
    const int steps = here.idle() ? 0 : count;
    const int ring_at = AT_RING + here.warp * RING_BYTES;
    Inputs inputs;
    inputs.begin(args, here, time, rows);
    const Ring ring{keep_if_room(shared_address(shared + ring_at + here.lane * 16)), mbarriers,
                    keep_if_room(ring_at + INPUT_BYTES + reset_offset(here.lane)), later, steps};
    const RingBarriers ring_barriers(here, mbarriers + AT_RING_BARRIERS, here.layer > 0);
    const uint32 reset_shift = uint32(args.reset_step_bytes) * 8;
    // R after the rest is set up: loaded earlier, what comes later is spilled in some kernels
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, here.thread);
    load_weights(args.weight, here, matrix, others);
    inputs.fill(args, here, time, ring, resets);
    // offsets computed once: with few rows a step takes as long as its instructions
    const int operand = keep_in_register(operand_start(here.thread_in_group, here.group_of_lane));
    const int fragment = keep_if_room(ring_at + fragment_offset(here.lane));
    int write_at[GROUPS_OF_WARP];
    #pragma unroll
    for (int j = 0; j < GROUPS_OF_WARP; ++j) write_at[j] = hidden_sum(here, j);
    uint32 peers[SENDS];
    begin_exchange(here, mbarriers, peers);

    // phase: the parity that is awaited at the mbarrier that is read. At step 0 parity 1 counts as
    // over before that mbarrier is opened, so that step 0 waits for nothing and then opens it:
    // nobody sends there before all of this block's step 0. These five are declared in this order:
    // in others some kernels get other registers.
    uint32 phase = 1;
    int read_mbarrier = 0, read_at = AT_HIDDEN;  // offsets: of the mbarrier and the buffer of h
    int spare = RING_BYTES - STAGE_BYTES, stage = 0;  // of the ring: to be refilled, to be read
    for (int i = 0; i < steps; ++i) {
        const int t = time.first + time.direction * i;
        #pragma unroll
        for (int f = 0; f < TILES_IN_FLIGHT; ++f) {  // tiles that share one product, in turn
            await_copies<(STAGES - 1) * TILES_IN_FLIGHT - 1>();
            __syncwarp();
            ring_barriers.await_inputs(i);
            Sums sums = {};
            float given[GROUPS_OF_WARP][TILES][GATES][2];  // input side of the gates
            load_fragments<GROUPS_OF_WARP * TILES * GATES>(
                shared + fragment + stage + f * ENTRY_BYTES, &given[0][0][0]);
            ring_barriers.release(i);
            start_sums(cells, given, sums);
            inputs.copy(args, here, time, ring, resets, i + STAGES - 1, spare, f);
            TileRows tile[TILES];
            #pragma unroll
            for (int n = 0; n < TILES; ++n)
                tile[n].read(t, length[f][n], resets[f][n],
                             shared + ring.reset_at + stage + f * ENTRY_BYTES + n * RESET_BYTES,
                             reset_shift);
            wait_for_hidden(here, mbarriers + f * 16 + read_mbarrier, phase);
            product(sums, matrix, others,  // sums += R h
                    shared + f * (2 * HIDDEN_BYTES) + read_at + operand);
            #pragma unroll
            for (int n = 0; n < TILES; ++n) tile[n].vote();  // here, while the product runs
            #pragma unroll
            for (int n = 0; n < TILES; ++n)
                #pragma unroll
                for (int j = 0; j < GROUPS_OF_WARP; ++j)
                    step_group(args, here, rows, sums, given[j][n], tile[n], bits, own_bit,
                               saved_place.rest, f, j, n, t, i, count, row[f][n], y[f][n], saved,
                               write_at[j], read_at, peers, read_mbarrier, cells);
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                y[f][n] = advanced(y[f][n], args.y_step_bytes);
                if (RESET) reset_tile(args, here, rows, tile[n].reset, bits, f, n, cells);
            }
        }
#if CLUSTER == 1
        loop_barrier();
#endif
        saved = advanced(saved, args.saved_step_bytes);
        spare = stage, stage = stage + STAGE_BYTES == RING_BYTES ? 0 : stage + STAGE_BYTES;
        read_at = 2 * AT_HIDDEN + HIDDEN_BYTES - read_at, read_mbarrier = 8 - read_mbarrier;
        phase ^= uint32(read_mbarrier) >> 3;
    }
    finish(args, time, rows, row, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
