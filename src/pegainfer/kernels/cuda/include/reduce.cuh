// Sums and maxima over a warp or a block, in a fixed order: the same inputs give the same bits.
#pragma once
#include <cstdint>

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// All threads get the result. `scratch`: 32 elements of shared memory, free again after the next barrier.
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T v, T identity, T* scratch, Op op) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = op(v, __shfl_xor_sync(~0u, v, o));
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    __syncthreads();
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = lane < warps ? scratch[lane] : identity;
#pragma unroll
    for (int o = 16; o; o >>= 1) v = op(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
__device__ __forceinline__ float block_sum(float v, float* scratch) {
    return block_reduce(v, 0.f, scratch, [](float a, float b) { return a + b; });
}

// Sum of the values of lower threads, and the total through `total`. `scratch` as above.
template <typename T>
__device__ __forceinline__ T block_exclusive_scan(T v, T* scratch, T& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    T sum = v;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        T below = __shfl_up_sync(~0u, sum, o);
        if (lane >= o) sum += below;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    T before = 0;
    total = 0;
    for (int w = 0; w < warps; w++) {
        if (w == warp) before = total;
        total += scratch[w];
    }
    return before + sum - v;
}
