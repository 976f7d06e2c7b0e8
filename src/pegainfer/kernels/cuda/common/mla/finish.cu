// op mla_qkv_append: queries rotated and latents cached, of published models' sizes in 16 bits, a warp a head
// or latent. Whatever the projection did not write is requested before griddepcontrol.wait, so that a token
// waits for memory once.
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace mla {

constexpr int RANK = 512, ROTATED = 64, KEPT = 128, PAIRS = ROTATED / 2;
static_assert(PAIRS == 32);  // one a lane

struct Rotation {
    float cosine, sine;
    __device__ __forceinline__ Rotation(const AppendArgs& a, int token, int lane) {
        const float* angles = a.cos_sin + static_cast<int64_t>(a.positions[token]) * ROTATED;
        cosine = angles[lane], sine = angles[PAIRS + lane];
    }
    template <typename T>
    __device__ __forceinline__ void apply(T* to, T low, T high, int lane) const {
        const float x = to_f32(low), y = to_f32(high);
        to[lane] = from_f32<T>(x * cosine - y * sine);
        to[PAIRS + lane] = from_f32<T>(y * cosine + x * sine);
    }
};

// A token's row of the cache: a lane has channels 8 lane … of either half of the latent.
template <typename T>
__device__ __forceinline__ void append_row(const AppendArgs& a, const T* from, int token, int lane) {
    const int slot = a.slots[token];
    const Rotation rotation(a, token, lane);
    float4 norm[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            norm[i][j] = *reinterpret_cast<const float4*>(a.norm + i * 256 + lane * 8 + j * 4);
    pdl_wait();
    pdl_launch();
    uint4 x[2];
#pragma unroll
    for (int i = 0; i < 2; i++) x[i] = *reinterpret_cast<const uint4*>(from + i * 256 + lane * 8);
    const T low = from[RANK + lane], high = from[RANK + PAIRS + lane];
    if (slot < 0) return;
    float v[2][8], sum = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const T* e = reinterpret_cast<const T*>(&x[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = to_f32(e[j]), sum += v[i][j] * v[i][j];
    }
    const float scale = rsqrtf(warp_sum(sum) / RANK + a.eps);
    T* to = static_cast<T*>(a.kv) + slot / a.block_size * a.page_stride +
            static_cast<int64_t>(slot % a.block_size) * (RANK + ROTATED);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* n = reinterpret_cast<const float*>(norm[i]);
        uint4 packed;
        uint32_t* words = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack2<T>(v[i][2 * j] * scale * n[2 * j], v[i][2 * j + 1] * scale * n[2 * j + 1]);
        *reinterpret_cast<uint4*>(to + i * 256 + lane * 8) = packed;
    }
    rotation.apply(to + RANK, low, high, lane);
}

// Unit h of a token is the latent, which lies behind the heads in memory.
template <typename T>
__device__ __forceinline__ void finish_rows(const AppendArgs& a) {
    const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31, token = unit / (a.h + 1), head = unit % (a.h + 1);
    if (token >= a.tokens) {
        pdl_wait();
        return;
    }
    const T* latent = static_cast<const T*>(a.latent) + token * a.stride;
    if (head == a.h) {
        append_row<T>(a, latent, token, lane);
        return;
    }
    const Rotation rotation(a, token, lane);
    pdl_wait();
    pdl_launch();
    const T* from = latent + (head - a.h) * (KEPT + ROTATED);
    T* to = static_cast<T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * (KEPT + ROTATED);
    const T low = from[KEPT + lane], high = from[KEPT + PAIRS + lane];
    if (lane < KEPT / 8) reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
    rotation.apply(to + KEPT, low, high, lane);
}

}  // namespace mla

#define FINISH_KERNEL(TYPE, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256) mla_finish_##TYPE##_r512(mla::AppendArgs a) { \
        mla::finish_rows<T>(a);                                                                     \
    }

// variant mla_finish_bf16_r512: dtype=bf16
FINISH_KERNEL(bf16, bf16)
// variant mla_finish_f16_r512: dtype=f16
FINISH_KERNEL(f16, f16)
