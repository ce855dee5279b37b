// The resident matrix of a warp: MMA_ROWS x 16 rows, SLICES of K; a piece is one of each.

constexpr int HELD = RESIDENT > 0 ? RESIDENT : 1;  // pieces in registers
constexpr int MATRIX_BYTES = (SLICES * MMA_ROWS - RESIDENT) * 1024;  // of the others, a warp
constexpr int CHAINS = MMA_ROWS * TILES >= 4 ? 1 : MMA_ROWS * TILES >= 2 ? 2 : 4;

typedef word Matrix[HELD][8];
typedef float Sums[MMA_ROWS][TILES][CHAINS][4];

// lower and upper: 16 bytes of K of rows lane / 4 and lane / 4 + 8
INLINE void hold(Matrix& matrix, unsigned char* others, int m, int s, uint4 lower, uint4 upper) {
    const word a[8] = {rounded(lower.x), rounded(upper.x), rounded(lower.y), rounded(upper.y),
                       rounded(lower.z), rounded(upper.z), rounded(lower.w), rounded(upper.w)};
    const int piece = s * MMA_ROWS + m;
    if (piece < RESIDENT) {
        #pragma unroll
        for (int i = 0; i < 8; ++i) matrix[piece][i] = a[i];
    } else {
        unsigned char* place = others + (piece - RESIDENT) * 1024;
        *reinterpret_cast<uint4*>(place) = make_uint4(a[0], a[1], a[2], a[3]);
        *reinterpret_cast<uint4*>(place + 512) = make_uint4(a[4], a[5], a[6], a[7]);
    }
}

// A B operand lies in shared memory as [16 bytes of K, tile, 8 rows, 16 bytes]: a group of units
// is one run of 128 bytes, sent as such, and the swizzled rows keep a warp's reads apart.
constexpr int CHUNK_BYTES = TILES * 128;  // of all rows of one chunk of K

INLINE int place_of(int chunk, int n, int row) {
    return chunk * CHUNK_BYTES + n * 128 + ((row ^ ((chunk & 3) * 2)) * 16);
}

// operand: this lane's 16 bytes of the first slice, in row lane / 4 of the first tile
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
                const word (&a)[8] = matrix[piece];
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

INLINE float chained(const Sums& sums, int m, int n, int place) {
    float total = sums[m][n][0][place];
    #pragma unroll
    for (int chain = 1; chain < CHAINS; ++chain) total += sums[m][n][chain][place];
    return total;
}

// Even lanes get four columns of the upper 8 rows of a sum, odd lanes of the lower: 16 bytes that
// lie side by side, those of lanes 2 and 3 of four behind those of 0 and 1.
INLINE float4 halved(const Sums& sums, int m, int n, bool odd) {
    float mine[4];
    #pragma unroll
    for (int e = 0; e < 4; ++e) mine[e] = chained(sums, m, n, e);
    const float low = __shfl_xor_sync(~0u, odd ? mine[0] : mine[2], 1);
    const float high = __shfl_xor_sync(~0u, odd ? mine[1] : mine[3], 1);
    return odd ? make_float4(low, high, mine[2], mine[3]) : make_float4(mine[0], mine[1], low, high);
}
