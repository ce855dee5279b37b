// What the skeletons stand on: numbers, tensor cores, copies and the exchange between blocks.
// BFLOAT: bfloat16; NARROW: a 16-bit type; neither: float32. Products read float32 as tf32 or, HALF, as
// float16, whose 11 bits are tf32's: for h within [-1, 1] its exponent is enough (codegen/bounds.py).

typedef unsigned int uint32;
typedef long long int64;

#if NARROW
typedef unsigned short storage_t;
#else
typedef float storage_t;
#endif
#define SHORT (NARROW || HALF)
#if SHORT
typedef unsigned short operand_t;  // what products read
#else
typedef float operand_t;
#endif

constexpr int SIZE = sizeof(storage_t);
constexpr int CHUNK = 16 / SIZE;                  // values of one 16-byte chunk
constexpr int CHUNK_K = 16 / sizeof(operand_t);  // of K of one 16-byte chunk
constexpr int SLICE = 4 * CHUNK_K;                // of K that one 16-byte load a lane serves: 2 mma

#define INLINE __device__ __forceinline__

INLINE float widen(storage_t value) {
#if !NARROW
    return value;
#elif BFLOAT
    return __uint_as_float(uint32(value) << 16);
#else
    float wider;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wider) : "h"(value));
    return wider;
#endif
}

#if SHORT
INLINE uint32 pack(float low, float high) {
    uint32 both;
#if BFLOAT
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#elif HALF  // R and first states may be anything: above 65504 they are that, and products finite
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
#endif
    return both;
}
#endif

INLINE storage_t narrow(float value) {
#if NARROW
    return storage_t(pack(value, 0.0f));
#else
    return value;
#endif
}

// a state of unit and row `at`, the end of the call or, in full, what its next part begins with
INLINE void leave(float* carry, storage_t* end, int64 first, int64 at, float value) {
    if (carry)
        carry[first + at] = value;
    else
        end[at] = narrow(value);
}

// What a product reads where it is tf32: ties away from 0. Tensor cores drop the last 13
// bits themselves, so that cvt.rna.tf32, which clears them, would take two instructions more. What
// rounds up to infinity has such bits left, and a nan with no other bits (none is made) becomes it.
INLINE uint32 rounded(uint32 bits) {
#if SHORT
    return bits;
#else
    return fabsf(__uint_as_float(bits)) < __uint_as_float(0x7f800000) ? bits + 0x1000 : bits;
#endif
}

// a value as products read it
INLINE operand_t operand_of(storage_t value) {
#if HALF
    return operand_t(pack(value, 0.0f));
#elif NARROW
    return value;
#else
    return __uint_as_float(rounded(__float_as_uint(value)));
#endif
}

// sum += A (16 units-and-gates x 16 or 8 of K) * B (K x 8 rows of the batch)
INLINE void multiply(float (&sum)[4], uint4 a, uint32 b0, uint32 b1) {
#if !SHORT
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
#elif BFLOAT
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// A place so many bytes on. A cast to a number and back would make the compiler forget that it is in global memory.
template <class Value>
INLINE Value* moved_by(Value* place, int64 bytes) { return (Value*)((char*)place + bytes); }

#include "pairs.cuh"

// What sums of a gate are multiplied by: of SCALED ones, in 16 bits, a sigmoid alone reads them, and
// it begins with a product by a half. R, inputs and biases are halved instead, exact but for float16
// below 2^-13.
INLINE constexpr float scale_of(int gate) { return SCALED >> gate & 1 ? 0.5f : 1.0f; }

#if NARROW
INLINE uint32 halved(uint32 pair) {
    uint32 half;
#if BFLOAT
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(half) : "r"(pair), "r"(0x3f003f00), "r"(0x80008000));
#else
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(half) : "r"(pair), "r"(0x38003800), "r"(0x80008000));
#endif
    return half;
}
#endif

// 16 bytes of R, [GATES, units, units], in the row of a gate's unit from k on; zeros where H ends
INLINE uint4 chunk_of(const storage_t* matrix, int gate, int unit, int k, int64 units) {
    const int64 count = PADDED ? units : UNITS;
    const storage_t* const row = matrix + (gate * count + unit) * count + k;
    uint32 words[4];
#if !PADDED && !HALF
    const uint4 found = *reinterpret_cast<const uint4*>(row);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
#else
#if PADDED
    storage_t found[CHUNK_K];
    #pragma unroll
    for (int i = 0; i < CHUNK_K; ++i) found[i] = unit < units && k + i < units ? row[i] : storage_t(0);
#else
    const float4 low = reinterpret_cast<const float4*>(row)[0], high = reinterpret_cast<const float4*>(row)[1];
    const float found[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#endif
    #pragma unroll
    for (int i = 0; i < 4; ++i)
#if HALF
        words[i] = pack(found[2 * i], found[2 * i + 1]);
#elif NARROW
        words[i] = uint32(found[2 * i]) | uint32(found[2 * i + 1]) << 16;
#else
        words[i] = __float_as_uint(found[i]);
#endif
#endif
#if NARROW
    if (SCALED >> gate & 1)
        #pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = halved(words[i]);
#endif
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// The same value, which the compiler cannot compute anew at each step instead of holding it.
template <class Number>
INLINE Number pinned(Number value) { return __shfl_sync(~0u, value, threadIdx.x & 31); }
// the same where there are registers for it
template <class Number>
INLINE Number handy(Number value) { return FRUGAL ? value : pinned(value); }

// The thread's number, and an argument, anew: what is found from them after a loop need not be held in it.
INLINE int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
INLINE int64 anew(int64 argument) {
    int64 same;
    asm volatile("mov.b64 %0, %1;" : "=l"(same) : "l"(argument));
    return same;
}

INLINE uint32 shared_address(const void* place) {
    return uint32(__cvta_generic_to_shared(place));
}

// where in matrices of 8 rows x 8 units a lane reads first
INLINE int side_of(int lane) { return NARROW ? lane * 16 : ((lane & 3) * 16 + (lane >> 2)) * 4; }

// COUNT such matrices in 16 bits, 128 bytes each, as `transposed` takes them: unit lane / 4 in rows
// 2 * (lane % 4) and the next; source: with `side_of`, of which a read of fewer than four matrices takes
// that of the first lanes only
template <int COUNT>
INLINE void read_flipped(const unsigned char* source, uint32 (&bits)[COUNT]) {
#if NARROW
    const uint32 place = shared_address(source);
    #pragma unroll
    for (int i = 0; i + 4 <= COUNT; i += 4)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[i]), "=r"(bits[i + 1]), "=r"(bits[i + 2]), "=r"(bits[i + 3])
                     : "r"(place + i * 128) : "memory");
    if (COUNT & 2) {
        constexpr int PAIR = COUNT & 2 ? COUNT & ~3 : 0;
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(bits[PAIR]), "=r"(bits[PAIR + 1 < COUNT ? PAIR + 1 : PAIR])
                     : "r"(place + PAIR * 128) : "memory");
    }
    if (COUNT & 1)
        asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                     : "=r"(bits[COUNT - 1]) : "r"(place + (COUNT - 1) * 128) : "memory");
