// Dropout between layers: Philox 4x32-10 of (seed, place), the same bits as `openrnn.philox`.

#include "device.cuh"

// out = x * mask; a thread takes four units of one row of one step
extern "C" __global__ void dropout(
    const stored* __restrict__ x,   // [T, B, width]
    stored* __restrict__ out,       // [T, B, width]
    wide steps, wide batch, wide width,
    const wide* __restrict__ seed,  // [2] seed and offset, read here so that a CUDA graph may draw
    wide layer,                     // whose output x is
    wide threshold,                 // the smallest word that is kept, of 2^32
    wide scale                      // bits of the float that kept values are multiplied by
) {
    const wide groups = (width + 3) / 4, number = wide(blockIdx.x) * blockDim.x + threadIdx.x;
    if (number >= steps * batch * groups) return;
    const wide group = number % groups, row = number / groups;
    word c[4] = {word(group), word(row % batch), word(row / batch), word(layer + 256 * seed[1])};
    word k0 = word(seed[0]), k1 = word(seed[0] >> 32);
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const word high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
        const word high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
        c[0] = high1 ^ c[1] ^ k0;
        c[1] = low1;
        c[2] = high0 ^ c[3] ^ k1;
        c[3] = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const float factor = __int_as_float(int(scale));
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        const wide unit = group * 4 + i, at = row * width + unit;
        if (unit < width) out[at] = narrow(wide(c[i]) >= threshold ? widen(x[at]) * factor : 0.0f);
    }
}
