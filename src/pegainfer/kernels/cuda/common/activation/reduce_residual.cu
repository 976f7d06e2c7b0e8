// op reduce_residual: x += partial, which is float32 whatever x is.
#include "ptx.cuh"

template <typename T>
__device__ __forceinline__ void reduce_residual(T* x, const float* partial, int64_t n) {
    pdl_wait();
    pdl_launch();
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        x[i] = from_f32<T>(to_f32(x[i]) + partial[i]);
}

#define KERNEL(NAME, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) NAME(T* x, const float* partial, int64_t n) { \
        reduce_residual<T>(x, partial, n);                                                          \
    }
// variant reduce_residual_bf16: dtype=bf16
KERNEL(reduce_residual_bf16, bf16)
// variant reduce_residual_f16: dtype=f16
KERNEL(reduce_residual_f16, f16)
// variant reduce_residual_f32: dtype=f32
KERNEL(reduce_residual_f32, float)
