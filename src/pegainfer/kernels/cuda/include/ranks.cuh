// How the ranks of a group write to each other's memory, and wait for each other.
//
// Every rank has exchange memory that all ranks have mapped (runtime/cuda/peers.py). Ranks only write to the
// memory of others, and only read their own, since a read over the link takes twice as long. Sums are
// counted, and alternate between two sets of slots: when a rank joins a sum it has ended the one before, so
// by the time that all have joined, the slots of the sum before may be written again.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"

namespace ranks {

constexpr int MAX_RANKS = 8, MAX_BLOCKS = 128, PHASES = 2;
constexpr int HEAD_BYTES = 1 << 16;        // flags; then the slots of tagged values, then the others
constexpr int64_t TAGGED_BYTES = 1 << 21;  // of a slot of tagged values
// Words that a rank sends at a time for a row of the sampler, to two places in turn; rows of a launch.
constexpr int WORDS = 512, SAMPLED_ROWS = 64;
constexpr int64_t SAMPLED_BYTES = 2 * WORDS * SAMPLED_ROWS * 16;
static_assert(PHASES * MAX_RANKS * MAX_BLOCKS * sizeof(int64_t) <= HEAD_BYTES);
constexpr int POLLS = 1024;  // between two looks at the clock and at the host's memory

// Where rank `from` writes the number of the last sum whose phase its block has done, in memory at `base`.
__device__ __forceinline__ int64_t* flag(uint8_t* base, int phase, int from, int block) {
    return reinterpret_cast<int64_t*>(base) + (phase * MAX_RANKS + from) * MAX_BLOCKS + block;
}

// What rank `from` writes in a phase of sum `number`, in memory at `base`.
__device__ __forceinline__ uint8_t* slot(const Control& c, uint8_t* base, int phase, int64_t number,
                                         int from) {
    const int64_t set = (number & 1) * PHASES + phase;
    return base + HEAD_BYTES + 2 * c.count * (TAGGED_BYTES + SAMPLED_BYTES) +
           (set * c.count + from) * c.part_bytes;
}

// Where rank `from` writes its values for sum `number`, each with the number beside it.
__device__ __forceinline__ uint4* tagged_slot(const Control& c, uint8_t* base, int64_t number, int from) {
    return reinterpret_cast<uint4*>(base + HEAD_BYTES + ((number & 1) * c.count + from) * TAGGED_BYTES);
}

// Where rank `from` writes words for row `row` of launch `number` of the sampler.
__device__ __forceinline__ uint4* sampled_slot(const Control& c, uint8_t* base, int64_t number, int from,
                                               int row) {
    const int64_t before = HEAD_BYTES + 2 * c.count * TAGGED_BYTES;
    const int64_t at = ((number & 1) * c.count + from) * SAMPLED_BYTES;
    return reinterpret_cast<uint4*>(base + before + at) + row * 2 * WORDS;
}

// How long a rank has waited for another one. The first to wait too long ends the group; the word that says
// so is that of kernels/cpu/csrc/ranks.h.
struct Patience {
    uint64_t began = 0;
    int polls = 0;

    // Whether to stop waiting, because the group has failed: what comes of the step is then not used
    // (runner/parts.py).
    __device__ __forceinline__ bool ends(const Control& c, int peer) {
        if (++polls % POLLS != 0) return false;
        if (load_system(c.failed) != 0) return true;
        const uint64_t now = nanoseconds();
        if (began == 0) began = now;
        if (now - began <= static_cast<uint64_t>(c.limit)) return false;
        store_system(c.failed, -1 - peer);
        return true;
    }
};

// The last block to have read the number of a sum counts it, while others wait for other ranks.
__device__ __forceinline__ void count(Control* c, int64_t number) {
    const unsigned last = gridDim.x * gridDim.y - 1;
    if (threadIdx.x != blockDim.x - 1 || atomicAdd(&c->arrived, 1u) != last) return;
    c->arrived = 0;
    c->joined = number;
}

// Says to all ranks that this block has done a phase of sum `number`, and returns when their blocks have.
// `shared`: where the sum is counted; null: it is counted elsewhere.
__device__ __forceinline__ void meet(Control* shared, const Control& c, int phase, int64_t number) {
    __syncthreads();  // the block's writes are done
    const int peer = threadIdx.x;
    const bool other = peer < c.count && peer != c.rank;
    if (other) store_release(flag(c.peers[peer].base, phase, c.rank, blockIdx.x), number);
    if (shared != nullptr) count(shared, number);
    if (other) {
        const int64_t* const said = flag(c.peers[c.rank].base, phase, peer, blockIdx.x);
        Patience patience;
        while (load_acquire(said) < number && !patience.ends(c, peer)) {
        }
    }
    __syncthreads();
}

constexpr int THREADS = 256, WIDTH = 4;  // WIDTH: values a thread and access
using Part = Vec<float, WIDTH>;

// This block's share of `count` values.
struct Span {
    int64_t first, last;
    __device__ explicit Span(int64_t count) {
        const int64_t groups = (count + WIDTH - 1) / WIDTH, each = (groups + gridDim.x - 1) / gridDim.x;
        first = blockIdx.x * each * WIDTH;
        last = min(first + each * WIDTH, count);
    }
};

#define EACH(I, SPAN)                                                                           \
    for (int64_t I = (SPAN).first + static_cast<int64_t>(threadIdx.x) * WIDTH; I < (SPAN).last; \
         I += THREADS * WIDTH)

// Written by others while this kernel runs, so not read through L1.
template <typename V, typename T>
__device__ __forceinline__ V received(const T* p) {
    V v;
    if constexpr (sizeof(V) == 16)
        *reinterpret_cast<float4*>(&v) = __ldcg(reinterpret_cast<const float4*>(p));
    else
        *reinterpret_cast<float2*>(&v) = __ldcg(reinterpret_cast<const float2*>(p));
    return v;
}

}  // namespace ranks
