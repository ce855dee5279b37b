// A warp's part of the matrix, and its product with an operand in shared memory.
//
// The matrix is MMA_ROWS x 16 rows and K_TILES tiles of K; a fragment is one of each: 8 registers
// of a lane or 1 KiB of shared memory. The first REGISTER_FRAGMENTS fragments stay in registers,
// STREAMED_FRAGMENTS of the others are read from memory in each step, see streamed.cuh.
//
// WGMMA: the four warps of a warpgroup multiply as one, so that the operand is read from shared
// memory once for all four. Their sums lie in lanes as those of mma do. Fragments in registers have
// K in its own order then, not in that of the lanes' 16 bytes; tensor cores themselves read the
// others, [fragment, warp, upper or lower 8 rows, 16 bytes of K, row].

static_assert(!WGMMA || WARPS % 4 == 0, "four warps multiply together");
// no array is empty
constexpr int FRAGMENT_ARRAY = REGISTER_FRAGMENTS > 0 ? REGISTER_FRAGMENTS : 1;
// those of a warp in shared memory
constexpr int MATRIX_BYTES =
    (K_TILES * MMA_ROWS - REGISTER_FRAGMENTS - STREAMED_FRAGMENTS) * 1024;
static_assert(!WGMMA || STREAMED_FRAGMENTS == 0, "tensor cores themselves read the others");
// Independent sums, where few products would wait for each other; a tile of K has two.
constexpr int CHAINS =
    WGMMA || MMA_ROWS * TILES >= 4 ? 1 : MMA_ROWS * TILES >= 2 || K_TILES < 2 ? 2 : 4;

typedef uint32 Matrix[FRAGMENT_ARRAY][8];
typedef float Sums[MMA_ROWS][TILES][CHAINS][4];

#include "streamed.cuh"

// 16 bytes of R, [GATES, UNITS, UNITS], in the row of a gate's unit from k on. In a stack also of
// W_ih, which is not halved: gates halve what the ring buffer has of it.
template <bool HALVES = true>
INLINE uint4 piece_of(const storage_t* matrix, int gate, int unit, int k) {
    const storage_t* const row = matrix + (int64(gate) * UNITS + unit) * UNITS + k;
    uint32 words[4];
#if HALF_OPERANDS
    const float4 low = reinterpret_cast<const float4*>(row)[0];
    const float4 high = reinterpret_cast<const float4*>(row)[1];
    words[0] = pack(low.x, low.y), words[1] = pack(low.z, low.w);
    words[2] = pack(high.x, high.y), words[3] = pack(high.z, high.w);
#else
    const uint4 found = *reinterpret_cast<const uint4*>(row);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
#endif
#if NARROW
    if (HALVES && SCALED >> gate & 1)
        #pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = halved(words[i]);
#endif
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// where in its warpgroup's matrix in shared memory, or in its own, a thread has its first 16 bytes
INLINE int place_in_matrix(int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    return WGMMA ? warp * 1024 + (lane & 3) * 128 + (lane >> 2) * 16 : lane * 16;
}
INLINE unsigned char* matrix_of(unsigned char* matrices, int thread) {
    const int first = thread >> 5 & (WGMMA ? ~3 : ~0);
    return matrices + keep_in_register(first * MATRIX_BYTES +
                                       place_in_matrix(thread & (WGMMA ? 127 : 31)));
}

#if WGMMA
INLINE uint32 picked(uint4 words, int number) {
    const uint32 low = number & 1 ? words.y : words.x, high = number & 1 ? words.w : words.z;
    return number & 2 ? high : low;
}

// Of four lanes' 16 bytes each lane gets word lane % 4 of all four, instead of all words of one.
INLINE uint4 dealt(uint4 mine) {
    const int lane = threadIdx.x & 31;
    uint32 found[4];
    #pragma unroll
    for (int round = 0; round < 4; ++round)
        found[round] = __shfl_sync(~0u, picked(mine, lane - round & 3),
                                   (lane & ~3) | (lane + round & 3));
    const uint4 words = make_uint4(found[0], found[1], found[2], found[3]);
    return make_uint4(picked(words, -lane & 3), picked(words, 1 - lane & 3),
                      picked(words, 2 - lane & 3), picked(words, 3 - lane & 3));
}
#endif

// Puts 16 rows of a tile of K where they belong. lower, upper: 16 bytes of K of rows lane / 4 and
// lane / 4 + 8.
INLINE void hold(Matrix& matrix, unsigned char* others, const Streamed& streamed, int m, int s,
                 uint4 lower, uint4 upper) {
    const int fragment = s * MMA_ROWS + m;
    if (LOW_REGISTER && fragment % 4 == 3) __syncwarp();  // keeps later loads behind it
#if WGMMA
    if (fragment < REGISTER_FRAGMENTS) lower = dealt(lower), upper = dealt(upper);
#endif
    const uint32 a[8] = {rounded(lower.x), rounded(upper.x), rounded(lower.y), rounded(upper.y),
                         rounded(lower.z), rounded(upper.z), rounded(lower.w), rounded(upper.w)};
    if (fragment < REGISTER_FRAGMENTS) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) matrix[fragment][i] = a[i];
    } else if (is_streamed(fragment)) {
        streamed.store(streamed_before(fragment), make_uint4(a[0], a[1], a[2], a[3]),
                       make_uint4(a[4], a[5], a[6], a[7]));
    } else {
#if WGMMA
        unsigned char* place = others + (fragment - REGISTER_FRAGMENTS) * 4096;
        *reinterpret_cast<uint4*>(place) = make_uint4(a[0], a[2], a[4], a[6]);
        *reinterpret_cast<uint4*>(place + 512) = make_uint4(a[1], a[3], a[5], a[7]);
#else
        unsigned char* place = others + shared_number(fragment) * 1024;
        *reinterpret_cast<uint4*>(place) = make_uint4(a[0], a[1], a[2], a[3]);
        *reinterpret_cast<uint4*>(place + 512) = make_uint4(a[4], a[5], a[6], a[7]);
#endif
    }
}

