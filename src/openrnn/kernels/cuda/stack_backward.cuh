// The backward time loops of a stack, each layer in clusters of its own, one launch for all.
//
// Gate gradients of a layer are a flag buffer: the layer below polls it. Each cluster reads those
// of the rows that it has, and multiplies them by its part of W_ih of the layer above. For the rest
// see stack_forward.cuh.

#include "backward.cuh"

constexpr int OPERAND_K = GATES * UNITS;  // the planes of the input side come first
#include "stack_input.cuh"

// The product of W_ih of the layer above: as that of R, but for its sizes.
namespace above {
constexpr int K_TILES = ABOVE_TILES, MMA_ROWS = ABOVE_ROWS;
#undef REGISTER_FRAGMENTS
#define REGISTER_FRAGMENTS INPUT_REGISTER_FRAGMENTS
#include "product.cuh"

// A warp's part of K of the rows of the block's units.
INLINE void load_weights(const BackwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    load_matrix(matrix, others, [&](int number, int s) {
        const int k = (here.warp * K_TILES + s) * K_TILE + here.thread_in_group * PIECE_K;
        uint4 found = {};
        if (number < here.groups && k < OPERAND_K)
            found = *reinterpret_cast<const uint4*>(
                args.w_above +
                int64((here.first_group + number) * 8 + here.group_of_lane) * OPERAND_K + k);
        return found;
    });
}

// Where a lane's two cells of a group and tile have the share of an input warp.
INLINE float2* share_of(const Place& here, int warp, int group, int tile) {
    return reinterpret_cast<float2*>(shared + AT_INPUT_SHARES + warp * SHARE_BYTES +
                                     (group * TILES + tile) * 256 + here.group_of_lane * 32 +
                                     here.thread_in_group * 8);
}

// A warp's share of dy of all of the block's units.
INLINE void store_shares(const Place& here, const Sums& sums) {
    #pragma unroll
    for (int group = 0; group < GROUPS_OF_BLOCK; ++group)
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            *share_of(here, here.warp, group, n) =
                make_float2(chained(sums, group / 2, n, group % 2 * 2),
                            chained(sums, group / 2, n, group % 2 * 2 + 1));
}
}  // namespace above

// An input warp; upper: arguments of the layer above. dy is W_ih^T times the gate gradients of that
// layer. Input warps share K; each adds the shares of all, always in their order, for the slots of
// its loop warp. In 16 bits dy is rounded, as that of the last layer is.
INLINE void multiply_inputs(const BackwardArgs& args, const Place& here, const int* rows,
                            const BackwardArgs& upper) {
    above::Matrix matrix;
    unsigned char* const others = above::matrix_of(shared + AT_INPUT_WEIGHTS, here.thread);
    const bool last = here.layer == LAYERS - 1;  // its dy is in memory
    if (!last) above::load_weights(args, here, matrix, others);
    const RingBarriers ring_barriers(here, shared_address(shared) + AT_RING_BARRIERS, true);
    unsigned char* const ring = shared + AT_RING + here.warp * RING_BYTES + here.lane * 2 * SIZE;
    const int operand = here.warp * (ABOVE_TILES * 4 * PIECE_BYTES) +
                        operand_start(here.thread_in_group, here.group_of_lane);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    const storage_t* const d_gates = upper.d_gates;
    Polls polls(here, advanced(d_gates, time.to_first * args.d_gates_step_bytes),
                args.d_gates_step_bytes, PLANES * UNITS, rows);
    const auto multiply = [&](int i, const unsigned char* gates) {  // step i, to the ring buffer
        above::Sums shares = {};
        above::product(shares, matrix, others, gates + operand);
        above::store_shares(here, shares);
        input_barrier();  // all shares are there, and the operand has been read
        ring_barriers.await_stage(i);
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            float dy[2] = {};
            if (slot.owned)
                #pragma unroll
                for (int warp = 0; warp < WARPS; ++warp) {
                    const float2 share = *above::share_of(here, warp, slot.group, slot.tile);
                    dy[0] += share.x, dy[1] += share.y;
                }
            store(reinterpret_cast<storage_t*>(ring + i % STAGES * STAGE_BYTES + s * ENTRY_BYTES),
                  transposed(dy[0], dy[1]));
        }
        ring_barriers.fill(i);
    };
    blocks_barrier();
    if (!last) run_input_warp<1, 0>(here, polls, time.count, shared + AT_ABOVE, multiply);
}
