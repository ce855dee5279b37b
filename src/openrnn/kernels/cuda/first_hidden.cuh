// h before the first step, as the loops multiply it in step 0.

// Whether any row may have one that is not zero.
INLINE bool has_first_hidden(const ForwardArgs& args) {
    return args.chunk_in || args.initial[0] || (RESET && args.reset_state[0]);
}

// 16 bytes of the operand: row b from `unit` on.
INLINE uint4 first_hidden(const ForwardArgs& args, int count, int64 b, int unit) {
    uint32 words[4] = {};
    float found[PIECE_K] = {};
#if PADDED
    #pragma unroll
    for (int i = 0; i < PIECE_K; ++i)
        if (unit + i < args.hidden)
            found[i] = widen(narrow(first_state_inline(args, count, 0, b, unit + i)));
#else
    const bool is_reset = starts_reset(args, count, b);
    const int64 at = b * args.hidden + unit;
    const storage_t* const source = is_reset ? args.reset_state[0] : args.initial[0];
    const float* floats = args.chunk_in && !is_reset ? args.chunk_in : nullptr;
#if NARROW
    if (!floats)
        return source ? *reinterpret_cast<const uint4*>(source + at) : make_uint4(0, 0, 0, 0);
#else
    if (!floats) floats = source;
#endif
    #pragma unroll
    for (int i = 0; floats && i < PIECE_K; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(floats + at + i);
        found[i] = four.x, found[i + 1] = four.y, found[i + 2] = four.z, found[i + 3] = four.w;
    }
#endif
    #pragma unroll
    for (int i = 0; i < 4; ++i)
#if SHORT
        words[i] = pack(found[2 * i], found[2 * i + 1]);
#else
        words[i] = rounded(__float_as_uint(found[i]));
#endif
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores h of all rows, PIECE_COUNT pieces from `first_piece` on, each at shared offset
// `target(row, piece)`; the operand holds zeros before. Whole pieces are loaded, because a load
// takes half a microsecond.
template <int ROW_COUNT, int PIECE_COUNT, int THREAD_COUNT, class Target>
INLINE void store_first_hidden(const ForwardArgs& args, const int* rows, int count,
                               int first_piece, Target target) {
    if (!has_first_hidden(args)) return;
    #pragma unroll 2
    for (int at = threadIdx.x; at < ROW_COUNT * PIECE_COUNT; at += THREAD_COUNT) {
        const int r = at / PIECE_COUNT, piece = at % PIECE_COUNT, b = rows[r];
        const int unit = (first_piece + piece) * PIECE_K;
        if (b >= 0 && unit < args.hidden)
            *reinterpret_cast<uint4*>(shared + target(r, piece)) =
                first_hidden(args, count, b, unit);
    }
}