#endif
}

// COUNT such matrices as floats of this lane's two cells
template <int COUNT>
INLINE void read_sides(const unsigned char* source, float (*cells)[2]) {
#if NARROW
    uint32 bits[COUNT];
    read_flipped<COUNT>(source, bits);
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        cells[i][0] = widen(storage_t(bits[i]));
        cells[i][1] = widen(storage_t(bits[i] >> 16));
    }
#else
    #pragma unroll
    for (int i = 0; i < COUNT; ++i)
        #pragma unroll
        for (int c = 0; c < 2; ++c)
            cells[i][c] = reinterpret_cast<const float*>(source)[i * 64 + c * 8];
#endif
}

// the sum of the four lanes that have one unit in all rows of a tile
INLINE float over_lanes(float mine) {
    mine += __shfl_xor_sync(~0u, mine, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}

template <int BYTES>
INLINE void copy_async(uint32 target, const void* source, int taken) {  // the rest becomes zeros
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
                     "r"(taken) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source),
                     "n"(BYTES), "r"(taken) : "memory");
}

INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
INLINE void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Groups of 8 units are dealt out evenly: a block owns those from its first to the next block's.
INLINE int first_group_of(int block) { return (block * (UNITS / 8) + CLUSTER - 1) / CLUSTER; }
INLINE int owner_of(int group) { return group * CLUSTER / (UNITS / 8); }

#if CLUSTER > 1
INLINE int block_of_cluster() {  // found anew wherever it is asked for
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// where a place in this block's shared memory lies in another block's
INLINE uint32 remote(uint32 place, int block) {
    uint32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(place), "r"(block));
    return there;
}

// every block has come here, and sees what the others wrote before
INLINE void await_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::
                     : "memory");
}

// the four warps of a warpgroup have come here
INLINE void await_warpgroup(int number) {
    asm volatile("barrier.sync %0, 128;" ::"r"(number + 1) : "memory");
}

// one thread says how many bytes the next letter has
INLINE void expect(uint32 mailbox, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mailbox),
                 "r"(bytes) : "memory");
}

// COUNT mailboxes await their first letters; with SECONDS only the second of each pair. What all threads
// wrote before is seen by all.
template <int COUNT, bool SECONDS = false>
INLINE void open_mailboxes(uint32 mailboxes, int bytes) {
    const uint32 mailbox = mailboxes + threadIdx.x * 8;
    if (threadIdx.x < COUNT) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(mailbox) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < COUNT && (!SECONDS || threadIdx.x & 1)) expect(mailbox, bytes);
}

INLINE void send(uint32 target, uint4 value, uint32 mailbox) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(target), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w), "r"(mailbox) : "memory");
}

INLINE void send(uint32 target, float low, float high, uint32 mailbox) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 "
                 "[%0], {%1, %2}, [%3];" ::"r"(target), "r"(__float_as_uint(low)),
                 "r"(__float_as_uint(high)), "r"(mailbox) : "memory");
}

// Waits for the letter of a phase; SPIN_LIMIT 0 waits for ever, as only a tested kernel may. The scope
// is the block's, as where CUTLASS waits for other blocks' copies: what comes lies in its own shared
// memory. That of the cluster would empty L1 at each step.
INLINE void await(uint32 mailbox, uint32 phase) {
    uint32 here = 0;
#if SPIN_LIMIT
    for (int tries = 0; tries < SPIN_LIMIT; ++tries) {
#else
    while (true) {
#endif
        asm volatile("{\n.reg .pred here;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 here, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, here;\n}" : "=r"(here) : "r"(mailbox), "r"(phase)
                     : "memory");
        if (here) return;
    }
#if SPIN_LIMIT
    __trap();
#endif
}
#else
INLINE int block_of_cluster() { return 0; }

template <int COUNT, bool SECONDS = false>
INLINE void open_mailboxes(uint32, int) {
    __syncthreads();
}
#endif

// the row of the batch that each row of a cluster's tiles is, or -1; order: none is the plain one
template <int COUNT, int THREADS>
INLINE void number_rows(int* rows, int64 first, int64 batch, const int64* order) {
    for (int r = threadIdx.x; r < COUNT; r += THREADS) {
        const int64 place = first + r;
        rows[r] = place >= batch ? -1 : order ? int(order[place]) : int(place);
    }
}

#include "functions.cuh"
