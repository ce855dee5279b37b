// The setup of the forward loop: where a thread stands, its cells, inputs, addresses, R.

// Where a thread stands.
struct Place {
    int thread, lane, warp, group_of_lane, thread_in_group, block;
    int layer;                   // of a stack
    int first_group, end_group;  // of the warp, of the block
    int64 first_row;

    // In a stack an input warp has the place of the loop warp that it serves.
    INLINE explicit Place(int64 first_row_of_launch) {
        thread = keep_in_register(LAYERS > 1 ? threadIdx.x % THREADS : threadIdx.x);
        lane = thread & 31, warp = thread >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        first_group = first_group_of(block) + warp * GROUPS_OF_WARP;
        end_group = first_group_of(block + 1);
        layer = layer_of_block();
        first_row = cluster_of_layer(first_row_of_launch, TILES_IN_FLIGHT * ROWS) *
                    (TILES_IN_FLIGHT * ROWS);
    }
    // a warp without units: nobody waits for it
    INLINE bool idle() const { return CLUSTER > 1 && !WGMMA && first_group >= end_group; }
    INLINE int unit(int j) const { return (first_group + j) * 8 + group_of_lane; }
    INLINE int pair_unit(int j) const { return (first_group + j) * 8 + thread_in_group * 2; }
    // the numbers of a unit's two rows in tile n
    INLINE int pair_rows(int f, int n) const { return f * ROWS + n * 8 + thread_in_group * 2; }
};

// A state before the first step: that of the time chunk before, the initial one or the reset one.
INLINE float first_state(const ForwardArgs& args, int count, int k, int64 b, int64 unit) {
    const int64 at = b * args.hidden + unit;
    const bool is_reset = starts_reset(args, count, b);
    if (args.chunk_in && !is_reset) return args.chunk_in[k * args.batch * args.hidden + at];
    const storage_t* source = is_reset ? args.reset_state[k] : args.initial[k];
    return source ? widen(source[at]) : 0.0f;
}

// The cells of a warp: constants of its units and the states of two rows of each. Those of grids,
// by slots, are in grid_forward_parts.cuh.
struct Cells {
    UnitConstants units[GROUPS_OF_WARP];
    float state[TILES_IN_FLIGHT][GROUPS_OF_WARP][TILES][2][STATES];

    INLINE void load(const ForwardArgs& args, const Place& here, const int* rows, int count) {
        #pragma unroll
        for (int j = 0; j < GROUPS_OF_WARP; ++j)
            units[j].load(args, here.unit(j), here.unit(j) < args.hidden);
        #pragma unroll
        for (int f = 0; f < TILES_IN_FLIGHT; ++f)
            #pragma unroll
            for (int j = 0; j < GROUPS_OF_WARP; ++j)
                #pragma unroll
                for (int n = 0; n < TILES; ++n)
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int b = rows[here.pair_rows(f, n) + c], unit = here.unit(j);
                        const bool inside = b >= 0 && unit < args.hidden;
                        #pragma unroll
                        for (int k = 0; k < STATES; ++k)
                            state[f][j][n][c][k] =
                                inside ? first_state(args, count, k, b, unit) : 0.0f;
                    }
    }
};

// What a warp's copies into its ring buffer have in common.
struct Ring {
    uint32 target, shared;  // shared-memory addresses: of the lane's part of the ring; of all
    int reset_at;           // offset of the lane's resets of the first entry
    int later;              // 1: resets after step i are those of step i + 1, 0 (reverse): of i
    int steps;              // that the warp takes
};

// A warp's ring buffer of inputs, [group, tile, gate, row, 8 units]: it copies what its own lanes
// read, STAGES - 1 steps ahead.
struct Inputs {
    const storage_t* source[TILES_IN_FLIGHT][COPIES];
    int steps[TILES_IN_FLIGHT][COPIES];  // in which there is something to copy

