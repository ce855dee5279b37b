// The setup of the backward loop: where a thread stands, its cells, inputs, addresses, R.

// One of a block's groups in a tile: two cells a lane.
struct Slot {
    int group, tile;
    bool owned;

    INLINE Slot(int number, int groups) {
        group = number / TILES, tile = number % TILES, owned = group < groups;
    }
};

// Where a thread stands.
struct Place {
    int thread, lane, warp, group_of_lane, thread_in_group, block;
    int layer;                // of a stack
    int first_group, groups;  // of the block
    int64 cluster, first_row;  // cluster: of those of a layer

    // In a stack an input warp has the place of the loop warp that it serves.
    INLINE explicit Place(int64 first_row_of_launch) {
        thread = keep_in_register(LAYERS > 1 ? threadIdx.x % THREADS : threadIdx.x);
        lane = thread & 31, warp = thread >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        layer = layer_of_block();
        cluster = cluster_of_layer(first_row_of_launch, TILES_IN_FLIGHT * ROWS);
        first_row = cluster * (TILES_IN_FLIGHT * ROWS);
        first_group = first_group_of(block), groups = first_group_of(block + 1) - first_group;
    }
    INLINE Slot slot(int s) const { return Slot(warp * SLOTS + s, groups); }
    INLINE int unit(const Slot& slot) const {
        return (first_group + slot.group) * 8 + group_of_lane;
    }
    // bytes of the shares of dh that a block receives in a step
    INLINE int message_bytes() const { return groups * 256 * TILES * CLUSTER; }
};

// The cells of a warp: gradients of their states, and sums over steps. Those of grids and with
// multicast, which have no products in flight, are in backward_slots.cuh.
struct Cells {
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[TILES_IN_FLIGHT][SLOTS][2][STATES];
    float d_reset[TILES_IN_FLIGHT][SLOTS][2][RESET_STATE ? STATES : 1];

    INLINE void load(const BackwardArgs& args, const Place& here, const int* rows) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            const int unit = here.unit(slot);
            const bool inside = slot.owned && unit < args.hidden;
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                vector[s][v] = inside ? widen(args.vectors[v * args.hidden + unit]) : 0.0f;
            #pragma unroll
            for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
            #pragma unroll
            for (int f = 0; f < TILES_IN_FLIGHT; ++f)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[f * ROWS + slot.tile * 8 + here.thread_in_group * 2 + c];
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k) {
                        const int64 at = int64(b) * args.hidden + unit;
                        d_state[f][s][c][k] = !inside || b < 0 ? 0.0f
                            : final_gradient(args, k, args.batch * args.hidden, at);
                        if (RESET_STATE) d_reset[f][s][c][k] = 0.0f;
                    }
                }
        }
    }
};

// What a warp's copies into its ring buffer have in common.
struct Ring {
    uint32 target;            // the shared-memory address of the warp's ring
    int dy_offset, reset_at;  // of what a lane copies, in an entry
    int later;                // 1: resets after step i are those of step i - 1, 0 (reverse): of i
};

// A warp's ring buffer of inputs: dy, saved activations and resets of its slots, copied STAGES - 1
// steps ahead. That of grids is in grid_backward_inputs.cuh.
struct Inputs {
    const storage_t *dy[TILES_IN_FLIGHT][SLOTS], *saved[TILES_IN_FLIGHT][SLOTS];
    bool has_dy[TILES_IN_FLIGHT][SLOTS], has_saved[TILES_IN_FLIGHT][SLOTS];

    // the sources of slot s of product f; tiles: of 8 rows, in the batch
    INLINE void find(const BackwardArgs& args, const Place& here, const Time& time, int64 tiles,
                     const int* tile_rows, const Slot& slot, int f, int s) {
        const int group = here.first_group + slot.group;
        // a lane copies 16 bytes of dy: [row, 8 units]
        const int line = here.lane * PIECE / 8, unit = group * 8 + here.lane * PIECE % 8;
        const int b = slot.owned && here.lane * 16 < DY_BYTES ? tile_rows[line] : -1;
        has_dy[f][s] = args.dy && b >= 0;
        dy[f][s] = has_dy[f][s]
            ? advanced(args.dy, time.to_first * args.dy_step_bytes) + b * args.dy_row + unit
            : args.weight;
        const int64 tile = here.first_row / 8 + f * TILES + slot.tile;
        has_saved[f][s] = slot.owned && tile < tiles;
        saved[f][s] = has_saved[f][s]
            ? advanced(args.saved, time.to_first * args.saved_step_bytes) +
                  (tile * GROUPS + group) * (64 * SAVED) + saved_offset(here.lane)
            : args.weight;
    }
    // step i of product f, into a stage
    INLINE void copy(const BackwardArgs& args, const Place& here, const Time& time, Ring ring,
                     const SavedPlace& place, Resets (&resets)[TILES_IN_FLIGHT][SLOTS], int i,
                     int stage, int f) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = ring.target + stage + (f * SLOTS + s) * ENTRY_BYTES;
            if (here.lane * 16 < DY_BYTES && here.layer == LAYERS - 1)
                copy_async<16>(target + ring.dy_offset, dy[f][s],
                               i < time.count && has_dy[f][s] ? 16 : 0);
            copy_saved_async(target + DY_BYTES, saved[f][s], place,
                             i < time.count && has_saved[f][s]);
            if (RESET)
                resets[f][s].copy(target + ring.reset_at, here.thread_in_group, time.direction,
                                  args.reset_step_bytes,
                                  i < time.count && (i > 0 || !ring.later));
            dy[f][s] = advanced(dy[f][s], args.dy_step_bytes);
            saved[f][s] = advanced(saved[f][s], args.saved_step_bytes);
        }
        commit_copies();
    }
    // the first STAGES - 1 steps
    INLINE void fill(const BackwardArgs& args, const Place& here, const Time& time, Ring ring,
                     const SavedPlace& place, Resets (&resets)[TILES_IN_FLIGHT][SLOTS]) {
        #pragma unroll
        for (int s = 0; s < STAGES - 1; ++s)
            #pragma unroll
            for (int f = 0; f < TILES_IN_FLIGHT; ++f)
                copy(args, here, time, ring, place, resets, s, s * STAGE_BYTES, f);
    }
};

