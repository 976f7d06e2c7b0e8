// A matrix for each head: out[t, h] = a[t, h, :K] · w[h]ᵀ, and channels behind the first K copied behind the
// first N. Absorbs queries of latent attention, and expands its values.
//
// A block takes WM · MT · 16 tokens and WN · NT · 8 rows of one head's matrix. Both pass through a ring of
// cp.async stages of 64 elements of K, swizzled in lines of 128 bytes. The matrix is constant, so the first
// stages of it are copied before griddepcontrol.wait.
//
// FINISH: a is what the projection left of decoded tokens. The copied channels are rotated, and the latents
// behind a token's heads are cached.
#pragma once
#include "append_row.cuh"

namespace mla {

template <int WM_, int WN_, int MT_, int NT_>
struct HeadShape {
    static constexpr int WM = WM_, WN = WN_, MT = MT_, NT = NT_, STAGES = 3, DEPTH = 64;
    static constexpr int TOKENS = WM * MT * 16, ROWS = WN * NT * 8, THREADS = WM * WN * 32;
    static constexpr int STAGE = (TOKENS + ROWS) * 128, SHARED = STAGES * STAGE;
};

__device__ __forceinline__ uint32_t line_piece(int r, int c) {
    return r * 128 + ((c ^ (r & 7)) << 4);
}

template <typename T, typename S, bool FINISH>
__device__ __forceinline__ void head_linear(const HeadArgs& a, const AppendArgs& b) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.z, n0 = blockIdx.x * S::ROWS, t0 = blockIdx.y * S::TOKENS;
    const int m0 = warp / S::WN * S::MT * 16, r0 = warp % S::WN * S::NT * 8;
    if (a.range && (t0 >= a.range->y || t0 + S::TOKENS <= a.range->x)) {
        pdl_wait();  // so that this launch does not end before the one ahead of it
        return;
    }
    // Tokens of the tile are shared out to the warps of the blocks of a head, and of those behind the heads.
    constexpr int WARPS = S::THREADS / 32;
    const int mine = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS,
              some = min(S::TOKENS, a.tokens - t0);
    if (FINISH && head == a.h) {
        for (int i = mine; i < some; i += step)
            append_row<T>(b, static_cast<const T*>(b.latent) + (t0 + i) * b.stride, t0 + i, lane);
        pdl_wait();
        return;
    }
    const uint32_t ring = shared_address(shared);
    const T* w = static_cast<const T*>(a.w) + static_cast<int64_t>(head) * a.n * a.k;
    const T* x = static_cast<const T*>(a.a) + static_cast<int64_t>(head) * a.a_width;
    const int64_t x_stride = FINISH ? b.stride : static_cast<int64_t>(a.h) * a.a_width;
    const int chunks = (a.k + S::DEPTH - 1) / S::DEPTH;

    auto copy = [&](uint32_t to, const T* from, int64_t stride, int rows, int valid, int chunk) {
        for (int i = threadIdx.x; i < rows * 8; i += S::THREADS) {
            const int r = i >> 3, c = i & 7, k = chunk * S::DEPTH + c * 8;
            const bool there = r < valid && k < a.k;
            cp_async16(to + line_piece(r, c), there ? from + r * stride + k : from, there);
        }
    };
    auto copy_w = [&](int chunk) {
        if (chunk < chunks)
            copy(ring + chunk % S::STAGES * S::STAGE + S::TOKENS * 128, w + static_cast<int64_t>(n0) * a.k,
                 a.k, S::ROWS, a.n - n0, chunk);
    };
    auto copy_x = [&](int chunk) {
        if (chunk < chunks)
            copy(ring + chunk % S::STAGES * S::STAGE, x + t0 * x_stride, x_stride, S::TOKENS, a.tokens - t0,
                 chunk);
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) copy_w(i);
    T* out = static_cast<T*>(a.out) + static_cast<int64_t>(head) * a.out_width;
    const int64_t out_stride = static_cast<int64_t>(a.h) * a.out_width;
    if constexpr (!FINISH) pdl_wait();
    if constexpr (FINISH) {
        const Rotation first(b, t0 + min(mine, some - 1), lane);
        pdl_wait();
        for (int i = mine; i < some; i += step) {
            const T* from = x + (t0 + i) * x_stride + a.k;
            const T low = from[lane], high = from[PAIRS + lane];
            (i == mine ? first : Rotation(b, t0 + i, lane))
                .apply(out + (t0 + i) * out_stride + a.n, low, high, lane);
        }
    }
    pdl_launch();
#pragma unroll
    for (int i = 0; i < S::STAGES - 1; i++) copy_x(i);

