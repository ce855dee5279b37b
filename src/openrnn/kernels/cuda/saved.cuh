// Saved activations: ACTIVATIONS values of each cell that forward writes and backward reads.
//
// In memory a cell has SAVED values, in planes of 4, 4, ... and a rest. A plane holds the 64 cells
// of a fragment in the order of lanes, two rows a lane: the values of a lane's two cells are
// neighbours, and a warp reads and writes one run of memory.

constexpr int FULL_PLANES = ACTIVATIONS / 4;                   // of 4 values a cell
constexpr int REST = ACTIVATIONS % 4 == 3 ? 4 : ACTIVATIONS % 4;      // values in the last plane
constexpr int SAVED = FULL_PLANES * 4 + REST;
constexpr int PLANE_BYTES = 8 * SIZE;                   // a lane's two cells in a full plane
constexpr int REST_BYTES = 2 * REST * SIZE;             // and in the last

// Where a lane's two cells are.
struct SavedPlace {
    int rest;        // in memory: values from its first plane, `saved_offset`, to its last
    int full, last;  // in the copy in shared memory: bytes in a full plane, and in the last

    INLINE explicit SavedPlace(int lane) {
        rest = keep_if_room(FULL_PLANES * 256 + lane * 2 * (REST - 4));
        full = keep_if_room(lane * PLANE_BYTES), last = keep_if_room(lane * REST_BYTES);
    }
};
INLINE int saved_offset(int lane) { return lane * 8; }

// two cells side by side, VALUES of each from `first` on
template <int VALUES>
INLINE void store_plane(storage_t* target, const float (*values)[ACTIVATIONS + 4], int first) {
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
            *reinterpret_cast<uint4*>(place) =
                make_uint4(bits[i], bits[i + 1], bits[i + 2], bits[i + 3]);
        else
            *reinterpret_cast<uint2*>(place) = make_uint2(bits[i], bits[i + 1]);
    }
}

// base: this lane's first plane; rest: see SavedPlace
INLINE void store_saved(storage_t* base, int rest, const float (&values)[2][ACTIVATIONS + 4]) {
    #pragma unroll
    for (int plane = 0; plane < FULL_PLANES; ++plane)
        store_plane<4>(base + plane * 256, values, plane * 4);
    if (REST) store_plane<REST ? REST : 4>(base + rest, values, FULL_PLANES * 4);
}

// the same from a copy in shared memory: [plane, lane, cell, value]
template <int VALUES>
INLINE void load_plane(const unsigned char* source, float (&values)[2][ACTIVATIONS + 4],
                       int first) {
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
        values[(i * 2 + 1) / VALUES][first + (i * 2 + 1) % VALUES] =
            widen(storage_t(bits[i] >> 16));
#else
        values[i / VALUES][first + i % VALUES] = __uint_as_float(bits[i]);
#endif
    }
}

INLINE void load_saved(const unsigned char* source, const SavedPlace& at,
                       float (&values)[2][ACTIVATIONS + 4]) {
    #pragma unroll
    for (int plane = 0; plane < FULL_PLANES; ++plane)
        load_plane<4>(source + plane * 32 * PLANE_BYTES + at.full, values, plane * 4);
    if (REST)
        load_plane<REST ? REST : 4>(source + FULL_PLANES * 32 * PLANE_BYTES + at.last, values,
                                    FULL_PLANES * 4);
}

// Copies a lane's cells into shared memory; zeros where there are none.
INLINE void copy_saved_async(uint32 target, const storage_t* source, const SavedPlace& at,
                             bool exists) {
    constexpr int LAST_STEP = !REST_BYTES ? 4 : REST_BYTES < 16 ? REST_BYTES : 16;
    #pragma unroll
    for (int plane = 0; plane < FULL_PLANES; ++plane)
        #pragma unroll
        for (int byte = 0; byte < PLANE_BYTES; byte += 16)
            copy_async<16>(target + plane * 32 * PLANE_BYTES + at.full + byte,
                           source + plane * 256 + byte / SIZE, exists ? 16 : 0);
    #pragma unroll
    for (int byte = 0; byte < REST_BYTES; byte += LAST_STEP)
        copy_async<LAST_STEP>(target + FULL_PLANES * 32 * PLANE_BYTES + at.last + byte,
                              source + at.rest + byte / SIZE, exists ? LAST_STEP : 0);
}
