// The backward time loop of one layer and direction in blocks or clusters that each own all of R.
//
// A block owns BLOCK_GROUPS groups of 8 units: their cells, and the columns of R^T that multiply
// their gate gradients. A slot is one of its groups in one tile of 8 rows. A step computes the gate
// gradients of the block's cells; they go to memory and, through shared memory, into the block's
// product, which is its share of dh of all units. A unit's owner adds the shares of all blocks, by
// pairs in the order of blocks, so that results are the same in every run.

#include "device.cuh"
#include "saved.cuh"
#include "backward_cell.cuh"
#include "resets.cuh"

constexpr int BLOCK_GROUPS = PER;
constexpr int GROUPS = UNITS / 8;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = TILES * 8;
constexpr int OWN = BLOCK_GROUPS * 8;                              // units of a block
constexpr int K_TILES = (GATES * OWN + K_TILE - 1) / K_TILE;
constexpr int MMA_ROWS = ((GROUPS + 1) / 2 + WARPS - 1) / WARPS;   // of 16 units, a warp
constexpr int SLOTS = (BLOCK_GROUPS * TILES + WARPS - 1) / WARPS;  // of a warp

// Whether gate gradients go to memory, and into sums, only after a step's shares of dh were sent:
// faster where a warp sends little, as where its product is small.
constexpr bool LATE = SHORT && SLOTS * FLIGHT == 1 && K_TILES * MMA_ROWS <= 16;

constexpr int DY_BYTES = 64 * SIZE;                                // dy of a slot
constexpr int OPERAND_BYTES = K_TILES * TILES * 512;               // gate gradients of a turn
constexpr int SHARE_BYTES = TILES * BLOCK_GROUPS * 256;            // dh from one block
constexpr int SHARES_BYTES = CLUSTER * SHARE_BYTES;                // and from all: one buffer

#include "product.cuh"

// shared memory, in bytes: mbarriers, numbers of rows, gate gradients, two buffers of shares of dh,
// ring of inputs, R
constexpr int AT_ROWS = FLIGHT * 2 * 8;
constexpr int AT_GATES = (AT_ROWS + FLIGHT * ROWS * 4 + 127) / 128 * 128;
constexpr int AT_SHARES = AT_GATES + FLIGHT * OPERAND_BYTES;
constexpr int AT_RING = AT_SHARES + FLIGHT * 2 * SHARES_BYTES;
constexpr int ENTRY_BYTES = SLOT_BYTES + RESET_BYTES;  // of the ring, a slot
constexpr int STAGE_BYTES = FLIGHT * SLOTS * ENTRY_BYTES;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;       // of a warp
constexpr int AT_WEIGHTS = AT_RING + WARPS * RING_BYTES;
constexpr int SHARED_BYTES = AT_WEIGHTS + WARPS * MATRIX_BYTES;
static_assert(SHARED_BYTES == SHARED_GIVEN, "codegen/tiles.py counts shared memory otherwise");
static_assert(CLUSTER == 1 || CLUSTER % 2 == 0, "shares are added by pairs");

// One of a block's groups in a tile: two cells a lane.
struct Slot {
    int group, tile;
    bool owned;

    INLINE Slot(int number, int groups) {
        group = number / TILES, tile = number % TILES, owned = group < groups;
    }
};

#include "backward_parts.cuh"

// The loop of one block: what its steps read and change.
struct Loop {
    const BackwardArgs& args;
    const Place& here;
    const Time& time;
    const int* rows;
    unsigned char* shared;
    Cells& cells;
    Inputs& inputs;
    Outputs& out;
    Exchange& exchange;
    const Matrix& matrix;
    unsigned char* others;
    int operand, fragment;  // offsets at which a lane reads gate gradients, and the ring

