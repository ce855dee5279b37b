// The backward time loop of one layer and direction for large batches: what blocks multiply are
// gate gradients.
//
// Step i first finds dh of the step that it undoes: R^T times the gate gradients of step i - 1.
// K is all gates of all units: too long for one block. So K_PARTS blocks share it, each with the
// gates of some of the units, and send each other their sums. Then the block takes the
// derivative of its cells. One more product follows the last step, for the gradient of the
// initial state.

#define K (GATES * UNITS)
#define SUMS 1
#include "multicast.cuh"
#include "backward_cell.cuh"

static_assert(SLOT_BYTES == 64 * SIZE * (1 + SAVED), "codegen/config.py counts inputs otherwise");
constexpr int DY_BYTES = 64 * SIZE;
constexpr int64 GATES_ROW = PLANES * UNITS;  // values from a row of d_gates to the next
constexpr int HALF_GROUPS = GROUPS / (K_PARTS * HALVES);  // whose gates are one half of a block's K
// The cells of a turn are computed when the sums of the next one were sent: their messages have
// had that long to come. With fewer sets a set would be waited for instead.
constexpr bool DELAYED = K_PARTS > 1 && SETS > 3;
constexpr int MESSAGE_WORDS = SLOTS * 2;  // of a lane: sums of its cells
// of a block, in one step of a set
constexpr int MESSAGES_BYTES = (K_PARTS - 1) * CELL_WARPS * 32 * MESSAGE_WORDS * 4;

// The flag buffer: counters [sets, K_PARTS * HALVES, 128 bytes], then messages [sets, 2 (of even
// and of odd steps), BLOCKS, senders, warps, 32 lanes, MESSAGE_WORDS], then gate gradients [sets,
// 2, halves of parts of K, GATES, HALF_GROUPS, TILES, 8 rows, 8 units]. Counters and messages are
// filled with ones.
struct Exchange {
    unsigned char* counters;  // of the block's first set
    unsigned char* messages;  // to the block, in the same set
    unsigned char* operand;   // of that set

    INLINE Exchange(const BackwardArgs& args, const Place& here) {
        const int64 sets = (args.batch + ROWS - 1) / ROWS * SETS, set = here.first_row / SET_ROWS;
        unsigned char* const begin = reinterpret_cast<unsigned char*>(args.flag_buffer);
        counters = begin + set * COUNTER_BYTES;
        messages = begin + sets * COUNTER_BYTES;
        operand = messages + sets * (2 * BLOCKS * MESSAGES_BYTES) + set * (2 * STEP_BYTES);
        messages += (set * 2 * BLOCKS + here.block) * MESSAGES_BYTES;
    }
    INLINE int* counter(int set, int half) const {  // how often blocks of a half have published
        return reinterpret_cast<int*>(counters + set * COUNTER_BYTES + half * 128);
    }
    INLINE unsigned char* operand_of(int set, int step) const {
        return operand + (set * 2 + (step & 1)) * STEP_BYTES;
    }
    // those to a block `away` blocks after this one
    INLINE unsigned char* messages_of(int set, int step, int away) const {
        return messages + ((set * 2 + (step & 1)) * BLOCKS + away) * MESSAGES_BYTES;
    }
};

// The inputs of slot s, which have the same place in all steps.
INLINE int entry_of(const Place& here, int s, int) {
    return AT_INPUTS +
           ((here.set * CELL_WARPS + here.warp - PRODUCT_WARPS) * SLOTS + s) * ENTRY_BYTES;
}
#include "backward_slots.cuh"
#include "multicast_exchange.cuh"
#include "multicast_backward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given_args) {
#if LOW_REGISTER
    const BackwardArgs& args = given_args;
#else
    const BackwardArgs args = given_args;  // read once: loads at each use cost the loop more
#endif
    const Place here(args.first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const int count = begin_block(args, here, rows);
    const Exchange exchange(args, here);
    const Time time(args, count);
    run_warps(here, exchange, count, [&] { multiply(args, here, time); },
              [&] { compute(args, here, exchange, time, rows); });
}