// Where a lane stores the gate gradients of row `row` of a slot, in the loop's first step.
INLINE storage_t* first_gates(const BackwardArgs& args, const Place& here, const Time& time,
                              const Slot& slot, int row) {
    return advanced(args.d_gates, time.to_first * args.d_gates_step_bytes) +
           int64(row) * (PLANES * UNITS) + (here.first_group + slot.group) * 8 +
           here.thread_in_group * 2;
}

// Offset of a lane's gate gradients of a slot in the operand of the block's product.
INLINE int gates_offset(const Place& here, const Slot& slot, int gate) {
    const int k = gate * UNITS_OF_BLOCK + slot.group * 8 + here.thread_in_group * 2;
    return AT_GATES + operand_offset(k / PIECE_K, slot.tile, here.group_of_lane) +
           k % PIECE_K * sizeof(operand_t);
}

// What a lane stores of its slots, where their rows end, and where their inputs come from.
INLINE void begin_slots(const BackwardArgs& args, const Place& here, const int* rows,
                        const Time& time, int64 tiles, int later, Inputs& inputs,
                        storage_t* (&d_gates)[TILES_IN_FLIGHT][SLOTS],
                        bool (&has_row)[TILES_IN_FLIGHT][SLOTS],
                        int (&length)[TILES_IN_FLIGHT][SLOTS][2],
                        Resets (&resets)[TILES_IN_FLIGHT][SLOTS]) {
    #pragma unroll
    for (int f = 0; f < TILES_IN_FLIGHT; ++f)
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            const int* const tile_rows = rows + f * ROWS + slot.tile * 8;
            inputs.find(args, here, time, tiles, tile_rows, slot, f, s);
            const int b = slot.owned ? tile_rows[here.group_of_lane] : -1;
            has_row[f][s] = b >= 0;
            d_gates[f][s] = first_gates(args, here, time, slot, b);
            #pragma unroll
            for (int c = 0; c < 2; ++c)  // padding stays 0
                length[f][s][c] = slot.owned && here.unit(slot) < args.hidden
                    ? time.length(args, tile_rows[here.thread_in_group * 2 + c]) : 0;
            if (RESET)
                resets[f][s].begin(args.reset, args.batch, b, time.first + later,
                                   time.length(args, b));
        }
}

// Offsets that each step uses, computed once: with few rows a step takes as long as its
// instructions. own_shares: of the slots' shares of dh; own_gates: of their gate gradients;
// share_at: of this block's share for each half of 16 units, in the block that owns the half.
INLINE void find_offsets(const Place& here, uint32 mbarriers, int (&own_shares)[SLOTS],
                         int (&own_gates)[SLOTS][GATES], int (&share_at)[MMA_ROWS][2],
                         uint32 (&owners)[MMA_ROWS][2]) {
    #pragma unroll
    for (int s = 0; s < SLOTS; ++s) {
        const Slot slot = here.slot(s);
        own_shares[s] = keep_in_register((slot.tile * GROUPS_OF_BLOCK + slot.group) * 256 +
                                         here.group_of_lane * 32 + here.thread_in_group * 8);
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const int offset = gates_offset(here, slot, gate);
            // where the swizzle repeats from gate to gate, one address is enough
            const bool same = UNITS_OF_BLOCK / PIECE_K % 4 == 0 && gate > 0;
            own_gates[s][gate] = same
                ? own_gates[s][0] + gate * (UNITS_OF_BLOCK / PIECE_K) * PIECE_BYTES
                : keep_in_register(offset);
        }
    }
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int group = min((here.warp * MMA_ROWS + m) * 2 + half, GROUPS - 1);
            const int owner = owner_of(group), its = group - first_group_of(owner);
            share_at[m][half] = keep_in_register(
                AT_SHARES + (here.block * TILES * GROUPS_OF_BLOCK + its) * 256 +
                here.group_of_lane * 32 + here.thread_in_group * 8);
#if CLUSTER > 1
            owners[m][half] = keep_in_register(remote(mbarriers, owner));
#endif
        }
}

// R^T as A operand: rows are units of the whole layer, K is this block's gates.
INLINE void load_weights(const BackwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    load_matrix(matrix, others, [&](int number, int s) {
        const int group = here.warp * MMA_ROWS * 2 + number;
        const int k = s * K_TILE + here.thread_in_group * PIECE_K;
        const int gate = k / UNITS_OF_BLOCK, unit = here.first_group * 8 + k % UNITS_OF_BLOCK;
        uint4 found = {};
        if (group < GROUPS && gate < GATES && k % UNITS_OF_BLOCK < here.groups * 8)
            found = *reinterpret_cast<const uint4*>(
                args.weight +
                (int64(group * 8 + here.group_of_lane) * GATES + gate) * UNITS + unit);
        return found;
    });
}