    float o[S::MT][S::NT][4] = {};
    for (int chunk = 0; chunk < chunks; chunk++) {
        cp_async_wait<S::STAGES - 2>();
        __syncthreads();
        copy_w(chunk + S::STAGES - 1);
        copy_x(chunk + S::STAGES - 1);
        const uint32_t at = ring + chunk % S::STAGES * S::STAGE, rows = at + S::TOKENS * 128;
#pragma unroll
        for (int k = 0; k < S::DEPTH / 16; k++) {
            uint32_t f[S::MT][4];
#pragma unroll
            for (int i = 0; i < S::MT; i++)
                ldmatrix4(f[i], at + line_piece(m0 + i * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int j = 0; j < S::NT / 2; j++) {
                uint32_t r[4];
                ldmatrix4(r, rows + line_piece(r0 + j * 16 + (lane >> 4) * 8 + (lane & 7),
                                               2 * k + (lane >> 3 & 1)));
#pragma unroll
                for (int i = 0; i < S::MT; i++) {
                    mma<T>(o[i][2 * j], f[i][0], f[i][1], f[i][2], f[i][3], r[0], r[1]);
                    mma<T>(o[i][2 * j + 1], f[i][0], f[i][1], f[i][2], f[i][3], r[2], r[3]);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = t0 + m0 + i * 16 + g + 8 * half;
            if (token >= a.tokens) continue;
#pragma unroll
            for (int j = 0; j < S::NT; j++) {
                const int n = n0 + r0 + j * 8 + 2 * t;
                if (n < a.n)
                    *reinterpret_cast<uint32_t*>(out + token * out_stride + n) =
                        pack2<T>(o[i][j][2 * half], o[i][j][2 * half + 1]);
            }
        }
    if (FINISH || blockIdx.x) return;
    const int rest = (a.a_width - a.k) / 8, tokens = min(S::TOKENS, a.tokens - t0);
    for (int i = threadIdx.x; i < tokens * rest; i += S::THREADS) {
        const int64_t token = t0 + i / rest;
        const int c = i % rest * 8;
        *reinterpret_cast<uint4*>(out + token * out_stride + a.n + c) =
            *reinterpret_cast<const uint4*>(x + token * x_stride + a.k + c);
    }
}

// An output a warp, for sizes that are no multiples of eight and for float32.
template <typename T>
__device__ __forceinline__ void head_linear_any(const HeadArgs& a) {
    pdl_wait();
    pdl_launch();
    const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31, n = unit % a.out_width;
    const int64_t row = unit / a.out_width;
    if (row >= static_cast<int64_t>(a.tokens) * a.h) return;
    const T* x = static_cast<const T*>(a.a) + row * a.a_width;
    T* to = static_cast<T*>(a.out) + row * a.out_width + n;
    if (n >= a.n) {
        if (lane == 0) *to = x[a.k + n - a.n];
        return;
    }
    const T* w = static_cast<const T*>(a.w) + (row % a.h * a.n + n) * a.k;
    float sum = 0;
    for (int i = lane; i < a.k; i += 32) sum += to_f32(x[i]) * to_f32(w[i]);
    sum = warp_sum(sum);
    if (lane == 0) *to = from_f32<T>(sum);
}

}  // namespace mla

#define HEAD_KERNEL(TYPE, T, TOKENS_, SHARED_, ...)                                    \
    extern "C" __global__ void __launch_bounds__(mla::HeadShape<__VA_ARGS__>::THREADS) \
        head_linear_##TYPE##_t##TOKENS_(mla::HeadArgs a) {                             \
        static_assert(mla::HeadShape<__VA_ARGS__>::TOKENS == TOKENS_);                 \
        static_assert(mla::HeadShape<__VA_ARGS__>::SHARED == SHARED_);                 \
        mla::head_linear<T, mla::HeadShape<__VA_ARGS__>, false>(a, {});                \
    }
#define HEAD_ANY(TYPE, T)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) head_linear_any_##TYPE(mla::HeadArgs a) { \
        mla::head_linear_any<T>(a);                                                             \
    }
#define ABSORB_KERNEL(TYPE, T, TOKENS_, ...)                                           \
    extern "C" __global__ void __launch_bounds__(mla::HeadShape<__VA_ARGS__>::THREADS) \
        mla_absorb_##TYPE##_t##TOKENS_(mla::HeadArgs a, mla::AppendArgs b) {           \
        static_assert(mla::HeadShape<__VA_ARGS__>::TOKENS == TOKENS_);                 \
        mla::head_linear<T, mla::HeadShape<__VA_ARGS__>, true>(a, b);                  \
    }
