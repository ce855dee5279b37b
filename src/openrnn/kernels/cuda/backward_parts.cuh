// What the backward loop of a cluster is made of: parts of a block's state, each with its setup.

// Where a thread stands.
struct Place {
    int thread, lane, warp, group_of_lane, thread_in_group, block;
    int first_group, groups;  // of the block
    int64 cluster, first_row;

    INLINE Place() {
        thread = pin(threadIdx.x), lane = thread & 31, warp = thread >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        cluster = blockIdx.x / CLUSTER, first_row = cluster * (FLIGHT * ROWS);
        first_group = first_group_of(block), groups = first_group_of(block + 1) - first_group;
    }
    INLINE Slot slot(int s) const { return Slot(warp * SLOTS + s, groups); }
    INLINE int unit(const Slot& slot) const {
        return (first_group + slot.group) * 8 + group_of_lane;
    }
    // the numbers of a unit's two rows
    INLINE int pair_rows(int f, const Slot& slot) const {
        return f * ROWS + slot.tile * 8 + thread_in_group * 2;
    }
    INLINE int share_bytes() const { return groups * 256 * TILES * CLUSTER; }  // a step receives
};

// The cells of a warp: gradients of their states, and sums over steps.
struct Cells {
    float vector[SLOTS][VECTORS + 1], total[SLOTS][PLANES + VECTORS];
    float d_state[FLIGHT][SLOTS][2][STATES], d_reset[FLIGHT][SLOTS][2][FRESH ? STATES : 1];

    INLINE void load(const BackwardArgs& args, const Place& here, const int* rows) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            const int unit = here.unit(slot);
            const bool inside = slot.owned && unit < args.units;
            #pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                vector[s][v] = inside ? widen(args.vectors[v * args.units + unit]) : 0.0f;
            #pragma unroll
            for (int p = 0; p < PLANES + VECTORS; ++p) total[s][p] = 0.0f;
            #pragma unroll
            for (int f = 0; f < FLIGHT; ++f)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[here.pair_rows(f, slot) + c];
                    #pragma unroll
                    for (int k = 0; k < STATES; ++k) {
                        const int64 at = int64(b) * args.units + unit;
                        d_state[f][s][c][k] = !inside || b < 0 ? 0.0f
                            : final_gradient(args, k, args.batch * args.units, at);
                        if (FRESH) d_reset[f][s][c][k] = 0.0f;
                    }
                }
        }
    }
};

// A warp's ring buffer of inputs: dy, saved activations and resets of its slots, copied STAGES - 1
// steps ahead.
struct Inputs {
    const storage_t *dy[FLIGHT][SLOTS], *saved[FLIGHT][SLOTS];
    bool has_dy[FLIGHT][SLOTS], has_saved[FLIGHT][SLOTS];
    Resets resets[FLIGHT][SLOTS];  // of the row that this lane stores
    int base, stage, spare;        // the ring; this step's stage; the last one's, filled again
    int dy_offset, reset_at, later;
    uint32 target, reset_turn;

