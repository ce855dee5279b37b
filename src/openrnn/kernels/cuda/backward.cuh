// The backward time loop of one layer and direction in blocks or clusters that each own all of R.
//
// A block owns GROUPS_OF_BLOCK groups of 8 units: their cells, and the columns of R^T that multiply
// their gate gradients. A slot is one of its groups in one tile of 8 rows. A step computes the gate
// gradients of the block's cells; they go to memory and, through shared memory, into the block's
// product, which is its share of dh of all units. A unit's owner adds the shares of all blocks, by
// pairs in the order of blocks, so that results are the same in every run.
//
// In a stack (LAYERS > 1) each layer has clusters of its own, see stack_backward.cuh.

#include "device.cuh"
#include "saved.cuh"
#include "backward_cell.cuh"
#include "resets.cuh"

constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;  // of loop warps
constexpr bool STACK = LAYERS > 1;
constexpr int BLOCK_THREADS = (STACK ? 2 : 1) * THREADS;  // in a stack also of input warps
constexpr int ROWS = TILES * 8;
constexpr int UNITS_OF_BLOCK = GROUPS_OF_BLOCK * 8;
constexpr int K_TILES = (GATES * UNITS_OF_BLOCK + K_TILE - 1) / K_TILE;
constexpr int MMA_ROWS = ((GROUPS + 1) / 2 + WARPS - 1) / WARPS;   // of 16 units, a warp
constexpr int SLOTS = (GROUPS_OF_BLOCK * TILES + WARPS - 1) / WARPS;  // of a warp

// Whether gate gradients go to memory, and into sums, only after a step's shares of dh were sent:
// faster where a warp sends little, as where its product is small.
constexpr bool LATE = SHORT && SLOTS * TILES_IN_FLIGHT == 1 && K_TILES * MMA_ROWS <= 16;

constexpr int DY_BYTES = 64 * SIZE;                                // dy of a slot
constexpr int OPERAND_BYTES = K_TILES * TILES * 512;               // gate gradients of a product
constexpr int SHARE_BYTES = TILES * GROUPS_OF_BLOCK * 256;            // dh from one block
constexpr int SHARES_BYTES = CLUSTER * SHARE_BYTES;                // and from all: one buffer

namespace recurrent {  // a stack has another product, of other sizes
#include "product.cuh"
}
using namespace recurrent;

// In a stack: W_ih of the layer above, transposed. Rows are the block's units, K all gates of a
// row; of that each input warp has a part.
constexpr int ABOVE_TILES = ((GATES * UNITS + K_TILE - 1) / K_TILE + WARPS - 1) / WARPS;
constexpr int ABOVE_ROWS = (GROUPS_OF_BLOCK + 1) / 2;  // of 16 units
constexpr int ABOVE_FRAGMENTS = ABOVE_TILES * ABOVE_ROWS;

