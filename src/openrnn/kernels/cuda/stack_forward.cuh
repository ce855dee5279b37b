// The forward time loops of a stack, each layer in clusters of its own, one launch for all.
//
// y of a layer, or where units are padded a copy, is a flag buffer: the layer above polls it.
// Each cluster reads y of the rows that it has. A layer waits for nothing but the one below, and
// all blocks are resident together, since the launch is cooperative. So all layers run at once,
// each a few steps behind the one below.

#include "forward.cuh"

constexpr int OPERAND_K = UNITS;
#include "stack_input.cuh"

// An input warp; lower: arguments of the layer below. It has the same rows of W_ih as its loop warp
// has of R, so its sums lie in the lanes that need them. In 16 bits they are rounded, as x_gates of
// layer 0 is.
INLINE void multiply_inputs(const ForwardArgs& args, const Place& here, const int* rows,
                            int count, const ForwardArgs& lower) {
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_INPUT_WEIGHTS, here.thread);
    if (here.layer > 0) load_weights<false>(args.w_ih, here, matrix, others);
    const RingBarriers ring_barriers(here, shared_address(shared) + AT_RING_BARRIERS, true);
    unsigned char* const ring = shared + AT_RING + here.warp * RING_BYTES + here.lane * 2 * SIZE;
    const int operand = operand_start(here.thread_in_group, here.group_of_lane);
    const Time time(args, count);
#if PADDED
    const storage_t* const y = reinterpret_cast<const storage_t*>(lower.flag_buffer);
    const int y_row = UNITS;
    const int64 y_step_bytes = time.direction * args.batch * (UNITS * SIZE);
#else
    const storage_t* const y = lower.y;
    const int y_row = int(args.y_row);
    const int64 y_step_bytes = args.y_step_bytes;
#endif
    Polls polls(here, advanced(y, time.to_first * y_step_bytes), y_step_bytes, y_row, rows);
    const auto multiply = [&](int i, const unsigned char* hidden) {  // step i, to the ring buffer
        if (here.idle()) return;
        Sums sums = {};
        product(sums, matrix, others, hidden + operand);
        ring_barriers.await_stage(i);
        #pragma unroll
        for (int half = 0; half < GROUPS_OF_WARP * GATES; ++half)
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                const int place = ((half / GATES * TILES + n) * GATES + half % GATES) * GATE_BYTES;
                store(reinterpret_cast<storage_t*>(ring + i % STAGES * STAGE_BYTES + place),
                      transposed(chained(sums, half / 2, n, half % 2 * 2),
                                 chained(sums, half / 2, n, half % 2 * 2 + 1)));
            }
        ring_barriers.fill(i);
    };
    blocks_barrier();
    if (here.layer > 0)
        run_input_warp<2, HIDDEN_BYTES>(here, polls, count, shared + AT_BELOW, multiply);
}
