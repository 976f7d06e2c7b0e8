// op silu_mul: out = gate · sigmoid(gate) · up (arXiv:2002.05202).
#include "ptx.cuh"

// exp(-g) overflows to infinity for a very negative gate, and the quotient is then the right -0.
__device__ __forceinline__ float silu_mul_of(float gate, float up) {
    return gate / (1.f + expf(-gate)) * up;
}

// gate, up, out: n elements, n a multiple of N.
template <typename T, int N>
__device__ __forceinline__ void silu_mul(T* out, const T* gate, const T* up, int64_t n) {
    pdl_wait();
    pdl_launch();
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * N;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) {
        auto g = load<T, N>(gate + i), u = load<T, N>(up + i);
#pragma unroll
        for (int j = 0; j < N; j++) g.v[j] = from_f32<T>(silu_mul_of(to_f32(g.v[j]), to_f32(u.v[j])));
        store(out + i, g);
    }
}

// Gate and up side by side, as the fused projection with rows in turn leaves them: gate_up[i] = (gate, up).
template <typename T, int N>
__device__ __forceinline__ void silu_mul_pairs(T* out, const T* gate_up, int64_t n) {
    pdl_wait();
    pdl_launch();
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * N;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N; i < n; i += step) {
        auto both = load<T, 2 * N>(gate_up + 2 * i);
        Vec<T, N> o;
#pragma unroll
        for (int j = 0; j < N; j++)
            o.v[j] = from_f32<T>(silu_mul_of(to_f32(both.v[2 * j]), to_f32(both.v[2 * j + 1])));
        store(out + i, o);
    }
}

#define KERNEL(TYPE, T, N)                                               \
    extern "C" __global__ void __launch_bounds__(256)                    \
        silu_mul_##TYPE(T* out, const T* gate, const T* up, int64_t n) { \
        silu_mul<T, N>(out, gate, up, n);                                \
    }                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                    \
        silu_mul_pairs_##TYPE(T* out, const T* gate_up, int64_t n) {     \
        silu_mul_pairs<T, N>(out, gate_up, n);                           \
    }

// variant silu_mul_bf16: dtype=bf16 multiple=8
// variant silu_mul_pairs_bf16: dtype=bf16 multiple=8 layout=pairs
KERNEL(bf16, bf16, 8)
// variant silu_mul_bf16_any: dtype=bf16 multiple=1
// variant silu_mul_pairs_bf16_any: dtype=bf16 multiple=1 layout=pairs
KERNEL(bf16_any, bf16, 1)
// variant silu_mul_f16: dtype=f16 multiple=8
// variant silu_mul_pairs_f16: dtype=f16 multiple=8 layout=pairs
KERNEL(f16, f16, 8)
// variant silu_mul_f16_any: dtype=f16 multiple=1
// variant silu_mul_pairs_f16_any: dtype=f16 multiple=1 layout=pairs
KERNEL(f16_any, f16, 1)
// variant silu_mul_f32: dtype=f32 multiple=4
// variant silu_mul_pairs_f32: dtype=f32 multiple=4 layout=pairs
KERNEL(f32, float, 4)
// variant silu_mul_f32_any: dtype=f32 multiple=1
// variant silu_mul_pairs_f32_any: dtype=f32 multiple=1 layout=pairs
KERNEL(f32_any, float, 1)