// shared memory, in bytes: mbarriers, numbers of rows, gate gradients, in a stack those of the
// layer above, two buffers of shares of dh, ring of inputs, R, in a stack W_ih of the layer above
// and shares of dy
constexpr int AT_RING_BARRIERS = TILES_IN_FLIGHT * 2 * 8;
constexpr int AT_ROWS = AT_RING_BARRIERS + (STACK ? 2 * WARPS * STAGES * 8 : 0);
constexpr int AT_GATES = (AT_ROWS + TILES_IN_FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_ABOVE = AT_GATES + TILES_IN_FLIGHT * OPERAND_BYTES;
constexpr int AT_SHARES = AT_ABOVE + (STACK ? WARPS * ABOVE_TILES * TILES * 512 : 0);
constexpr int AT_RING = AT_SHARES + TILES_IN_FLIGHT * 2 * SHARES_BYTES;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // of the ring, a slot
constexpr int STAGE_BYTES = TILES_IN_FLIGHT * SLOTS * ENTRY_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;       // of a warp
constexpr int AT_WEIGHTS = AT_RING + WARPS * RING_BYTES;
constexpr int AT_INPUT_WEIGHTS = AT_WEIGHTS + WARPS * MATRIX_BYTES;
constexpr int AT_INPUT_SHARES =
    AT_INPUT_WEIGHTS + (STACK ? WARPS * (ABOVE_FRAGMENTS - INPUT_REGISTER_FRAGMENTS) * 1024 : 0);
constexpr int SHARED_BYTES = AT_INPUT_SHARES + (STACK ? WARPS * SHARE_BYTES : 0);
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/config.py counts shared memory otherwise");

// Short steps run by fours where that was faster: buffers and phases that alternate are constants
// then, a tenth of the instructions.
constexpr int FEW = !SHORT ? 8 : WARPS > 4 ? 16 : 12;
constexpr int ROUND = K_TILES * MMA_ROWS <= FEW && SLOTS * TILES_IN_FLIGHT == 1 ? 4 : 1;
static_assert(ROUND == 1 || 4 % STAGES == 0, "after four steps all stands where it began");

#include "layers.cuh"
#include "backward_setup.cuh"
#include "backward_step.cuh"

#if LAYERS > 1
INLINE void multiply_inputs(const BackwardArgs& args, const Place& here, const int* rows,
                            const BackwardArgs& upper);
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
backward(const __grid_constant__ Layers<BackwardArgs> all) {
    // read once: loads at each use cost the loop more
    const BackwardArgs args = all.layers[layer_of_block()];
    const Place here(all.layers[0].first_row);
    const int lane = here.lane;  // as a local: low-register kernels hold addresses otherwise
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    number_rows<LENGTHS, TILES_IN_FLIGHT * ROWS, BLOCK_THREADS>(args, rows, here.first_row);
    clear_shared<BLOCK_THREADS>(AT_GATES, AT_SHARES);
    const uint32 mbarriers = shared_address(shared);
    begin_ring_barriers(mbarriers + AT_RING_BARRIERS);
    const int message_bytes = here.message_bytes();
    open_mbarriers<TILES_IN_FLIGHT * 2>(mbarriers, message_bytes);
#if LAYERS > 1
    if (threadIdx.x >= THREADS)
        return multiply_inputs(args, here, rows, all.layers[min(here.layer + 1, LAYERS - 1)]);
#endif
    Cells cells;
    cells.load(args, here, rows);

    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    const int64 tiles = (args.batch + 7) / 8;
    Inputs inputs;
    storage_t* d_gates[TILES_IN_FLIGHT][SLOTS];  // of the row that a lane stores
    bool has_row[TILES_IN_FLIGHT][SLOTS];
    const uint32 bits[2] = {keep_if_room(1u << here.thread_in_group * 8),
                            keep_if_room(1u << (here.thread_in_group * 8 + 4))};
    const SavedPlace place(lane);
    const int later = args.reverse ? 0 : 1;
    int length[TILES_IN_FLIGHT][SLOTS][2];  // of a unit's two rows
    Resets resets[TILES_IN_FLIGHT][SLOTS];  // of the row that a lane stores
    begin_slots(args, here, rows, time, tiles, later, inputs, d_gates, has_row, length, resets);
    const int ring_at = AT_RING + here.warp * RING_BYTES;
    int stage = 0, spare = RING_BYTES - STAGE_BYTES;  // of the ring: to be read, to be refilled
    const Ring ring{shared_address(shared + ring_at), keep_if_room(lane * 16),
                    keep_if_room(SLOT_BYTES + reset_offset(lane)), later};
    const uint32 reset_shift = uint32(args.reset_step_bytes) * 8;
    const RingBarriers ring_barriers(here, mbarriers + AT_RING_BARRIERS, here.layer < LAYERS - 1);
    // R after the rest is set up: loaded earlier, what comes later is spilled in some kernels
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, here.thread);
    load_weights(args, here, matrix, others);
    inputs.fill(args, here, time, ring, place, resets);
    const int operand = keep_in_register(operand_start(here.thread_in_group, here.group_of_lane));
    const int fragment = keep_if_room(ring_at + fragment_offset(lane));
    int own_shares[SLOTS], own_gates[SLOTS][GATES], share_at[MMA_ROWS][2];
    uint32 owners[MMA_ROWS][2];
    find_offsets(here, mbarriers, own_shares, own_gates, share_at, owners);
    blocks_barrier();

    int write_buffer = 0, write_mbarrier = 0;  // offsets: of the shares that a step sends
    uint32 phase = 1;                          // of the other buffer's mbarrier
    auto step = [&](int i) {
        const int t = time.first + time.direction * i;
        int before = i;
        asm volatile("" : "+r"(before));  // unknown: of four steps together three have one before
        #pragma unroll
        for (int f = 0; f < TILES_IN_FLIGHT; ++f) {  // tiles that share one product, in turn
            await_copies<(STAGES - 1) * TILES_IN_FLIGHT - 1>();
            __syncwarp();
            ring_barriers.await_inputs(i);
            float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
            uint32 reset_rows[SLOTS];  // that were reset after the step: bit 4r of row r
            load_slots(cells, place, ring_at, fragment, stage, ring.reset_at, reset_shift, f,
                       resets, d_out, factor, reset_rows);
            ring_barriers.release(i);
            inputs.copy(args, here, time, ring, place, resets, i + STAGES - 1, spare, f);
            if (before > 0) {  // a branch, so that the compiler computes no factors after the wait
                wait_for_shares(here, mbarriers, f, write_mbarrier, phase, message_bytes);
                receive_shares(here, own_shares, f, SHARES_BYTES - write_buffer, cells);
            }
            float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
            Pair pairs[SLOTS][PLANES];
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const Slot slot = here.slot(s);
                step_slot(args, here, rows, slot, f, s, t, reset_rows[s], bits, length[f][s],
                          d_out[s], factor[s], cells, d_gate[s], d_vector[s]);
                if (!LATE && !slot.owned) continue;
                place_gates(slot.owned, f, own_gates[s], d_gate[s], pairs[s]);
                if (!LATE) store_gates(args, has_row[f][s], d_gates[f][s], pairs[s]);
            }
            loop_barrier();
            // dh = R^T dr, this block's share of all units; nobody waits for warps without units
            const bool multiplies =
                CLUSTER == 1 || (WGMMA ? here.warp & ~3 : here.warp) * MMA_ROWS * 2 < GROUPS;
            Sums sums = {};
            if (multiplies) {
                product(sums, matrix, others, shared + AT_GATES + f * OPERAND_BYTES + operand);
                send_shares(here, sums, share_at, owners, f, write_buffer, write_mbarrier);
            }
#if CLUSTER == 1
            loop_barrier();
#endif
            if (LATE) {  // while messages travel
                store_gates(args, has_row[f][0], d_gates[f][0], pairs[0]);
                add_live(length[f][0], t, d_gate[0], d_vector[0], cells);
            }
        }
    };
    for (int i = 0; i < time.count;) {
        if (ROUND == 4) {
            stage = 0, spare = RING_BYTES - STAGE_BYTES;
            write_buffer = 0, write_mbarrier = 0, phase = 1;
        }
        #pragma unroll
        for (int j = 0; j < ROUND && (j == 0 || i < time.count); ++j, ++i) {
            step(i);
            spare = stage, stage = stage + STAGE_BYTES == RING_BYTES ? 0 : stage + STAGE_BYTES;
            write_buffer = SHARES_BYTES - write_buffer, write_mbarrier = 8 - write_mbarrier;
            phase ^= uint32(write_mbarrier) >> 3;
        }
    }
    receive_last(here, mbarriers, own_shares, time.count, cells);
    finish(args, here, time, rows, cells);
    cluster_barrier();  // no block leaves while another may still write to it
}
