// Dropout between layers: Philox 4x32-10 of (seed, place), the same bits as `openrnn.philox`.

#include "device.cuh"

// out = x * mask; a thread takes four units of one row of one step
extern "C" __global__ void dropout(const __grid_constant__ DropoutArgs args) {
    const int64 groups = (args.width + 3) / 4;
    const int64 number = int64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number >= args.steps * args.batch * groups) return;
    const int64 group = number % groups, row = number / groups;
    uint32 c[4] = {uint32(group), uint32(row % args.batch), uint32(args.first + row / args.batch),
                   uint32(args.layer + 256 * args.seed[1])};
    uint32 k0 = uint32(args.seed[0]), k1 = uint32(args.seed[0] >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
        const uint32 high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const float factor = __int_as_float(int(args.scale));
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int64 unit = group * 4 + i, at = row * args.width + unit;
        if (unit < args.width)
            args.out[at] =
                narrow(int64(c[i]) >= args.threshold ? widen(args.x[at]) * factor : 0.0f);
    }
}
