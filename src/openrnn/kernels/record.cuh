// What forward keeps of a cell and backward reads: RECORD values, in planes of 4, 4, ... and a rest.

constexpr int REST = KEPT % 4 == 3 || (NARROW && KEPT % 4 == 1) ? KEPT % 4 + 1 : KEPT % 4;
constexpr int RECORD = KEPT / 4 * 4 + REST;
constexpr int WHOLE = RECORD / 4;  // planes of 4 values

template <int VALUES>
INLINE void keep_values(stored* target, const float* values) {
#if NARROW
    if (VALUES == 4)
        *reinterpret_cast<uint2*>(target) = make_uint2(pack(values[0], values[1]),
                                                       pack(values[2], values[3]));
    else
        *reinterpret_cast<word*>(target) = pack(values[0], values[1]);
#else
    if (VALUES == 4)
        *reinterpret_cast<float4*>(target) = make_float4(values[0], values[1], values[2], values[3]);
    else if (VALUES == 2)
        *reinterpret_cast<float2*>(target) = make_float2(values[0], values[1]);
    else
        *target = values[0];
#endif
}

// base: the planes of 8 units x 8 rows, cells in the order of lanes, two rows each
INLINE void keep_record(stored* base, int cell, const float (&values)[KEPT + 4]) {
    #pragma unroll
    for (int plane = 0; plane < WHOLE; ++plane)
        keep_values<4>(base + plane * 256 + cell * 4, values + plane * 4);
    if (REST) keep_values<REST>(base + WHOLE * 256 + cell * REST, values + WHOLE * 4);
}