// Loads the matrix. load(number, k_tile): this lane's 16 bytes of K, of the number-th 8 rows of
// this warp, or zeros. Of each 16 rows the fragments for registers come last, when little else
// needs registers; not with HALF_OPERANDS, where too many other loads would be in flight.
template <class Load>
INLINE void load_matrix(Matrix& matrix, unsigned char* others, Load load) {
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int loaded = 0; loaded < K_TILES; ++loaded) {
            const int s = HALF_OPERANDS ? loaded : K_TILES - 1 - loaded;
            hold(matrix, others, no_stream(), m, s, load(2 * m, s), load(2 * m + 1, s));
        }
}

// The operand, B, lies in shared memory as [16 bytes of K, tile, 8 rows, 16 bytes]: 8 rows of a
// piece of K are 128 consecutive bytes. Rows are swizzled, so that a warp's reads meet no bank
// twice; wgmma reads them in order, without a swizzle.
constexpr int PIECE_BYTES = TILES * 128;  // of all rows of one piece of K

INLINE int operand_offset(int piece, int n, int row) {
    return piece * PIECE_BYTES + n * 128 + ((WGMMA ? row : row ^ ((piece & 3) * 2)) * 16);
}

// where a lane's reads of an operand begin: its 16 bytes of the first tile of K in row lane / 4 of
// the first tile of rows; a warpgroup's begin at the operand itself
INLINE int operand_start(int thread_in_group, int group_of_lane) {
    return WGMMA ? 0 : operand_offset(thread_in_group, 0, group_of_lane);
}

#if WGMMA
// A matrix descriptor of wgmma, for cores of 8 rows x 16 bytes. Its lower half has the address and
// how far the next core along K is, its upper half how far the next along rows. The shuffle tells
// the compiler that all lanes have the same: it counts on from there in uniform registers.
INLINE uint32 descriptor_low(uint32 place, int along_k) {
    return __shfl_sync(~0u, (place & 0x3ffff) >> 4 | along_k >> 4 << 16, 0);
}
INLINE unsigned long long descriptor(uint32 low, int along_rows) {
    unsigned long long both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(along_rows >> 4));
    return both;
}

