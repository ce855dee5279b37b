// The streamed fragments of a warp: those that neither registers nor shared memory hold. A lane
// writes its part of them to memory once, in the order of fragments, and reads it back in each
// step. So a warp reads whole lines, and no lane has to see what another one wrote.

// How many are on their way at a time. The first ones are asked for before a step's operand is
// polled for: they do not depend on it.
constexpr int STREAM_DEPTH = STREAMED_FRAGMENTS < 4 ? STREAMED_FRAGMENTS : 4;

// Of the fragments before `fragment`, how many are streamed: they lie evenly among those in shared
// memory, so that both kinds of memory are read all the time.
INLINE constexpr int streamed_before(int fragment) {
    const int others = K_TILES * MMA_ROWS - REGISTER_FRAGMENTS;
    const int place = fragment - REGISTER_FRAGMENTS;
    return place <= 0 ? 0 : place * STREAMED_FRAGMENTS / others;
}
INLINE constexpr bool is_streamed(int fragment) {
    return streamed_before(fragment + 1) > streamed_before(fragment);
}

// the number of a fragment among those in shared memory
INLINE constexpr int shared_number(int fragment) {
    return fragment - REGISTER_FRAGMENTS - streamed_before(fragment);
}

struct Streamed {
    uint4* memory;  // this lane's part of fragment 0: half of its K, 512 bytes on the other half
    uint4 ahead[STREAM_DEPTH > 0 ? STREAM_DEPTH : 1][2];

    // warp: of all in the launch
    INLINE Streamed(void* all, int64 warp, int lane)
        : memory(static_cast<uint4*>(all) + warp * (STREAMED_FRAGMENTS * 64) + lane) {}

    INLINE void store(int number, uint4 first, uint4 second) const {
        memory[number * 64] = first, memory[number * 64 + 32] = second;
    }
    INLINE static uint4 read(const uint4* place) {
        uint4 found;
        asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
                     : "l"(place));
        return found;
    }
    INLINE void ask_for(int number) {
        uint4 (&place)[2] = ahead[number % STREAM_DEPTH];
        place[0] = read(memory + number * 64), place[1] = read(memory + number * 64 + 32);
    }
    // the first ones of a step; what the lane stored is stored before
    INLINE void begin() {
        if (STREAM_DEPTH > 0) asm volatile("" ::: "memory");
        #pragma unroll
        for (int number = 0; number < STREAM_DEPTH; ++number) ask_for(number);
    }
    // the next fragment, by its number; then a later one is asked for
    INLINE void take(int number, uint4& first, uint4& second) {
        first = ahead[number % STREAM_DEPTH][0], second = ahead[number % STREAM_DEPTH][1];
        if (number + STREAM_DEPTH < STREAMED_FRAGMENTS) ask_for(number + STREAM_DEPTH);
    }
};

// of a loop without streamed fragments
INLINE Streamed no_stream() { return Streamed(nullptr, 0, 0); }
