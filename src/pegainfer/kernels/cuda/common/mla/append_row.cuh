// Rotations and the cache's append for latents of 512 numbers with 64 rotated ones, in 16 bits, by a warp.
// Whatever the projection did not write is requested before griddepcontrol.wait, so that a token waits for
// memory once.
#pragma once
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

}  // namespace mla