// sums += A B for one wgmma's K; A in registers, or its descriptor
INLINE void wgmma(float (&sums)[TILES][1][4], const uint32* a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE " " WGMMA_SUMS ", " WGMMA_REGISTERS
                 WGMMA_SIGNS_REGISTERS ";"
                 : WGMMA_BOUND(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
INLINE void wgmma(float (&sums)[TILES][1][4], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE " " WGMMA_SUMS ", " WGMMA_SHARED
                 WGMMA_SIGNS_SHARED ";"
                 : WGMMA_BOUND(sums) : "l"(a), "l"(b));
}

// tells the compiler that sums change here: it moves no use of them past this
INLINE void settle(Sums& sums) {
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        asm volatile("" : WGMMA_BOUND(sums[m])::"memory");
}

// sums += matrix x operand over some tiles of K, from the descriptors of the fragments in shared
// memory and the operand
template <int BEGIN, int END>
INLINE void product_of(Sums& sums, const Matrix& matrix, uint32 a, uint32 b) {
    settle(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int s = BEGIN; s < END; ++s)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned long long rows =
                descriptor(b + (s * 4 + half * 2) * (PIECE_BYTES / 16), 128);
            #pragma unroll
            for (int m = 0; m < MMA_ROWS; ++m) {
                const int fragment = s * MMA_ROWS + m, other = fragment - REGISTER_FRAGMENTS;
                if (other < 0)
                    wgmma(sums[m], matrix[other < 0 ? fragment : 0] + half * 4, rows);
                else
                    wgmma(sums[m], descriptor(a + (other * 4096 + half * 256) / 16, 512), rows);
            }
        }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(sums);
}

// the descriptor of the fragments in shared memory; others: what `matrix_of` gave
INLINE uint32 matrix_descriptor(const unsigned char* others) {
    return descriptor_low(shared_address(others) - place_in_matrix(threadIdx.x & 127), 128);
}

// sums += matrix x operand; operand: with `operand_start`
INLINE void product(Sums& sums, const Matrix& matrix, const unsigned char* others, Streamed&,
                    const unsigned char* operand) {
    const uint32 a = matrix_descriptor(others);
    const uint32 b = descriptor_low(shared_address(operand), PIECE_BYTES);
    // the asynchronous proxy is to see what threads and other blocks stored
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    product_of<0, K_TILES>(sums, matrix, a, b);
}
#else
INLINE void product(Sums& sums, const Matrix& matrix, const unsigned char* others,
                    Streamed& streamed, const unsigned char* operand) {
    #pragma unroll
    for (int s = 0; s < K_TILES; ++s) {
        uint4 b[TILES];
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            b[n] = *reinterpret_cast<const uint4*>(operand + n * 128 + s * (4 * PIECE_BYTES));
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m) {
            uint4 first, second;
            const int fragment = s * MMA_ROWS + m;
            if (fragment < REGISTER_FRAGMENTS) {
                const uint32 (&a)[8] = matrix[fragment];
                first = make_uint4(a[0], a[1], a[2], a[3]);
                second = make_uint4(a[4], a[5], a[6], a[7]);
            } else if (is_streamed(fragment)) {
                streamed.take(streamed_before(fragment), first, second);
            } else {
                const unsigned char* place = others + shared_number(fragment) * 1024;
                first = *reinterpret_cast<const uint4*>(place);
                second = *reinterpret_cast<const uint4*>(place + 512);
            }
            #pragma unroll
            for (int n = 0; n < TILES; ++n) {
                multiply(sums[m][n][2 * s % CHAINS], first, b[n].x, b[n].y);
                multiply(sums[m][n][(2 * s + 1) % CHAINS], second, b[n].z, b[n].w);
            }
        }
    }
}
#endif

INLINE void product(Sums& sums, const Matrix& matrix, const unsigned char* others,
                    const unsigned char* operand) {
    Streamed streamed = no_stream();
    product(sums, matrix, others, streamed, operand);
}

// a sum of all its chains
INLINE float chained(const Sums& sums, int m, int n, int place) {
    float total = sums[m][n][0][place];
    #pragma unroll
    for (int chain = 1; chain < CHAINS; ++chain) total += sums[m][n][chain][place];
    return total;
}
