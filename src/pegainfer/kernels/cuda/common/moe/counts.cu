// op moe: how many tokens each expert was given, added to totals since the start.
#include <cstdint>

// A block counts a layer. choices: of each layer the address of [T, K], of whose tokens the first `tokens`
// count. totals: [layers, N]. Shared memory: N numbers.

// variant count_experts: dtype=i32
extern "C" __global__ void __launch_bounds__(256)
    count_experts(unsigned long long* totals, const int* const* choices, int tokens, int k, int n) {
    extern __shared__ unsigned counts[];
    const int* chosen = choices[blockIdx.x];
    for (int e = threadIdx.x; e < n; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * k; i += blockDim.x) {
        const int e = chosen[i];
        if (e >= 0 && e < n) atomicAdd(counts + e, 1u);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n; e += blockDim.x)
        totals[static_cast<int64_t>(blockIdx.x) * n + e] += counts[e];
}
