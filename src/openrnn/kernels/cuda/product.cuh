// The resident matrix of a warp: MMA_ROWS x 16 rows, SLICES of K; a piece is one of each.
//
// WGMMA: the four warps of a warpgroup multiply as one, so that the operand is read from shared memory
// once for all four. Their sums lie in lanes as those of mma do; the matrix in registers has K in its
// own order then, not in that of the lanes' 16 bytes, and what is not in registers is read by
// the tensor cores themselves, [piece, warp, upper or lower 8 rows, 16 bytes of K, row].

static_assert(!WGMMA || WARPS % 4 == 0, "four warps multiply together");
constexpr int HELD = RESIDENT > 0 ? RESIDENT : 1;  // pieces in registers
constexpr int MATRIX_BYTES = (SLICES * MMA_ROWS - RESIDENT) * 1024;  // of the others, a warp
// sums side by side, where few products would wait for each other; a slice has two
constexpr int CHAINS = WGMMA || MMA_ROWS * TILES >= 4 ? 1 : MMA_ROWS * TILES >= 2 || SLICES < 2 ? 2 : 4;

typedef uint32 Matrix[HELD][8];
typedef float Sums[MMA_ROWS][TILES][CHAINS][4];

// where in its warpgroup's matrix in shared memory, or in its own, a thread keeps its first 16 bytes
INLINE int place_in_matrix(int thread) {
    const int warp = thread >> 5, lane = thread & 31;
    return WGMMA ? warp * 1024 + (lane & 3) * 128 + (lane >> 2) * 16 : lane * 16;
}
INLINE unsigned char* matrix_of(unsigned char* matrices, int thread) {
    const int first = thread >> 5 & (WGMMA ? ~3 : ~0);
    return matrices + pinned(first * MATRIX_BYTES + place_in_matrix(thread & (WGMMA ? 127 : 31)));
}

#if WGMMA
INLINE uint32 picked(uint4 words, int number) {
    const uint32 low = number & 1 ? words.y : words.x, high = number & 1 ? words.w : words.z;
    return number & 2 ? high : low;
}

// of four lanes' 16 bytes word lane % 4 of each, instead of all words of one
INLINE uint4 dealt(uint4 mine) {
    const int lane = threadIdx.x & 31;
    uint32 found[4];
    #pragma unroll
    for (int turn = 0; turn < 4; ++turn)
        found[turn] = __shfl_sync(~0u, picked(mine, lane - turn & 3), (lane & ~3) | (lane + turn & 3));
    const uint4 words = make_uint4(found[0], found[1], found[2], found[3]);
    return make_uint4(picked(words, -lane & 3), picked(words, 1 - lane & 3),
                      picked(words, 2 - lane & 3), picked(words, 3 - lane & 3));
}
#endif

// lower and upper: 16 bytes of K of rows lane / 4 and lane / 4 + 8
INLINE void hold(Matrix& matrix, unsigned char* others, int m, int s, uint4 lower, uint4 upper) {
    const int piece = s * MMA_ROWS + m;
    if (FRUGAL && piece % 4 == 3) __syncwarp();  // the compiler loads no more before it
#if WGMMA
    if (piece < RESIDENT) lower = dealt(lower), upper = dealt(upper);
#endif
    const uint32 a[8] = {rounded(lower.x), rounded(upper.x), rounded(lower.y), rounded(upper.y),
                       rounded(lower.z), rounded(upper.z), rounded(lower.w), rounded(upper.w)};
    if (piece < RESIDENT) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) matrix[piece][i] = a[i];
    } else {
#if WGMMA
        unsigned char* place = others + (piece - RESIDENT) * 4096;
        *reinterpret_cast<uint4*>(place) = make_uint4(a[0], a[2], a[4], a[6]);
        *reinterpret_cast<uint4*>(place + 512) = make_uint4(a[1], a[3], a[5], a[7]);
#else
        unsigned char* place = others + (piece - RESIDENT) * 1024;
        *reinterpret_cast<uint4*>(place) = make_uint4(a[0], a[1], a[2], a[3]);
        *reinterpret_cast<uint4*>(place + 512) = make_uint4(a[4], a[5], a[6], a[7]);
#endif
    }
}

// load(number, slice): this lane's 16 bytes of K, of the number-th 8 rows of this warp, or zeros. Of
// each 16 rows what registers hold comes last, so that little else needs them then; but with HALF, where the
// compiler has too many loads of the rest on their way.
template <class Load>
INLINE void load_matrix(Matrix& matrix, unsigned char* others, Load load) {
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        #pragma unroll
        for (int turn = 0; turn < SLICES; ++turn) {
            const int s = HALF ? turn : SLICES - 1 - turn;
            hold(matrix, others, m, s, load(2 * m, s), load(2 * m + 1, s));
        }
}

