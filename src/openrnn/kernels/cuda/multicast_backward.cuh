// The backward time loop of one layer and direction, or of a stack, for large batches: what blocks
// multiply are gate gradients.
//
// Step i first finds dh of the step that it undoes: R^T times the gate gradients of step i - 1. In
// a stack those of the layer above at step i, times its W_ih^T, are the gradient of y.
// K is all gates of all units: too long for one block. So K_PARTS blocks share it, each with the
// gates of some of the units, and send each other their sums. Then the block takes the
// derivative of its cells. One more product follows the last step, for the gradient of the
// initial state.

#define K (GATES * UNITS * (LAYERS > 1 ? 2 : 1))
#define SUMS 1
#define PUBLISHED (LAYERS > 1 ? PLANES : GATES)
#include "multicast.cuh"
#include "backward_cell.cuh"

static_assert(SLOT_BYTES == 64 * SIZE * (1 + SAVED), "codegen/config.py counts inputs otherwise");
constexpr int DY_BYTES = 64 * SIZE;
constexpr int64 GATES_ROW = PLANES * UNITS;  // values from a row of d_gates to the next
constexpr int SPLIT_GROUPS = GROUPS / SPLITS;  // whose gates are one half of a block's K
// Cells are computed sooner than the next sums come: a warp reads ahead and stores late.
constexpr bool CELLS_WAIT = SETS_OF_WARP * SLOTS <= 2;
constexpr int MESSAGE_WORDS = SLOTS * 2;  // of a lane: sums of its cells
// of a block, in one step of a set
constexpr int MESSAGES_BYTES =
    PARTS_IN_CLUSTER ? 0 : (K_PARTS - 1) * CELL_WARPS * 32 * MESSAGE_WORDS * 4;

constexpr bool BACKWARD = true;
constexpr int LAYER_BEFORE = 1;  // STACK: the one above, whose gate gradients give that of y
// Planes from this one on are published. One layer publishes those of the recurrent side, which R^T
// multiplies: the last GATES. A stack publishes all: W_ih^T of the layer below multiplies the first
// GATES, those of the input side.
constexpr int FIRST_PLANE = STACK ? 0 : RIGHT;
// STACK: where the planes of the recurrent side begin in what is published, in bytes of a split.
constexpr int RECURRENT_OFFSET = STACK ? RIGHT * SPLIT_GROUPS * PIECE_BYTES : 0;
// The first step whose product is needed: in a stack that of the other layer's gate gradients.
constexpr int FIRST_PRODUCT = STACK ? 0 : 1;

INLINE int steps_of_products(int count) { return count + (STACK && count > 0); }
INLINE int steps_published(int count) { return count; }

// The inputs of slot s, which have the same place in all steps.
INLINE int entry_of(const Place& here, int s, int) {
    return AT_INPUTS +
           ((here.set * CELL_WARPS + here.cell_warp()) * SLOTS + s) * ENTRY_BYTES;
}
#include "backward_slots.cuh"
#include "multicast_exchange.cuh"
#include "multicast_backward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ Layers<BackwardArgs> given) {
    const Place here(given.layers[0].first_row);
#if LOW_REGISTER
    const BackwardArgs& args = given.layers[STACK ? here.layer : 0];
#else
    // read once: loads at each use cost the loop more
    const BackwardArgs args = given.layers[STACK ? here.layer : 0];
#endif
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const int count = begin_block(args, here, rows);
    const Exchange exchange(args, here);
    const Time time(args, count);
    run_warps(here, exchange, count, [&] { multiply(args, here, time); },
              [&] { compute(args, here, exchange, time, rows); });
}
