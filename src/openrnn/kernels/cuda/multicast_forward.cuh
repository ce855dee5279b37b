// The forward time loop of one layer and direction for large batches: what blocks multiply is h.

#define K UNITS
#define SUMS GATES
#define K_PARTS 1
#include "multicast.cuh"
#include "forward_cell.cuh"

constexpr int COPIES = (SLOT_BYTES / 16 + 31) / 32;
constexpr int GATE_BYTES = 64 * SIZE;
static_assert(SCALED == 0, "sums are halved in the step");

// The flag buffer: counters [sets, HALVES, 128 bytes], filled with ones, then h [sets, 2 (of even
// and of odd steps), UNITS / 8, TILES, 8 rows, 8 units].
struct Exchange {
    unsigned char* counters;  // of the block's first set
    unsigned char* operand;   // of the same

    INLINE Exchange(const ForwardArgs& args, const Place& here) {
        const int64 sets = (args.batch + ROWS - 1) / ROWS * SETS, set = here.first_row / SET_ROWS;
        unsigned char* const begin = reinterpret_cast<unsigned char*>(args.flag_buffer);
        counters = begin + set * COUNTER_BYTES;
        operand = begin + sets * COUNTER_BYTES + set * (2 * STEP_BYTES);
    }
    INLINE int* counter(int set, int half) const {  // how often blocks of a half have published
        return reinterpret_cast<int*>(counters + set * COUNTER_BYTES + half * 128);
    }
    INLINE unsigned char* operand_of(int set, int step) const {
        return operand + (set * 2 + (step & 1)) * STEP_BYTES;
    }
};

#include "multicast_exchange.cuh"
#include "multicast_forward_parts.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ ForwardArgs given_args) {
#if LOW_REGISTER
    const ForwardArgs& args = given_args;
#else
    const ForwardArgs args = given_args;  // read once: loads at each use cost the loop more
#endif
    const Place here(args.first_row);
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    const int count = begin_block(args, here, rows);
    const Exchange exchange(args, here);
    const Time time(args, count);
    run_warps(here, exchange, count, [&] { multiply(args, here, time); },
              [&] { compute(args, here, exchange, time, rows); });
}
