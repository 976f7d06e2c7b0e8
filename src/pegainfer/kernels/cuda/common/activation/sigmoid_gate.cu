// op sigmoid_gate, gate_heads: x = x · sigmoid(gate).
#include "ptx.cuh"

// x: n elements in rows of `width`; gate: rows of as many, `stride` apart; all three multiples of N. exp(-g)
// overflows to infinity for a very negative gate: then x · 0.
template <typename T, int N>
__device__ __forceinline__ void sigmoid_gate(T* x, const T* gate, int64_t n, int width, int64_t stride) {
    pdl_wait();
    pdl_launch();
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * N;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) {
        auto v = load<T, N>(x + i), g = load<T, N>(gate + i / width * stride + i % width);
#pragma unroll
        for (int j = 0; j < N; j++) v.v[j] = from_f32<T>(to_f32(v.v[j]) / (1.f + expf(-to_f32(g.v[j]))));
        store(x + i, v);
    }
}

#define KERNEL(TYPE, T, N)                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                    \
        sigmoid_gate_##TYPE(T* x, const T* gate, int64_t n, int width, int64_t stride) { \
        sigmoid_gate<T, N>(x, gate, n, width, stride);                                   \
    }

// variant sigmoid_gate_bf16: dtype=bf16 multiple=8
KERNEL(bf16, bf16, 8)
// variant sigmoid_gate_bf16_any: dtype=bf16 multiple=1
KERNEL(bf16_any, bf16, 1)
// variant sigmoid_gate_f16: dtype=f16 multiple=8
KERNEL(f16, f16, 8)
// variant sigmoid_gate_f16_any: dtype=f16 multiple=1
KERNEL(f16_any, f16, 1)
// variant sigmoid_gate_f32: dtype=f32 multiple=4
KERNEL(f32, float, 4)
// variant sigmoid_gate_f32_any: dtype=f32 multiple=1
KERNEL(f32_any, float, 1)