    // What a step needs before dh arrives: dy, the cells' factors, and the rows reset after it.
    INLINE void load_step(int f, float (&d_out)[SLOTS][2], float (&factor)[SLOTS][2][FACTORS + 1],
                          uint32 (&reset_rows)[SLOTS]) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const int place = inputs.stage + (f * SLOTS + s) * ENTRY_BYTES;
            const unsigned char* const entry = shared + inputs.base + place;
            float values[2][KEPT + 4];
            load_saved(entry + DY_BYTES, out.place, values);
            load_fragments<1>(shared + fragment + place, &d_out[s]);
            const bool resets =
                RESET && inputs.resets[f][s].test(entry + inputs.reset_at, inputs.reset_turn);
            find_factors(values, cells.vector[s], factor[s]);
            if (RESET) reset_rows[s] = __ballot_sync(~0u, resets);
        }
    }

    // The derivative of a slot's cells; their gate gradients go to the product of the block.
    INLINE void step_slot(int f, int s, int t, uint32 reset_rows, const float (&d_out)[2],
                          const float (&factor)[2][FACTORS + 1], float (&d_gate)[2][PLANES],
                          float (&d_vector)[2][VECTORS + 1], Pair (&pairs)[PLANES]) {
        const Slot slot = here.slot(s);
        const int unit = here.unit(slot);
        #pragma unroll
        for (int c = 0; c < 2; ++c) {
            float (&d_state)[STATES] = cells.d_state[f][s][c];
            if (RESET && reset_rows & out.row_bits[c])
                end_at_reset(d_state, cells.d_reset[f][s][c]);
            const bool live = out.live(f, s, c, t);
            const int64 b = rows[here.pair_rows(f, slot) + c];
            float found[PLANES];
            derive_cell(args, factor[c], d_state, d_out[c], live,
                        slot.owned && live && b >= 0 && unit < args.units,
                        (t * args.batch + b) * args.units + unit, d_gate[c], d_vector[c], found);
            if (!LATE && live) add_up(cells.total[s], found, d_vector[c]);
        }
        if (!LATE && !slot.owned) return;
        #pragma unroll
        for (int p = 0; p < PLANES; ++p) {
            pairs[p] = transposed(d_gate[0][p], d_gate[1][p]);
            if (p >= RIGHT && slot.owned)
                store(reinterpret_cast<storage_t*>(shared + f * OPERAND_BYTES +
                                                   exchange.own_gates[s][max(p - RIGHT, 0)]),
                      rounded(pairs[p]));
        }
        if (!LATE) out.store_gates(args, f, s, pairs);
    }

    INLINE void step(int i) {
        const int t = time.first + time.way * i;
        int before = i;
        asm volatile("" : "+r"(before));  // unknown: of four steps together three have one before
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f) {
            await_copies<(STAGES - 1) * FLIGHT - 1>();
            __syncwarp();
            float d_out[SLOTS][2], factor[SLOTS][2][FACTORS + 1];
            uint32 reset_rows[SLOTS];
            load_step(f, d_out, factor, reset_rows);
            inputs.copy(args, here, time, out.place, i + STAGES - 1, inputs.spare, f);
            if (before > 0) {  // a branch, so that the compiler computes no factors after the wait
                exchange.wait(here, f);
                exchange.add(here, shared, f, SHARES_BYTES - exchange.write_buffer, cells);
            }
            float d_gate[SLOTS][2][PLANES] = {}, d_vector[SLOTS][2][VECTORS + 1];
            Pair pairs[SLOTS][PLANES];
            #pragma unroll
            for (int s = 0; s < SLOTS; ++s)
                step_slot(f, s, t, reset_rows[s], d_out[s], factor[s], d_gate[s], d_vector[s],
                          pairs[s]);
            __syncthreads();
            // dh = R^T dr, this block's share of all units; nobody waits for warps without units
            const bool multiplies =
                CLUSTER == 1 || (WGMMA ? here.warp & ~3 : here.warp) * MMA_ROWS * 2 < GROUPS;
            Sums sums = {};
            if (multiplies) {
                product(sums, matrix, others, shared + AT_GATES + f * OPERAND_BYTES + operand);
                exchange.send(here, sums, shared, f);
            }
#if CLUSTER == 1
            __syncthreads();
#endif
            if (LATE) {  // while messages travel
                out.store_gates(args, f, 0, pairs[0]);
                #pragma unroll
                for (int c = 0; c < 2; ++c)
                    if (out.live(f, 0, c, t)) add_up(cells.total[0], d_gate[0][c], d_vector[0][c]);
            }
        }
    }
    INLINE void advance() {
        inputs.spare = inputs.stage;
        inputs.stage = inputs.stage + STAGE_BYTES == RING_BYTES ? 0 : inputs.stage + STAGE_BYTES;
        exchange.advance();
    }

    // Short steps run by fours where that was faster: buffers and phases that alternate are
    // constants then, a tenth of the instructions.
    INLINE void run() {
        constexpr int FEW = !SHORT ? 8 : WARPS > 4 ? 16 : 12;
        constexpr int ROUND = K_TILES * MMA_ROWS <= FEW && SLOTS * FLIGHT == 1 ? 4 : 1;
        static_assert(ROUND == 1 || 4 % STAGES == 0, "after four steps all stands where it began");
        for (int i = 0; i < time.count;) {
            if (ROUND == 4) {
                inputs.stage = 0, inputs.spare = RING_BYTES - STAGE_BYTES;
                exchange.write_buffer = 0, exchange.write_mbarrier = 0, exchange.phase = 1;
            }
            #pragma unroll
            for (int j = 0; j < ROUND && (j == 0 || i < time.count); ++j, ++i) {
                step(i);
                advance();
            }
        }
        #pragma unroll
        for (int f = 0; f < FLIGHT && time.count > 0; ++f) {  // the shares of the last step
            const int last = time.count - 1;
#if CLUSTER > 1
            mbarrier_wait(exchange.mbarriers + f * 16 + last % 2 * 8, uint32(last) / 2 % 2);
#endif
            exchange.add(here, shared, f, last % 2 * SHARES_BYTES, cells);
        }
    }

    // Gradients of initial states, sums over steps, and zeros where no row lives. Places are found
    // again: what only the end needs is not held in the loop.
    INLINE void finish() {
        const int thread = reread_thread(), block = cluster_rank();
        const int group_of_lane = thread % 32 / 4, thread_in_group = thread % 4;
        const int first_group = first_group_of(block);
        const int groups = first_group_of(block + 1) - first_group;
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const Slot slot(thread / 32 * SLOTS + s, groups);
            if (!slot.owned) continue;
            const int group = first_group + slot.group, unit = group * 8 + group_of_lane;
            #pragma unroll
            for (int f = 0; f < FLIGHT; ++f) {
                const int64 own = rows[f * ROWS + slot.tile * 8 + group_of_lane];
                if (LENGTHS && own >= 0)
                    store_no_gradients(args.d_gates, time.count * args.batch + own, args.batch,
                                       group * 8 + thread_in_group * 2,
                                       int(args.steps) - time.count);
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int b = rows[f * ROWS + slot.tile * 8 + thread_in_group * 2 + c];
                    if (b < 0 || unit >= args.units) continue;
                    const bool replaced =
                        RESET && !args.reverse && time.length(args, b) > 0 && args.reset[b];
                    store_first(args, cells.d_state[f][s][c], cells.d_reset[f][s][c], replaced,
                                reread(args.batch) * args.units, int64(b) * args.units + unit);
                }
            }
            const int64 tile = here.cluster * TILES + slot.tile;
            store_sums(args.sums + tile * (PLANES + VECTORS) * UNITS, cells.total[s], unit,
                       thread_in_group);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ BackwardArgs given_args) {
    const BackwardArgs args = given_args;  // read once: loads at each use cost the loop more
    extern __shared__ __align__(128) unsigned char shared[];
    const Place here;
    int* const rows = reinterpret_cast<int*>(shared + AT_ROWS);
    // R first, while registers are free: loaded after the rest some kernels spill
    Matrix matrix;
    unsigned char* const others = matrix_of(shared + AT_WEIGHTS, here.thread);
    load_weights(args, here, matrix, others);
    Exchange exchange;
    exchange.mbarriers = shared_address(shared);
    number_rows<FLIGHT * ROWS, THREADS>(rows, here.first_row, args.batch,
                                        LENGTHS ? args.order : nullptr);
    clear_shared<THREADS>(shared, AT_GATES, AT_SHARES);
    mbarrier_init<FLIGHT * 2>(exchange.mbarriers, here.share_bytes());
    Cells cells;
    cells.load(args, here, rows);
    const Time time(args, int(LENGTHS ? args.lengths[args.order[here.first_row]] : args.steps));
    Inputs inputs;
    Outputs out(args, here, time, rows, inputs);
    inputs.begin(args, here, shared);
    #pragma unroll
    for (int s = 0; s < STAGES - 1; ++s)
        #pragma unroll
        for (int f = 0; f < FLIGHT; ++f)
            inputs.copy(args, here, time, out.place, s, s * STAGE_BYTES, f);
    // computed once: with few rows a step takes as long as its instructions
    const int operand = pin(operand_start(here.thread_in_group, here.group_of_lane));
    const int fragment = pin_if_room(inputs.base + fragment_offset(here.lane));
    exchange.begin(here);

    Loop loop{args, here, time, rows, shared, cells, inputs, out, exchange, matrix, others,
              operand, fragment};
    loop.run();
    loop.finish();
    cluster_barrier();  // no block leaves while another may still write to it
}