    INLINE void begin(const ForwardArgs& args, const Place& here, const Time& time,
                      const int* rows) {
        #pragma unroll
        for (int f = 0; f < TILES_IN_FLIGHT; ++f)
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const int number = copy * 32 + here.lane, pieces = GATE_BYTES / 16;
                const int line = number * PIECE / 8 % 8, unit = number * PIECE % 8;
                const int gate = number / pieces % GATES, n = number / pieces / GATES % TILES;
                const int j = number / pieces / GATES / TILES;
                const int b = rows[f * ROWS + n * 8 + line];
                const int group = here.first_group + j;
                steps[f][copy] =
                    b >= 0 && j < GROUPS_OF_WARP && group < here.end_group ? time.count : 0;
                source[f][copy] = steps[f][copy]
                    ? advanced(args.x, time.to_first * args.x_step_bytes) + b * args.x_row +
                          gate * args.x_gate + group * 8 + unit
                    : args.x;
            }
    }
    // step i of product f, into a stage
    INLINE void copy(const ForwardArgs& args, const Place& here, const Time& time, Ring ring,
                     Resets (&resets)[TILES_IN_FLIGHT][TILES], int i, int stage, int f) {
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            if (copy * 512 + here.lane * 16 < INPUT_BYTES && here.layer == 0)
                copy_async<16>(ring.target + stage + f * ENTRY_BYTES + copy * 512, source[f][copy],
                               i < steps[f][copy] ? 16 : 0);
            source[f][copy] = advanced(source[f][copy], args.x_step_bytes);
        }
        #pragma unroll
        for (int n = 0; RESET && n < TILES; ++n)
            resets[f][n].copy(
                ring.shared + ring.reset_at + stage + f * ENTRY_BYTES + n * RESET_BYTES,
                here.thread_in_group, time.direction, args.reset_step_bytes,
                i + ring.later < ring.steps);
        commit_copies();
    }
    // the first STAGES - 1 steps
    INLINE void fill(const ForwardArgs& args, const Place& here, const Time& time, Ring ring,
                     Resets (&resets)[TILES_IN_FLIGHT][TILES]) {
        #pragma unroll
        for (int s = 0; s < STAGES - 1; ++s)
            #pragma unroll
            for (int f = 0; f < TILES_IN_FLIGHT; ++f)
                copy(args, here, time, ring, resets, s, s * STAGE_BYTES, f);
    }
};

// The rows that a lane stores: their lengths, resets and places in y.
INLINE void begin_rows(const ForwardArgs& args, const Place& here, const int* rows,
                       const Time& time, int later, int (&row)[TILES_IN_FLIGHT][TILES],
                       int (&length)[TILES_IN_FLIGHT][TILES],
                       Resets (&resets)[TILES_IN_FLIGHT][TILES],
                       storage_t* (&y)[TILES_IN_FLIGHT][TILES]) {
    #pragma unroll
    for (int f = 0; f < TILES_IN_FLIGHT; ++f)
        #pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int b = rows[f * ROWS + n * 8 + here.group_of_lane];
            row[f][n] = b;
            if (LENGTHS) length[f][n] = b < 0 ? 0 : int(args.lengths[b]);
            if (RESET)
                resets[f][n].begin(args.reset, args.batch, b, time.first + later, length[f][n]);
            y[f][n] = advanced(args.y, time.to_first * args.y_step_bytes) + b * args.y_row +
                      here.pair_unit(0);
        }
}

// Where this lane's saved activations of the first step are: of product 0, tile 0 and the first
// group.
INLINE storage_t* first_saved(const ForwardArgs& args, const Place& here, const Time& time) {
    return advanced(args.saved, time.to_first * args.saved_step_bytes) +
           here.first_row / 8 * TILE_SAVED + here.first_group * (64 * SAVED) +
           saved_offset(here.lane);
}

// Where a lane's h of group j goes: the sum of its offsets in both buffers of h. They change roles
// each step, so that the offset to write is this sum less what belongs to the buffer that is read.
INLINE int hidden_sum(const Place& here, int j) {
    const int group = here.first_group + j;
    const int piece = SHORT ? group : group * 2 + (here.thread_in_group >> 1);
    return keep_in_register(2 * AT_HIDDEN + HIDDEN_BYTES +
                            operand_offset(piece, 0, here.group_of_lane));
}

// The shared memory of the blocks that a lane sends h to, lanes with the same piece to different
// ones; then all blocks are set up.
INLINE void begin_exchange(const Place& here, uint32 mbarriers, uint32 (&peers)[SENDS]) {
#if CLUSTER > 1
    #pragma unroll
    for (int i = 0; i < SENDS; ++i) {
        const int other = (here.lane % PIECE_LANES) + i * PIECE_LANES + here.block;
        peers[i] = keep_in_register(remote(mbarriers, other % CLUSTER));
    }
#endif
    blocks_barrier();
}

// R, or another matrix of its shape, as the A operand of this warp.
template <bool HALVES = true>
INLINE void load_weights(const storage_t* weights, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    load_matrix(matrix, others, [&](int number, int s) {
        const int j = number / GATES, group = here.first_group + j;
        const int k = s * K_TILE + here.thread_in_group * PIECE_K;
        uint4 found = {};
        if (j < GROUPS_OF_WARP && group < here.end_group && k < UNITS)
            found = piece_of<HALVES>(weights, number % GATES, group * 8 + here.group_of_lane, k);
        return found;
    });
}
