// Types, and what the constants mean that codegen/cuda.py defines before this text.
//
// Of the dtype:  NARROW 16-bit storage; BFLOAT bfloat16, else float16; HALF_OPERANDS float32
//   storage whose products read float16 (codegen/bounds.py proves that h stays within [-1, 1],
//   where its 11 bits of precision are those of tf32). Without both, products read tf32.
// Of the cell:  GATES, STATES, VECTORS (per-unit parameters), ACTIVATIONS (that forward saves and
//   backward reads), PLANES (gate gradients of a unit), SUMMED (bit g: the cell reads only the sum
//   of both sides of gate g), SCALED (bit g: that sum is computed halved), FACTORS (values that
//   `factors` leaves for `derivative`).
// Of the tiles (codegen/config.py):  UNITS (at least H, in eights), LAYERS that one launch runs,
//   CLUSTER blocks of a cluster, CLUSTERS that share R, in a stack those of all layers, WARPS of a
//   block, groups of 8 units, at most (GROUPS_OF_WARP in forward.cuh, GROUPS_OF_BLOCK in
//   backward.cuh, GROUPS_OF_CLUSTER in grids and with multicast), TILES of 8 rows in one product,
//   TILES_IN_FLIGHT such products that take turns, REGISTER_FRAGMENTS of R in registers, STAGES of
//   the ring buffer of inputs, WGMMA, LOW_REGISTER (hold fewer addresses, load R a little at a
//   time).
//   Of grids:  K_WARPS (parts of a block's K, each of some warps), STREAMED_FRAGMENTS (of R, read
//   from memory in each step).
//   With multicast:  K_WARPGROUPS that multiply, K_PARTS (blocks that share K), PARTS_IN_CLUSTER
//   (these are of one cluster), BUFFERS of the operand that TMA brings.
//   Of stacks in clusters:  INPUT_REGISTER_FRAGMENTS of W_ih in registers, POLLS_IN_FLIGHT of a
//   thread of the input warps.
//   Of kernels that no cell changes:  BLOCK_THREADS, TILE (side of a tile of permute_weights.cuh),
//   NARROWED (values of a thread of narrow_values.cuh), STRUCTS of arguments in a launch.
// Of sizes that Python counts, too:  SLOT_BYTES of a slot's inputs in a step. Kernels compare what
//   they count with SHARED_GIVEN (bytes of shared memory), POLLS_GIVEN (of a thread of the input
//   warps, a step), FLAG_ROWS_GIVEN and FILLED_ROWS_GIVEN (128 bytes each, of a flag buffer).
// Of the call:  LENGTHS, RESET, ALL_STATES (they are returned), RESET_STATE (states after a reset
//   are given), SAVE (forward saves activations), PADDED (UNITS are more than H).
// Of tests:  SPIN_LIMIT, polls after which a wait traps; 0: it lasts as long as it takes.

typedef unsigned int uint32;
typedef long long int64;

#if NARROW
typedef unsigned short storage_t;
#else
typedef float storage_t;
#endif

#define SHORT (NARROW || HALF_OPERANDS)  // products read 16-bit operands
#if SHORT
typedef unsigned short operand_t;
#else
typedef float operand_t;
#endif

constexpr int SIZE = sizeof(storage_t);
// A piece is 16 bytes, what one load or copy takes.
constexpr int PIECE = 16 / SIZE;                 // values of storage in a piece
constexpr int PIECE_K = 16 / sizeof(operand_t);  // operands in a piece, along K
constexpr int K_TILE = 4 * PIECE_K;              // of K that one 16-byte load a lane feeds: two mma

#define INLINE __device__ __forceinline__
