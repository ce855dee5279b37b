// A float32 tensor in 16 bits: the gradient of a weight, which several products have added to.

#include "device.cuh"

static_assert(NARROWED == 8, "a thread's values, two float4 and one uint4");

extern "C" __global__ void narrow_values(const __grid_constant__ NarrowValuesArgs args) {
    const int64 first = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * NARROWED;
#if NARROW
    if (first + NARROWED <= args.count) {
        const float4 low = *reinterpret_cast<const float4*>(args.x + first);
        const float4 high = *reinterpret_cast<const float4*>(args.x + first + 4);
        *reinterpret_cast<uint4*>(args.out + first) =
            make_uint4(pack(low.x, low.y), pack(low.z, low.w), pack(high.x, high.y),
                       pack(high.z, high.w));
        return;
    }
#endif
    for (int64 i = first; i < min(first + NARROWED, args.count); ++i)
        args.out[i] = narrow(args.x[i]);
}