    // the sources of slot s in turn f
    INLINE void find(const BackwardArgs& args, const Place& here, const Time& time,
                     const int* tile_rows, const Slot& slot, int f, int s) {
        const int group = here.first_group + slot.group;
        // a lane copies 16 bytes of dy: [row, 8 units]
        const int line = here.lane * CHUNK / 8, unit = group * 8 + here.lane * CHUNK % 8;
        const int b = slot.owned && here.lane * 16 < DY_BYTES ? tile_rows[line] : -1;
        has_dy[f][s] = args.dy && b >= 0;
        dy[f][s] = has_dy[f][s]
            ? advanced(args.dy, time.moved * args.dy_step_bytes) + b * args.dy_row + unit
            : args.weight;
        const int64 tile = here.first_row / 8 + f * TILES + slot.tile;
        has_saved[f][s] = slot.owned && tile < (args.batch + 7) / 8;
        saved[f][s] = has_saved[f][s]
            ? advanced(args.saved, time.moved * args.saved_step_bytes) +
                  (tile * GROUPS + group) * (64 * SAVED) + saved_offset(here.lane)
            : args.weight;
    }
    INLINE void begin(const BackwardArgs& args, const Place& here, unsigned char* shared) {
        base = AT_RING + here.warp * RING_BYTES, stage = 0, spare = RING_BYTES - STAGE_BYTES;
        target = shared_address(shared + base);
        dy_offset = pin_if_room(here.lane * 16);
        reset_at = pin_if_room(SLOT_BYTES + reset_offset(here.lane));
        reset_turn = uint32(args.reset_step_bytes) * 8;
    }
    // step i of turn f, into a stage
    INLINE void copy(const BackwardArgs& args, const Place& here, const Time& time,
                     const SavedPlace& place, int i, int into, int f) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 there = target + into + (f * SLOTS + s) * ENTRY_BYTES;
            if (here.lane * 16 < DY_BYTES)
                copy_async<16>(there + dy_offset, dy[f][s],
                               i < time.count && has_dy[f][s] ? 16 : 0);
            copy_saved_async(there + DY_BYTES, saved[f][s], place,
                             i < time.count && has_saved[f][s]);
            if (RESET)
                resets[f][s].copy(there + reset_at, here.thread_in_group, time.way,
                                  args.reset_step_bytes, i < time.count && (i > 0 || !later));
            dy[f][s] = advanced(dy[f][s], args.dy_step_bytes);
            saved[f][s] = advanced(saved[f][s], args.saved_step_bytes);
        }
        commit_copies();
    }
};

// What a lane stores: gate gradients of its own row of each slot; and where rows end.
struct Outputs {
    storage_t* d_gates[FLIGHT][SLOTS];
    bool has_row[FLIGHT][SLOTS];
    int length[FLIGHT][SLOTS][2];  // of a unit's two rows; 0 for padding, whose gradients stay 0
    uint32 row_bits[2];            // of both in masks: bit 4r of row r
    SavedPlace place;

    INLINE Outputs(const BackwardArgs& args, const Place& here, const Time& time, const int* rows,
                   Inputs& inputs) : place(here.lane) {
        row_bits[0] = pin_if_room(1u << here.thread_in_group * 8);
        row_bits[1] = pin_if_room(1u << (here.thread_in_group * 8 + 4));
        // resets that count after a step are those of the next one, in reverse its own
        inputs.later = args.reverse ? 0 : 1;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s) {
                const Slot slot = here.slot(s);
                const int* const tile_rows = rows + f * ROWS + slot.tile * 8;
                inputs.find(args, here, time, tile_rows, slot, f, s);
                const int own = slot.owned ? tile_rows[here.group_of_lane] : -1;
                has_row[f][s] = own >= 0;
                d_gates[f][s] = advanced(args.d_gates, time.moved * args.d_gates_step_bytes) +
                                int64(own) * (PLANES * UNITS) +
                                (here.first_group + slot.group) * 8 + here.thread_in_group * 2;
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    length[f][s][c] = slot.owned && here.unit(slot) < args.units
                        ? time.length(args, tile_rows[here.thread_in_group * 2 + c]) : 0;
                if (RESET)
                    inputs.resets[f][s].begin(args.reset, args.batch, own,
                                              time.first + inputs.later, time.length(args, own));
            }
    }
    INLINE bool live(int f, int s, int c, int t) const {
        return (LENGTHS ? t : 0) < length[f][s][c];
    }
    INLINE void store_gates(const BackwardArgs& args, int f, int s, const Pair (&pairs)[PLANES]) {
        #pragma unroll
        for (int p = 0; p < PLANES; ++p)
            if (has_row[f][s]) store(d_gates[f][s] + p * UNITS, pairs[p]);
        d_gates[f][s] = advanced(d_gates[f][s], args.d_gates_step_bytes);
    }
};

// How shares of dh reach the owners of their units, in two buffers that change places, and gate
// gradients the block's own product. Offsets are computed once: with few rows a step takes as long
// as its instructions.
struct Exchange {
    int own_shares[SLOTS], own_gates[SLOTS][GATES];
    int share_at[MMA_ROWS][2];          // of each half of 16 units
    int write_buffer, write_mbarrier;   // offsets of what this step writes
    uint32 phase;                       // of the other buffer's mbarrier
    uint32 mbarriers;
#if CLUSTER > 1
    uint32 owners[MMA_ROWS][2];         // the shared memory of the block that owns the units
#endif

