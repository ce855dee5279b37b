// What every kernel stands on: numbers, registers, addresses, copies, clusters, cell functions.

#include "config.cuh"
#include "numbers.cuh"

// The same value, but opaque: the compiler keeps it in a register instead of computing it again
// wherever it is used.
template <class Number>
INLINE Number keep_in_register(Number value) { return __shfl_sync(~0u, value, threadIdx.x & 31); }
template <class Number>
INLINE Number keep_if_room(Number value) { return LOW_REGISTER ? value : keep_in_register(value); }

// The opposite: read again, so that what a kernel needs after its loop holds no register in it.
INLINE int reread_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
INLINE int64 reread(int64 argument) {
    int64 same;
    asm volatile("mov.b64 %0, %1;" : "=l"(same) : "l"(argument));
    return same;
}

// The numbers of named barriers. Uses that share a number are in different kernels: stacks in
// clusters have no wgmma, and only kernels with multicast have warps that multiply and do no more.
enum NamedBarrier {
    LOOP_BARRIER = 1,       // the loop warps of a stack
    INPUT_BARRIER = 2,      // its input warps
    PRODUCT_BARRIER = 1,    // the warps that multiply, with multicast
    WARPGROUP_BARRIERS = 1  // of the first warpgroup; the next ones follow
};
template <int NUMBER, int THREADS>
INLINE void sync_barrier() {
    asm volatile("barrier.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// A pointer so many bytes on. Through an integer the compiler would forget that it is to global
// memory.
template <class Value>
INLINE Value* advanced(Value* place, int64 bytes) { return (Value*)((char*)place + bytes); }

extern __shared__ __align__(128) unsigned char shared[];  // of the block

INLINE uint32 shared_address(const void* place) { return uint32(__cvta_generic_to_shared(place)); }

// cp.async of BYTES, of which `taken` are read and the others become zeros
template <int BYTES>
INLINE void copy_async(uint32 target, const void* source, int taken) {
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

// the sum over the four lanes that have one unit in all rows of a tile
INLINE float sum_over_rows(float mine) {
    mine += __shfl_xor_sync(~0u, mine, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}

// The final value of a state or of its gradient: float32 for the next time chunk, where there is
// one, at `first + at`; else in storage_t for the caller.
INLINE void store_end(float* chunk_out, storage_t* end, int64 first, int64 at, float value) {
    if (chunk_out)
        chunk_out[first + at] = value;
    else
        end[at] = narrow(value);
}

// The batch row at a place of the tiles in which all loops save activations: with lengths rows lie
// there by falling length.
template <bool SORTED, class Args>
INLINE int64 row_of(const Args& args, int64 place) {
    return SORTED ? args.order[place] : place;
}

// The batch row of each row of the block's tiles, the first at place `first`; -1 past the batch.
template <bool SORTED, int COUNT, int THREADS, class Args>
INLINE void number_rows(const Args& args, int* rows, int64 first) {
    for (int r = threadIdx.x; r < COUNT; r += THREADS) {
        const int64 place = first + r;
        rows[r] = place >= args.batch ? -1 : int(row_of<SORTED>(args, place));
    }
}

// Zeros in shared memory from `begin` to `end`, multiples of 16 bytes.
template <int THREADS>
INLINE void clear_shared(int begin, int end) {
    for (int at = begin + threadIdx.x * 16; at < end; at += THREADS * 16)
        *reinterpret_cast<uint4*>(shared + at) = make_uint4(0, 0, 0, 0);
}

// The arguments of a launch: of a stack those of each layer.
template <class Args>
struct Layers {
    Args layers[LAYERS];
};

#include "fragments.cuh"
#include "cluster.cuh"
#include "functions.cuh"
