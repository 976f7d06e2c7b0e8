// op rope_tail, latent_append: what follows the projections of latent attention, a warp a head or token.
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace {

// Rotates b channels by a position's angles: pairs (i, i + b / 2).
template <typename T>
__device__ __forceinline__ void rotate(T* to, const T* from, const float* angles, int b, int lane) {
    const int half = b / 2;
    for (int i = lane; i < half; i += 32) {
        const float low = to_f32(from[i]), high = to_f32(from[i + half]), c = angles[i], s = angles[i + half];
        to[i] = from_f32<T>(low * c - high * s);
        to[i + half] = from_f32<T>(high * c + low * s);
    }
}

// Caches a token's row: norm of its latent, and its rotated key.
template <typename T>
__device__ __forceinline__ void append(const mla::AppendArgs& a, const T* from, int token, int lane) {
    const int slot = a.slots[token], width = a.rank + a.rotated;
    if (slot < 0) return;
    T* to = static_cast<T*>(a.kv) + slot / a.block_size * a.page_stride +
            static_cast<int64_t>(slot % a.block_size) * width;
    float sum = 0;
    for (int i = lane; i < a.rank; i += 32) sum += to_f32(from[i]) * to_f32(from[i]);
    const float scale = rsqrtf(warp_sum(sum) / a.rank + a.eps);
    for (int i = lane; i < a.rank; i += 32) to[i] = from_f32<T>(to_f32(from[i]) * scale * a.norm[i]);
    const float* angles = a.cos_sin + static_cast<int64_t>(a.positions[token]) * a.rotated;
    rotate(to + a.rank, from + a.rank, angles, a.rotated, lane);
}

// x: [T, H, D] in place; cos_sin: [P, B], cosines of the B / 2 pairs, then sines.
template <typename T>
__device__ __forceinline__ void rope_tail(T* x, const int* positions, const float* cos_sin, int64_t heads,
                                          int h, int d, int b) {
    pdl_wait();
    pdl_launch();
    const int64_t head = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    if (head >= heads) return;
    T* tail = x + head * d + d - b;
    rotate(tail, tail, cos_sin + static_cast<int64_t>(positions[head / h]) * b, b, threadIdx.x & 31);
}

template <typename T>
__device__ __forceinline__ void latent_append(const mla::AppendArgs& a) {
    pdl_wait();
    pdl_launch();
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    if (token >= a.tokens) return;
    append<T>(a, static_cast<const T*>(a.latent) + token * a.stride, token, threadIdx.x & 31);
}

// A token's heads of queries, rotated, and its latent, cached: unit h of a token is the latent, after the
// heads in memory.
template <typename T>
__device__ __forceinline__ void finish(const mla::AppendArgs& a) {
    pdl_wait();
    pdl_launch();
    const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31, token = unit / (a.h + 1), head = unit % (a.h + 1);
    if (token >= a.tokens) return;
    const T* latent = static_cast<const T*>(a.latent) + token * a.stride;
    if (head == a.h) {
        append<T>(a, latent, token, lane);
        return;
    }
    const int kept = a.head_dim - a.rotated;
    const T* from = latent + (head - a.h) * a.head_dim;
    T* to = static_cast<T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * a.head_dim;
    for (int i = lane; i < kept; i += 32) to[i] = from[i];
    const float* angles = a.cos_sin + static_cast<int64_t>(a.positions[token]) * a.rotated;
    rotate(to + kept, from + kept, angles, a.rotated, lane);
}

}  // namespace

#define KERNELS(TYPE, T)                                                                        \
    extern "C" __global__ void __launch_bounds__(256) rope_tail_##TYPE(                         \
        T* x, const int* positions, const float* cos_sin, int64_t heads, int h, int d, int b) { \
        rope_tail<T>(x, positions, cos_sin, heads, h, d, b);                                    \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) latent_append_##TYPE(mla::AppendArgs a) { \
        latent_append<T>(a);                                                                    \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256) mla_finish_##TYPE(mla::AppendArgs a) {    \
        finish<T>(a);                                                                           \
    }

// variant rope_tail_f32: dtype=f32
// variant latent_append_f32: dtype=f32
// variant mla_finish_f32: dtype=f32
KERNELS(f32, float)
// variant rope_tail_bf16: dtype=bf16
// variant latent_append_bf16: dtype=bf16
// variant mla_finish_bf16: dtype=bf16
KERNELS(bf16, bf16)
// variant rope_tail_f16: dtype=f16
// variant latent_append_f16: dtype=f16
// variant mla_finish_f16: dtype=f16
KERNELS(f16, f16)
