// What forward keeps of a cell and backward reads: RECORD values, in planes of 4, 4, ... and a rest.
//
// A plane holds 64 cells, 8 units x 8 rows in the order of lanes, two rows a lane: the values of a
// lane's cells lie side by side, and a warp's are one run of memory.

constexpr int WHOLE = KEPT / 4;  // planes of 4 values
constexpr int REST = KEPT % 4 == 3 ? 4 : KEPT % 4;
constexpr int RECORD = WHOLE * 4 + REST;
constexpr int FOUR = 8 * SIZE, LAST = 2 * REST * SIZE;  // bytes of two cells in a plane, in the last

// Where a lane's two cells are. rest: values in memory from those of the first plane, which `first_of`
// tells, to those of the last; four, last: bytes in a copied plane of four, and in the copied last one.
struct Cells {
    int rest, four, last;

    INLINE explicit Cells(int lane) {
        rest = handy(WHOLE * 256 + lane * 2 * (REST - 4)), four = handy(lane * FOUR), last = handy(lane * LAST);
    }
};
INLINE int first_of(int lane) { return lane * 8; }

// two cells side by side, VALUES of each from `first` on
template <int VALUES>
INLINE void keep_values(storage_t* target, const float (*values)[KEPT + 4], int first) {
    constexpr int WORDS = VALUES * 2 * SIZE / 4;
    uint32 bits[WORDS];
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#if NARROW
        bits[i] = pack(values[i * 2 / VALUES][first + i * 2 % VALUES],
                       values[(i * 2 + 1) / VALUES][first + (i * 2 + 1) % VALUES]);
#else
        bits[i] = __float_as_uint(values[i / VALUES][first + i % VALUES]);
#endif
    }
    #pragma unroll
    for (int i = 0; i < WORDS; i += WORDS % 4 == 0 ? 4 : 2) {
        uint32* place = reinterpret_cast<uint32*>(target) + i;
        if (WORDS == 1)
            *place = bits[i];
        else if (WORDS % 4 == 0)
            *reinterpret_cast<uint4*>(place) = make_uint4(bits[i], bits[i + 1], bits[i + 2], bits[i + 3]);
        else
            *reinterpret_cast<uint2*>(place) = make_uint2(bits[i], bits[i + 1]);
    }
}

// base: the first cell of this lane in the first plane; rest: see Cells
INLINE void keep_records(storage_t* base, int rest, const float (&values)[2][KEPT + 4]) {
    #pragma unroll
    for (int plane = 0; plane < WHOLE; ++plane)
        keep_values<4>(base + plane * 256, values, plane * 4);
    if (REST) keep_values<REST ? REST : 4>(base + rest, values, WHOLE * 4);
}

// the same back from a copy in shared memory, [plane, lane, cell, value]
template <int VALUES>
INLINE void read_values(const unsigned char* source, float (&values)[2][KEPT + 4], int first) {
    constexpr int WORDS = VALUES * 2 * SIZE / 4;
    uint32 bits[WORDS];
    #pragma unroll
    for (int i = 0; i < WORDS; i += WORDS % 4 == 0 ? 4 : 2) {
        const uint32* place = reinterpret_cast<const uint32*>(source) + i;
        if (WORDS == 1) {
            bits[i] = *place;
        } else if (WORDS % 4 != 0) {
            const uint2 two = *reinterpret_cast<const uint2*>(place);
            bits[i] = two.x, bits[i + 1] = two.y;
        } else {
            const uint4 four = *reinterpret_cast<const uint4*>(place);
            bits[i] = four.x, bits[i + 1] = four.y, bits[i + 2] = four.z, bits[i + 3] = four.w;
        }
    }
    #pragma unroll
    for (int i = 0; i < WORDS; ++i) {
#if NARROW
        values[i * 2 / VALUES][first + i * 2 % VALUES] = widen(storage_t(bits[i]));
        values[(i * 2 + 1) / VALUES][first + (i * 2 + 1) % VALUES] = widen(storage_t(bits[i] >> 16));
#else
        values[i / VALUES][first + i % VALUES] = __uint_as_float(bits[i]);
#endif
    }
}

INLINE void read_records(const unsigned char* source, const Cells& cells, float (&values)[2][KEPT + 4]) {
    #pragma unroll
    for (int plane = 0; plane < WHOLE; ++plane)
        read_values<4>(source + plane * 32 * FOUR + cells.four, values, plane * 4);
    if (REST) read_values<REST ? REST : 4>(source + WHOLE * 32 * FOUR + cells.last, values, WHOLE * 4);
}

// the copy itself, of one lane from its cells on, where there is something to copy; else zeros
INLINE void copy_records(uint32 target, const storage_t* source, const Cells& cells, bool here) {
    constexpr int LAST_STEP = !LAST ? 4 : LAST < 16 ? LAST : 16;
    #pragma unroll
    for (int plane = 0; plane < WHOLE; ++plane)
        #pragma unroll
        for (int at = 0; at < FOUR; at += 16)
            copy_async<16>(target + plane * 32 * FOUR + cells.four + at, source + plane * 256 + at / SIZE,
                           here ? 16 : 0);
    #pragma unroll
    for (int at = 0; at < LAST; at += LAST_STEP)
        copy_async<LAST_STEP>(target + WHOLE * 32 * FOUR + cells.last + at, source + cells.rest + at / SIZE,
                              here ? LAST_STEP : 0);
}
