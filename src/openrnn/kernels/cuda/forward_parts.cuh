// What the forward loop of a cluster is made of: the parts of a warp's state, each with its setup.

// Where a thread stands.
struct Place {
    int thread, lane, warp, group_of_lane, thread_in_group, block;
    int first_group, end_group;  // of the warp, of the block
    int64 first_row;

    INLINE Place() {
        thread = pin(threadIdx.x), lane = thread & 31, warp = thread >> 5;
        group_of_lane = lane >> 2, thread_in_group = lane & 3;
        block = cluster_rank();
        first_group = first_group_of(block) + warp * PER_WARP;
        end_group = first_group_of(block + 1);
        first_row = int64(blockIdx.x / CLUSTER) * (FLIGHT * ROWS);
    }
    INLINE int unit(int j) const { return (first_group + j) * 8 + group_of_lane; }
    INLINE int pair_unit(int j) const { return (first_group + j) * 8 + thread_in_group * 2; }
    // the numbers of a unit's two rows in tile n
    INLINE int pair_rows(int f, int n) const { return f * ROWS + n * 8 + thread_in_group * 2; }
};

// The first h of all rows into the buffer that step 0 reads.
INLINE void store_first_hidden(const ForwardArgs& args, const int* rows, int count,
                               unsigned char* shared) {
    for (int at = threadIdx.x; at < FLIGHT * ROWS * UNITS; at += THREADS) {
        const int r = at / UNITS, unit = at % UNITS, b = rows[r];
        if (b < 0 || unit >= args.units) continue;
        unsigned char* chunk = shared + AT_HIDDEN + r / ROWS * 2 * HIDDEN_BYTES +
                               operand_offset(unit / CHUNK_K, r % ROWS / 8, r % 8);
        reinterpret_cast<operand_t*>(chunk)[unit % CHUNK_K] =
            operand_of(narrow(first_state(args, count, 0, b, unit)));
    }
}

// The cells of a warp: constants of its units and the states of two rows of each.
struct Cells {
    UnitConstants units[PER_WARP];
    float state[FLIGHT][PER_WARP][TILES][2][STATES];

    INLINE void load(const ForwardArgs& args, const Place& here, const int* rows, int count) {
        #pragma unroll
        for (int j = 0; j < PER_WARP; ++j)
            units[j].load(args, here.unit(j), here.unit(j) < args.units);
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int j = 0; j < PER_WARP; ++j)
                #pragma unroll
                for (int n = 0; n < TILES; ++n)
                    #pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int b = rows[here.pair_rows(f, n) + c], unit = here.unit(j);
                        #pragma unroll
                        for (int k = 0; k < STATES; ++k)
                            state[f][j][n][c][k] = b >= 0 && unit < args.units
                                ? first_state(args, count, k, b, unit) : 0.0f;
                    }
    }
};

// What a lane stores: y of its own row of each tile, and saved activations. Both move with time.
struct Outputs {
    int row[FLIGHT][TILES], length[FLIGHT][TILES];
    storage_t *y[FLIGHT][TILES], *saved;
    SavedPlace saved_place;
    RowBits bits;

    INLINE Outputs(const ForwardArgs& args, const Place& here, const Time& time, const int* rows,
                   Resets (&resets)[FLIGHT][TILES]) : row{}, length{}, saved_place(here.lane) {
        bits.pair[0] = uint32(pin(1 << here.thread_in_group * 8));
        bits.pair[1] = uint32(pin(1 << (here.thread_in_group * 8 + 4)));
        bits.own = pin_if_room(1u << here.group_of_lane * 4);
        // resets that count after a step are those of the next one, in reverse its own
        const int later = args.reverse ? 0 : 1;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                row[f][n] = rows[f * ROWS + n * 8 + here.group_of_lane];
                if (LENGTHS) length[f][n] = row[f][n] < 0 ? 0 : int(args.lengths[row[f][n]]);
                if (RESET)
                    resets[f][n].begin(args.reset, args.batch, row[f][n], time.first + later,
                                       length[f][n]);
                y[f][n] = advanced(args.y, time.moved * args.y_step_bytes) +
                          row[f][n] * args.y_row + here.pair_unit(0);
            }
        saved = advanced(args.saved, time.moved * args.saved_step_bytes) +
                here.first_row / 8 * TILE_SAVED + here.first_group * (64 * SAVED) +
                saved_offset(here.lane);
    }
};

// A warp's ring buffer of inputs, [group, tile, gate, row, 8 units]: it copies what its own lanes
// read, STAGES - 1 steps ahead.
struct Inputs {
    const storage_t* source[FLIGHT][COPIES];
    int steps[FLIGHT][COPIES];  // in which there is something to copy
    Resets resets[FLIGHT][TILES];
    int base, stage, spare;     // the ring; this step's stage; the last one's, to be filled again
    int reset_at, later;
    uint32 target, reset_turn;

