// op expert_gate_up, expert_down: slots sorted by expert, and each token's weighted sum.
#include "arguments.cuh"
#include "ptx.cuh"

using slots::SortArgs;
using slots::SumArgs;

constexpr int THREADS = 1024;
constexpr int TILE_SLOTS = 64;  // as experts.cuh has it

// One block; 2 · N + 1 numbers of shared memory. The order of an expert's slots may differ from run to run,
// which changes no result: every slot's sums are its own.

// variant sort_slots: dtype=i32
extern "C" __global__ void __launch_bounds__(THREADS) sort_slots(const SortArgs a) {
    extern __shared__ int shared[];
    int *starts = shared, *next = shared + a.num_experts + 1;
    pdl_wait();
    pdl_launch();
    for (int e = threadIdx.x; e < a.num_experts; e += THREADS) next[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += THREADS) {
        const int e = a.experts[i];
        if (e >= 0 && e < a.num_experts) {
            atomicAdd(next + e, 1);
        } else if (a.zeroed != nullptr) {
            uint8_t* row = a.zeroed + static_cast<int64_t>(i) * a.row_bytes;
            for (int b = 0; b < a.row_bytes; b++) row[b] = 0;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int first = 0, in_use = 0;
        for (int e = 0; e < a.num_experts; e++) {
            starts[e] = first;
            for (int at = 0; at < next[e]; at += TILE_SLOTS)
                a.blocks[in_use++] = make_int4(e, first + at, min(next[e] - at, TILE_SLOTS), 0);
            first += next[e];
        }
        *a.in_use = in_use;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < a.num_experts; e += THREADS) next[e] = starts[e];
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += THREADS) {
        const int e = a.experts[i];
        if (e >= 0 && e < a.num_experts) a.order[atomicAdd(next + e, 1)] = i;
    }
}

namespace {

// Grid: (T, M over the threads). A token's results are added up in the order of its slots.
template <typename T>
__device__ __forceinline__ void sum(const SumArgs& a) {
    const int token = blockIdx.x, m = blockIdx.y * blockDim.x + threadIdx.x;
    pdl_wait();
    pdl_launch();
    if (m >= a.m) return;
    float total = 0;
    for (int slot = token * a.k; slot < (token + 1) * a.k; slot++) {
        const int e = a.experts[slot];
        if (e < 0 || e >= a.num_experts) continue;
        total +=
            a.gates[slot] * to_f32(static_cast<const T*>(a.results)[static_cast<int64_t>(slot) * a.m + m]);
    }
    a.out[static_cast<int64_t>(token) * a.m + m] = total;
}

}  // namespace

#define SUM(NAME, T)                                                          \
    extern "C" __global__ void __launch_bounds__(256) NAME(const SumArgs a) { \
        sum<T>(a);                                                            \
    }
// variant sum_experts_bf16: dtype=bf16
SUM(sum_experts_bf16, bf16)
// variant sum_experts_f16: dtype=f16
SUM(sum_experts_f16, f16)
// variant sum_experts_f32: dtype=f32
SUM(sum_experts_f32, float)
