// op head_norm, rope, kv_append: work on whole heads, a warp a head. Not the fast path: norm_rope_append.cu
// does all three in one pass after the fused projection.
#include "ptx.cuh"
#include "reduce.cuh"
#include "store.cuh"

// A head of the launch: `head` counts heads of all tokens.
struct Head {
    int64_t head;
    int lane;
};
__device__ __forceinline__ Head this_head() {
    return {(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5,
            static_cast<int>(threadIdx.x & 31)};
}

// x: [heads, D] in place; weight: [D] float32.
template <typename T>
__device__ __forceinline__ void head_norm(T* x, const float* weight, int64_t heads, int d, float eps) {
    pdl_wait();
    pdl_launch();
    auto [head, lane] = this_head();
    if (head >= heads) return;
    T* p = x + head * d;
    float sum = 0;
    for (int i = lane; i < d; i += 32) sum += to_f32(p[i]) * to_f32(p[i]);
    const float scale = rsqrtf(warp_sum(sum) / d + eps);
    for (int i = lane; i < d; i += 32) p[i] = from_f32<T>(to_f32(p[i]) * scale * weight[i]);
}

// x: [T, H, D] in place; cos_sin: [P, D], cosines of the D/2 pairs, then sines.
template <typename T>
__device__ __forceinline__ void rope(T* x, const int* positions, const float* cos_sin, int64_t heads, int h,
                                     int d) {
    pdl_wait();
    pdl_launch();
    auto [head, lane] = this_head();
    if (head >= heads) return;
    T* p = x + head * d;
    const int half = d / 2;
    const float* table = cos_sin + static_cast<int64_t>(positions[head / h]) * d;
    for (int i = lane; i < half; i += 32) {
        const float a = to_f32(p[i]), b = to_f32(p[i + half]), c = table[i], s = table[i + half];
        p[i] = from_f32<T>(a * c - b * s);
        p[i + half] = from_f32<T>(b * c + a * s);
    }
}

// k, v: [T, G, D]; kv: the layer's part of the first page, pages `page_stride` elements apart, each
// [2, G, S, D]. A negative slot (padding) writes nothing.
template <typename T>
__device__ __forceinline__ void kv_append(T* kv, const T* k, const T* v, const int* slots, int64_t heads,
                                          int g, int d, int block_size, int64_t page_stride) {
    pdl_wait();
    pdl_launch();
    auto [head, lane] = this_head();
    if (head >= heads) return;
    const int slot = slots[head / g];
    if (slot < 0) return;
    T* to = kv + slot / block_size * page_stride +
            (static_cast<int64_t>(head % g) * block_size + slot % block_size) * d;
    const int64_t values = static_cast<int64_t>(g) * block_size * d;
    for (int i = lane; i < d; i += 32) {
        to[i] = k[head * d + i];
        to[values + i] = v[head * d + i];
    }
}

#define KERNELS(TYPE, T)                                                                               \
    extern "C" __global__ void __launch_bounds__(256)                                                  \
        head_norm_##TYPE(T* x, const float* weight, int64_t heads, int d, float eps) {                 \
        head_norm<T>(x, weight, heads, d, eps);                                                        \
    }                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                  \
        rope_##TYPE(T* x, const int* positions, const float* cos_sin, int64_t heads, int h, int d) {   \
        rope<T>(x, positions, cos_sin, heads, h, d);                                                   \
    }                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                  \
        kv_append_##TYPE(T* kv, const T* k, const T* v, const int* slots, int64_t heads, int g, int d, \
                         int block_size, int64_t page_stride) {                                        \
        kv_append<T>(kv, k, v, slots, heads, g, d, block_size, page_stride);                           \
    }

// The same into a cache of 8-bit floats.
template <typename T>
__device__ __forceinline__ void kv_append_e4m3(e4m3* kv, const T* k, const T* v, const int* slots,
                                               int64_t heads, int g, int d, int block_size,
                                               int64_t page_stride, float k_inverse, float v_inverse) {
    pdl_wait();
    pdl_launch();
    auto [head, lane] = this_head();
    if (head >= heads) return;
    const int slot = slots[head / g];
    if (slot < 0) return;
    e4m3* to = kv + slot / block_size * page_stride +
               (static_cast<int64_t>(head % g) * block_size + slot % block_size) * d;
    const int64_t values = static_cast<int64_t>(g) * block_size * d;
    for (int i = lane; i < d; i += 32) {
        to[i] = to_e4m3(to_f32(k[head * d + i]), k_inverse);
        to[values + i] = to_e4m3(to_f32(v[head * d + i]), v_inverse);
    }
}

#define E4M3_KERNEL(TYPE, T)                                                                             \
    extern "C" __global__ void __launch_bounds__(256) kv_append_##TYPE##_f8_e4m3(                        \
        e4m3* kv, const T* k, const T* v, const int* slots, int64_t heads, int g, int d, int block_size, \
        int64_t page_stride, float k_inverse, float v_inverse) {                                         \
        kv_append_e4m3<T>(kv, k, v, slots, heads, g, d, block_size, page_stride, k_inverse, v_inverse);  \
    }
// variant kv_append_bf16_f8_e4m3: dtype=bf16 cache=f8_e4m3
E4M3_KERNEL(bf16, bf16)
// variant kv_append_f32_f8_e4m3: dtype=f32 cache=f8_e4m3
E4M3_KERNEL(f32, float)

// variant head_norm_bf16: dtype=bf16
// variant rope_bf16: dtype=bf16
// variant kv_append_bf16: dtype=bf16
KERNELS(bf16, bf16)
// variant head_norm_f16: dtype=f16
// variant rope_f16: dtype=f16
// variant kv_append_f16: dtype=f16
KERNELS(f16, f16)
// variant head_norm_f32: dtype=f32
// variant rope_f32: dtype=f32
// variant kv_append_f32: dtype=f32
KERNELS(f32, float)
