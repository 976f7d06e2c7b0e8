// op gated_rms_norm: out = x / sqrt(mean(x², over D) + eps) · weight · silu(gate), a warp a head.
#include "ptx.cuh"
#include "reduce.cuh"

// out, x: [T, H, D]; gate: [T, gate_stride], of which H · D are read; weight: [D] float32; `heads`: T · H in
// all, `each`: H; N elements a lane and access, D and gate_stride multiples of N.
template <typename T, int N>
__device__ __forceinline__ void gated_rms_norm(T* out, const T* x, const T* gate, const float* weight,
                                               int64_t heads, int each, int d, int64_t gate_stride,
                                               float eps) {
    pdl_wait();
    pdl_launch();
    const int64_t head = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    if (head >= heads) return;
    const int start = (threadIdx.x & 31) * N;
    const T *from = x + head * d, *by = gate + head / each * gate_stride + head % each * d;
    T* to = out + head * d;
    float sum = 0;
    for (int i = start; i < d; i += 32 * N) {
        auto v = load<T, N>(from + i);
#pragma unroll
        for (int j = 0; j < N; j++) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
    }
    const float scale = rsqrtf(warp_sum(sum) / d + eps);
    for (int i = start; i < d; i += 32 * N) {
        auto v = load<T, N>(from + i), g = load<T, N>(by + i);
        auto w = load<float, N>(weight + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float z = to_f32(g.v[j]);
            v.v[j] = from_f32<T>(to_f32(v.v[j]) * scale * w.v[j] * (z / (1.f + expf(-z))));
        }
        store(to + i, v);
    }
}

#define KERNEL(NAME, T, N)                                                                           \
    extern "C" __global__ void __launch_bounds__(256)                                                \
        NAME(T* out, const T* x, const T* gate, const float* weight, int64_t heads, int each, int d, \
             int64_t gate_stride, float eps) {                                                       \
        gated_rms_norm<T, N>(out, x, gate, weight, heads, each, d, gate_stride, eps);                \
    }

// variant gated_rms_norm_bf16: dtype=bf16 multiple=4
KERNEL(gated_rms_norm_bf16, bf16, 4)
// variant gated_rms_norm_f16: dtype=f16 multiple=4
KERNEL(gated_rms_norm_f16, f16, 4)
// variant gated_rms_norm_f32: dtype=f32 multiple=4
KERNEL(gated_rms_norm_f32, float, 4)
// variant gated_rms_norm_bf16_any: dtype=bf16 multiple=1
KERNEL(gated_rms_norm_bf16_any, bf16, 1)
// variant gated_rms_norm_f16_any: dtype=f16 multiple=1
KERNEL(gated_rms_norm_f16_any, f16, 1)
// variant gated_rms_norm_f32_any: dtype=f32 multiple=1
KERNEL(gated_rms_norm_f32_any, float, 1)