    INLINE void begin(const ForwardArgs& args, const Place& here, const Time& time,
                      const int* rows, unsigned char* shared) {
        base = AT_RING + here.warp * RING_BYTES, stage = 0, spare = RING_BYTES - STAGE_BYTES;
        later = args.reverse ? 0 : 1;
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            #pragma unroll
            for (int copy = 0; copy < COPIES; ++copy) {
                const int number = copy * 32 + here.lane, chunks = GATE_BYTES / 16;
                const int line = number * CHUNK / 8 % 8, unit = number * CHUNK % 8;
                const int gate = number / chunks % GATES, n = number / chunks / GATES % TILES;
                const int j = number / chunks / GATES / TILES;
                const int b = rows[f * ROWS + n * 8 + line];
                const bool owned = j < PER_WARP && here.first_group + j < here.end_group;
                steps[f][copy] = b >= 0 && owned ? time.count : 0;
                source[f][copy] = steps[f][copy]
                    ? advanced(args.x, time.moved * args.x_step_bytes) + b * args.x_row +
                          gate * args.x_gate + (here.first_group + j) * 8 + unit
                    : args.x;
            }
        target = pin_if_room(shared_address(shared + base + here.lane * 16));
        reset_at = pin_if_room(base + INPUT_BYTES + reset_offset(here.lane));
        reset_turn = uint32(args.reset_step_bytes) * 8;
    }
    // step i of turn f, into a stage; turns: steps that this warp takes
    INLINE void copy(const ForwardArgs& args, const Place& here, const Time& time, int turns,
                     uint32 shared, int i, int into, int f) {
        #pragma unroll
        for (int copy = 0; copy < COPIES; ++copy) {
            if (copy * 512 + here.lane * 16 < INPUT_BYTES)
                copy_async<16>(target + into + f * ENTRY_BYTES + copy * 512, source[f][copy],
                               i < steps[f][copy] ? 16 : 0);
            source[f][copy] = advanced(source[f][copy], args.x_step_bytes);
        }
        #pragma unroll
        for (int n = 0; RESET && n < TILES; ++n)
            resets[f][n].copy(shared + reset_at + into + f * ENTRY_BYTES + n * RESET_BYTES,
                              here.thread_in_group, time.way, args.reset_step_bytes,
                              i + later < turns);
        commit_copies();
    }
    INLINE void advance() {
        spare = stage, stage = stage + STAGE_BYTES == RING_BYTES ? 0 : stage + STAGE_BYTES;
    }
};

// How h reaches the next step: through the shared memory of all blocks of the cluster. The two
// buffers of h change places; `write_at` is the sum of a place in both, less what is read.
struct Exchange {
    int read_at, write_at[PER_WARP];
    int read_mbarrier;  // offset of that of the buffer that is read
    // Of that mbarrier. Phase 1 of the first one counts as over before it is opened, so that step 0
    // waits for nothing and then opens it: nobody sends there before all of this block's step 0.
    uint32 phase;
    uint32 mbarriers;
#if CLUSTER > 1
    static constexpr int SENDS = (CLUSTER + CHUNK_LANES - 1) / CHUNK_LANES;
    uint32 peers[SENDS];  // lanes with the same chunk send it to different blocks
#endif

    INLINE void begin(const Place& here) {
        #pragma unroll
        for (int j = 0; j < PER_WARP; ++j) {
            const int group = here.first_group + j;
            const int chunk = SHORT ? group : group * 2 + (here.thread_in_group >> 1);
            write_at[j] = pin(2 * AT_HIDDEN + HIDDEN_BYTES +
                              operand_offset(chunk, 0, here.group_of_lane));
        }
        read_at = AT_HIDDEN, read_mbarrier = 0, phase = 1;
#if CLUSTER > 1
        #pragma unroll
        for (int i = 0; i < SENDS; ++i) {
            const int other = here.lane % CHUNK_LANES + i * CHUNK_LANES + here.block;
            peers[i] = pin(remote(mbarriers, other % CLUSTER));
        }
        cluster_barrier();
#else
        __syncthreads();
#endif
    }
    // until h of this step is here
    INLINE void wait(const Place& here, int f) const {
#if CLUSTER > 1
        mbarrier_wait(mbarriers + f * 16 + read_mbarrier, phase);
        if (here.thread == 0) mbarrier_expect(mbarriers + f * 16 + read_mbarrier, MESSAGE_BYTES);
        if (UNEVEN) warpgroup_barrier(here.warp >> 2);
#endif
    }
    // h of group j in tile n; `owned`: there is such a group; last: no step follows
    INLINE void send(const Place& here, unsigned char* shared, int f, int j, int n,
                     Message message, bool owned, bool last) const {
        const int there = write_at[j] - read_at + f * (2 * HIDDEN_BYTES) + n * 128;
#if CLUSTER > 1
        const uint4 chunk = gathered(message);
        if (owned && !last) {
            #pragma unroll
            for (int p = 0; p < SENDS; ++p)
                if (CLUSTER % CHUNK_LANES == 0 ||
                    here.lane % CHUNK_LANES + p * CHUNK_LANES < CLUSTER)
                    store_async(peers[p] + there, chunk, peers[p] + f * 16 + 8 - read_mbarrier);
        }
#else
        if (owned)
            store(reinterpret_cast<operand_t*>(shared + there) +
                      here.thread_in_group % CHUNK_LANES * 2, message);
#endif
    }
    INLINE void advance() {
#if CLUSTER == 1
        __syncthreads();
#endif
        read_at = 2 * AT_HIDDEN + HIDDEN_BYTES - read_at, read_mbarrier = 8 - read_mbarrier;
        phase ^= uint32(read_mbarrier) >> 3;
    }
};

// R as the A operand of this warp.
INLINE void load_weights(const ForwardArgs& args, const Place& here, Matrix& matrix,
                         unsigned char* others) {
    load_matrix(matrix, others, [&](int number, int s) {
        const int j = number / GATES, group = here.first_group + j;
        const int k = s * K_TILE + here.thread_in_group * CHUNK_K;
        uint4 found = {};
        if (j < PER_WARP && group < here.end_group && k < UNITS)
            found = chunk_of(args.weight, number % GATES, group * 8 + here.group_of_lane, k,
                             args.units);
        return found;
    });
}