    INLINE void begin(const Place& here) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot = here.slot(s);
            own_shares[s] = pin((slot.tile * BLOCK_GROUPS + slot.group) * 256 +
                                here.group_of_lane * 32 + here.thread_in_group * 8);
            #pragma unroll
            for (int gate = 0; gate < GATES; ++gate) {
                const int k = gate * OWN + slot.group * 8 + here.thread_in_group * 2;
                const int place = AT_GATES +
                                  operand_offset(k / CHUNK_K, slot.tile, here.group_of_lane) +
                                  k % CHUNK_K * sizeof(operand_t);
                // where the swizzle repeats from gate to gate, one address is enough
                const bool same = OWN / CHUNK_K % 4 == 0 && gate > 0;
                own_gates[s][gate] = same
                    ? own_gates[s][0] + gate * (OWN / CHUNK_K) * CHUNK_BYTES : pin(place);
            }
        }
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int group = min((here.warp * MMA_ROWS + m) * 2 + half, GROUPS - 1);
                const int owner = owner_of(group), its = group - first_group_of(owner);
                share_at[m][half] =
                    pin(AT_SHARES + (here.block * TILES * BLOCK_GROUPS + its) * 256 +
                        here.group_of_lane * 32 + here.thread_in_group * 8);
#if CLUSTER > 1
                owners[m][half] = pin(remote(mbarriers, owner));
#endif
            }
        write_buffer = 0, write_mbarrier = 0, phase = 1;
#if CLUSTER > 1
        cluster_barrier();
#else
        __syncthreads();
#endif
    }
    // until all shares of the step before are here
    INLINE void wait(const Place& here, int f) const {
#if CLUSTER > 1
        // A step's gate gradients are written over those that the step before multiplied. Messages
        // say that their senders have read them, not that this block's other warps have; with two
        // turns the other turn's barrier says that. Here warps wait for messages anyway.
        if (FLIGHT == 1) __syncthreads();
        const uint32 mbarrier = mbarriers + f * 16 + (8 - write_mbarrier);
        mbarrier_wait(mbarrier, phase);
        if (here.thread == 0) mbarrier_expect(mbarrier, here.share_bytes());
#endif
    }
    // adds the shares in a buffer to dh
    INLINE void add(const Place& here, const unsigned char* shared, int f, int buffer,
                    Cells& cells) const {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            if (here.slot(s).owned)
                add_shares<CLUSTER, SHARE_BYTES>(
                    cells.d_state[f][s],
                    shared + AT_SHARES + f * (2 * SHARES_BYTES) + buffer + own_shares[s]);
    }
    INLINE void send(const Place& here, const Sums& sums, unsigned char* shared, int f) const {
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int group = (here.warp * MMA_ROWS + m) * 2 + half;
                if (WARPS * MMA_ROWS * 2 > GROUPS && group >= GROUPS) continue;
                #pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const float low = chained(sums, m, n, half * 2);
                    const float high = chained(sums, m, n, half * 2 + 1);
                    const int buffer = write_buffer + f * (2 * SHARES_BYTES);
                    const int there = share_at[m][half] + buffer + n * (BLOCK_GROUPS * 256);
#if CLUSTER > 1
                    store_async(owners[m][half] + there, low, high,
                                owners[m][half] + f * 16 + write_mbarrier);
#else
                    *reinterpret_cast<float2*>(shared + there) = make_float2(low, high);
#endif
                }
            }
    }
    INLINE void advance() {
        write_buffer = SHARES_BYTES - write_buffer, write_mbarrier = 8 - write_mbarrier;
        phase ^= uint32(write_mbarrier) >> 3;
    }
};

// R^T as A operand: rows are units of the whole layer, K is this block's gates.
INLINE void load_weights(const BackwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    load_matrix(matrix, others, [&](int number, int s) {
        const int group = here.warp * MMA_ROWS * 2 + number;
        const int k = s * K_TILE + here.thread_in_group * CHUNK_K;
        const int gate = k / OWN, unit = here.first_group * 8 + k % OWN;
        uint4 found = {};
        if (group < GROUPS && gate < GATES && k % OWN < here.groups * 8)
            found = *reinterpret_cast<const uint4*>(
                args.weight +
                (int64(group * 8 + here.group_of_lane) * GATES + gate) * UNITS + unit);
        return found;
    });
}
