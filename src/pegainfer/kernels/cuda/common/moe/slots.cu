// op expert_gate_up, expert_down, moe: slots sorted by expert, and each token's weighted sum.
#include "ptx.cuh"
#include "slots.cuh"

using slots::SortArgs;
using slots::SpreadArgs;
using slots::SumArgs;

constexpr int THREADS = 1024;

// One block; num_experts numbers of shared memory.

// variant sort_slots: dtype=i32
extern "C" __global__ void __launch_bounds__(THREADS) sort_slots(const SortArgs a) {
    extern __shared__ int counts[];
    __shared__ int64_t scratch[32];
    pdl_wait();
    pdl_launch();
    slots::sort<THREADS>(a, counts, scratch);
}

// Grid: the rows of x, each of which is read once. m is a multiple of 8.

// variant spread_rows_16: dtype=bf16 multiple=8
extern "C" __global__ void __launch_bounds__(1024) spread_rows_16(const SpreadArgs a) {
    pdl_wait();
    pdl_launch();
    const uint4* from = static_cast<const uint4*>(a.x) + static_cast<int64_t>(blockIdx.x) * (a.m / 8);
    const int* places = a.places + static_cast<int64_t>(blockIdx.x) * a.each;
    for (int i = threadIdx.x; i < a.m / 8; i += blockDim.x) {
        const uint4 v = from[i];
        for (int s = 0; s < a.each; s++) {
            const int place = places[s];
            if (place >= 0) static_cast<uint4*>(a.out)[static_cast<int64_t>(place) * (a.m / 8) + i] = v;
        }
    }
}

namespace {

// Grid: (T, M over the threads). A token's results are added up in the order of its slots. N elements an
// access.
template <typename T, int N>
__device__ __forceinline__ void sum(const SumArgs& a) {
    const int token = blockIdx.x, m = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    pdl_wait();
    pdl_launch();
    if (m >= a.m) return;
    Vec<float, N> total = {};
#pragma unroll 4
    for (int slot = token * a.k; slot < (token + 1) * a.k; slot++) {
        const int e = a.experts[slot];
        if (e < 0 || e >= a.num_experts) continue;
        const int64_t row = a.places != nullptr ? a.places[slot] : slot;
        const auto v = load<T, N>(static_cast<const T*>(a.results) + row * a.m + m);
        const float gate = a.gates[slot];
#pragma unroll
        for (int i = 0; i < N; i++) total.v[i] += gate * to_f32(v.v[i]);
    }
    const int64_t at = static_cast<int64_t>(token) * a.m + m;
    if (a.residual == nullptr) {
        store(a.out + at, total);
        return;
    }
    T* x = static_cast<T*>(a.residual) + at;
    auto v = load<T, N>(x);
#pragma unroll
    for (int i = 0; i < N; i++) v.v[i] = from_f32<T>(to_f32(v.v[i]) + total.v[i]);
    store(x, v);
}

}  // namespace

#define SUM(NAME, T, N)                                                       \
    extern "C" __global__ void __launch_bounds__(256) NAME(const SumArgs a) { \
        sum<T, N>(a);                                                         \
    }
// variant sum_experts_bf16: dtype=bf16 multiple=8
SUM(sum_experts_bf16, bf16, 8)
// variant sum_experts_bf16_any: dtype=bf16 multiple=1
SUM(sum_experts_bf16_any, bf16, 1)
// variant sum_experts_f32: dtype=f32 multiple=4
SUM(sum_experts_f32, float, 4)
// variant sum_experts_f32_any: dtype=f32 multiple=1
SUM(sum_experts_f32_any, float, 1)
