// op rms_norm: out = x / sqrt(mean(x², over M) + eps) · weight, one block a row (arXiv:1910.07467).
#include "ptx.cuh"
#include "reduce.cuh"

// x, out: [T, M]; weight: [M] float32; N elements a thread and access, M a multiple of N.
template <typename T, int N>
__device__ __forceinline__ void rms_norm(T* out, const T* x, const float* weight, int m, float eps) {
    __shared__ float scratch[32];
    pdl_wait();
    pdl_launch();
    const T* row = x + static_cast<int64_t>(blockIdx.x) * m;
    T* to = out + static_cast<int64_t>(blockIdx.x) * m;
    float sum = 0;
    for (int i = threadIdx.x * N; i < m; i += blockDim.x * N) {
        auto v = load<T, N>(row + i);
#pragma unroll
        for (int j = 0; j < N; j++) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
    }
    const float scale = rsqrtf(block_sum(sum, scratch) / m + eps);
    for (int i = threadIdx.x * N; i < m; i += blockDim.x * N) {
        auto v = load<T, N>(row + i);
        auto w = load<float, N>(weight + i);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = from_f32<T>(to_f32(v.v[j]) * scale * w.v[j]);
        store(to + i, v);
    }
}

#define KERNEL(NAME, T, N)                                                \
    extern "C" __global__ void __launch_bounds__(1024)                    \
        NAME(T* out, const T* x, const float* weight, int m, float eps) { \
        rms_norm<T, N>(out, x, weight, m, eps);                           \
    }

// variant rms_norm_bf16: dtype=bf16 multiple=8
KERNEL(rms_norm_bf16, bf16, 8)
// variant rms_norm_f16: dtype=f16 multiple=8
KERNEL(rms_norm_f16, f16, 8)
// variant rms_norm_bf16_any: dtype=bf16 multiple=1
KERNEL(rms_norm_bf16_any, bf16, 1)
// variant rms_norm_f16_any: dtype=f16 multiple=1
KERNEL(rms_norm_f16_any, f16, 1)
// variant rms_norm_f32: dtype=f32 multiple=4
KERNEL(rms_norm_f32, float, 4)
// variant rms_norm_f32_any: dtype=f32 multiple=1
KERNEL(rms_norm_f32_any, float, 1)
