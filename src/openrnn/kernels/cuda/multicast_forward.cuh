// The forward time loop of one layer and direction, or of a stack, for large batches: what blocks
// multiply is h.

#define K (UNITS * (LAYERS > 1 ? 2 : 1))
#define SUMS GATES
#define K_PARTS 1
#define PUBLISHED 1
#include "multicast.cuh"
#include "forward_cell.cuh"

constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;
constexpr int GATE_BYTES = 64 * SIZE;
static_assert(K_WARPGROUPS == 2, "two warpgroups multiply, each a half of K");
static_assert(SCALED == 0, "sums are halved in the step");

constexpr bool BACKWARD = false;
constexpr int LAYER_BEFORE = -1;  // STACK: the one below, whose h is the input
// Cells are computed sooner than the next sums come: a warp reads ahead and stores late.
constexpr bool CELLS_WAIT = SETS_OF_WARP * SLOTS <= 4;
constexpr int MESSAGES_BYTES = 0;  // no block sends sums to another
constexpr int RECURRENT_OFFSET = 0;  // a layer and the one above multiply the same h

INLINE int steps_of_products(int count) { return count; }
// What a step multiplies; in a stack the layer above also multiplies h of the last one.
INLINE int steps_published(int count) { return count + (STACK && count > 0); }

#include "multicast_exchange.cuh"
#include "multicast_forward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ Layers<ForwardArgs> given) {
    const Place here(given.layers[0].first_row);
#if LOW_REGISTER
    const ForwardArgs& args = given.layers[STACK ? here.layer : 0];
#else
    // read once: loads at each use cost the loop more
    const ForwardArgs args = given.layers[STACK ? here.layer : 0];
#endif
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const int count = begin_block(args, here, rows);
    const Exchange exchange(args, here);
    const Time time(args, count);
    run_warps(here, exchange, count, [&] { multiply(args, here, time); },
              [&] { compute(args, here, exchange, time, rows); });
}