// A B operand lies in shared memory as [16 bytes of K, tile, 8 rows, 16 bytes]: a group of units
// is one run of 128 bytes, sent as such, and the swizzled rows keep a warp's reads apart. A run with
// its rows in order is also what wgmma reads without a swizzle.
constexpr int CHUNK_BYTES = TILES * 128;  // of all rows of one chunk of K

INLINE int place_of(int chunk, int n, int row) {
    return chunk * CHUNK_BYTES + n * 128 + ((WGMMA ? row : row ^ ((chunk & 3) * 2)) * 16);
}

// where a lane's reads of an operand begin: its 16 bytes of the first slice, in row lane / 4 of the
// first tile; a warpgroup's at the operand itself
INLINE int start_of(int of4, int of8) { return WGMMA ? 0 : place_of(of4, 0, of8); }

#if WGMMA
// A matrix in shared memory in cores of 8 rows x 16 bytes, as wgmma is told of it: where it begins and
// how far the next core along K is; then that along rows. The same in all lanes, which the compiler is
// to know: it counts on from there in uniform registers.
INLINE uint32 described(uint32 place, int along_k) {
    return __shfl_sync(~0u, (place & 0x3ffff) >> 4 | along_k >> 4 << 16, 0);
}
INLINE unsigned long long completed(uint32 low, int along_rows) {
    unsigned long long both;
    asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "r"(low), "r"(along_rows >> 4));
    return both;
}

// sums += A B of one mma's K; sums are 4 a tile, as WGMMA_SUMS names them
INLINE void multiply_together(float (&sums)[TILES][1][4], const uint32* a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE " " WGMMA_SUMS ", " WGMMA_REGISTERS
                 WGMMA_SIGNS_REGISTERS ";"
                 : WGMMA_BOUND(sums) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
INLINE void multiply_together(float (&sums)[TILES][1][4], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned." WGMMA_SHAPE " " WGMMA_SUMS ", " WGMMA_SHARED
                 WGMMA_SIGNS_SHARED ";"
                 : WGMMA_BOUND(sums) : "l"(a), "l"(b));
}

// for the compiler: all that was done to sums is done
INLINE void settle(Sums& sums) {
    #pragma unroll
    for (int m = 0; m < MMA_ROWS; ++m)
        asm volatile("" : WGMMA_BOUND(sums[m])::"memory");
}

// others: as `matrix_of` gives it; operand: its beginning
INLINE void product(Sums& sums, const Matrix& matrix, const unsigned char* others,
                    const unsigned char* operand) {
    const uint32 a = described(shared_address(others) - place_in_matrix(threadIdx.x & 127), 128);
    const uint32 b = described(shared_address(operand), CHUNK_BYTES);
    // what other threads and blocks stored is read by the asynchronous proxy now
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    settle(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    #pragma unroll
    for (int s = 0; s < SLICES; ++s)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned long long rows = completed(b + (s * 4 + half * 2) * (CHUNK_BYTES / 16), 128);
            #pragma unroll
            for (int m = 0; m < MMA_ROWS; ++m) {
                const int piece = s * MMA_ROWS + m, other = piece - RESIDENT;
                if (other < 0)
                    multiply_together(sums[m], matrix[other < 0 ? piece : 0] + half * 4, rows);
                else
                    multiply_together(sums[m], completed(a + (other * 4096 + half * 256) / 16, 512), rows);
            }
        }
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
    settle(sums);
}
#else
INLINE void product(Sums& sums, const Matrix& matrix, const unsigned char* others,
                    const unsigned char* operand) {
    #pragma unroll
    for (int s = 0; s < SLICES; ++s) {
        uint4 b[TILES];
        #pragma unroll
        for (int n = 0; n < TILES; ++n)
            b[n] = *reinterpret_cast<const uint4*>(operand + n * 128 + s * (4 * CHUNK_BYTES));
        #pragma unroll
        for (int m = 0; m < MMA_ROWS; ++m) {
            uint4 first, second;
            const int piece = s * MMA_ROWS + m;
            if (piece < RESIDENT) {
                const uint32 (&a)[8] = matrix[piece];
                first = make_uint4(a[0], a[1], a[2], a[3]);
                second = make_uint4(a[4], a[5], a[6], a[7]);
            } else {
                const unsigned char* place = others + (piece - RESIDENT) * 1024;
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

INLINE float chained(const Sums& sums, int m, int n, int place) {
    float total = sums[m][n][0][place];
    #pragma unroll
    for (int chain = 1; chain < CHAINS; ++chain) total += sums[m][n][chain][place];
    return total;
}
