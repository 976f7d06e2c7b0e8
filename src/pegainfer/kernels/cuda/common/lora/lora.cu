// op lora_shrink, lora_expand, lora_lookup: what each token's LoRA adapter adds to a linear layer. Adapter
// and rank are read on the device, so that one launch, and one graph, serves any mix of adapters and none.
// Every value is summed in the same order in tiles of any size: a token's result does not depend on others.
// One launch serves all GEMMs of a layer that have the same inputs (gridDim.z).
#include <type_traits>

#include "lora_arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr int kShrinkThreads = 256, kShrinkWarps = kShrinkThreads / 32;
constexpr int kRanks = 4;  // channels of a shrink's block; its threads share K
constexpr int kExpandThreads = 64;
constexpr int kTile = 8;  // tokens of a block in long steps, which mostly have one adapter

struct Factor {
    int adapter;
    int rank;  // 0: nothing is added
};

__device__ __forceinline__ Factor factor_of(const int* adapters, const int* ranks, int token, int most) {
    const int adapter = adapters[token];
    return {adapter, adapter < 0 ? 0 : max(0, min(ranks[adapter], most))};
}

__device__ __forceinline__ bool same_adapter(const int* adapters, int first, int count) {
    for (int t = 1; t < count; t++)
        if (adapters[first + t] != adapters[first]) return false;
    return true;
}

// out, a: of `count` tokens with one adapter, down: its row of the block's first channel; `ranks` of the
// block's channels have factors, `width` are within out's rows.
template <typename T, int N, int TOKENS>
__device__ __forceinline__ void shrink_tokens(float* out, const T* a, const T* down, int count, int ranks,
                                              int width, int x, int k, float (*scratch)[kTile * kRanks]) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float sums[TOKENS][kRanks] = {};
    if (ranks > 0)
        for (int i = threadIdx.x * N; i < k; i += kShrinkThreads * N) {
            Vec<T, N> in[TOKENS] = {};
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                if (t < count) in[t] = load<T, N>(a + static_cast<int64_t>(t) * k + i);
#pragma unroll
            for (int r = 0; r < kRanks; r++) {
                if (r >= ranks) break;
                const Vec<T, N> w = load<T, N>(down + static_cast<int64_t>(r) * k + i);
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
#pragma unroll
                    for (int n = 0; n < N; n++)
                        sums[t][r] = fmaf(to_f32(in[t].v[n]), to_f32(w.v[n]), sums[t][r]);
            }
        }
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
#pragma unroll
        for (int r = 0; r < kRanks; r++) {
            const float sum = warp_sum(sums[t][r]);
            if (lane == 0) scratch[warp][t * kRanks + r] = sum;
        }
    __syncthreads();
    const int t = threadIdx.x / kRanks, r = threadIdx.x % kRanks;
    if (t < count && r < width) {
        float sum = 0;
        for (int w = 0; w < kShrinkWarps; w++) sum += scratch[w][threadIdx.x];
        out[static_cast<int64_t>(t) * x + r] = sum;
    }
    __syncthreads();
}

template <typename T, int N, int TOKENS>
__device__ __forceinline__ void shrink(const lora::Args& p) {
    __shared__ float scratch[kShrinkWarps][kTile * kRanks];
    pdl_wait();
    pdl_launch();
    const lora::Factor& factor = p.factor[blockIdx.z];
    const int channel = blockIdx.x * kRanks, width = min(kRanks, p.most - channel);
    const int first = blockIdx.y * TOKENS, count = min(TOKENS, p.tokens - first);
    const auto run = [&](int token, int many, auto most) {
        const Factor f = factor_of(p.adapters, factor.ranks, token, p.most);
        const int64_t row = static_cast<int64_t>(max(f.adapter, 0)) * p.most + channel;
        float* out = p.h + (static_cast<int64_t>(blockIdx.z) * p.tokens + token) * p.most + channel;
        shrink_tokens<T, N, decltype(most)::value>(
            out, static_cast<const T*>(p.a) + static_cast<int64_t>(token) * p.k,
            static_cast<const T*>(factor.down) + row * p.k, many, min(f.rank - channel, width), width, p.most,
            p.k, scratch);
    };
    if (TOKENS == 1 || same_adapter(p.adapters, first, count))
        run(first, count, std::integral_constant<int, TOKENS>());
    else
        for (int t = 0; t < count; t++) run(first + t, 1, std::integral_constant<int, 1>());
}

// x: of `count` tokens with one adapter, at this thread's columns, which are `step` apart in rows of `ld`;
// up: the adapter's factor there.
template <typename X, typename W, int N, int TOKENS>
__device__ __forceinline__ void expand_tokens(X* x, const float* h, const W* up, int count, int rank,
                                              int most, int n, int ld, int step) {
    float sums[TOKENS][N] = {};
#pragma unroll 4
    for (int r = 0; r < rank; r++) {
        const Vec<W, N> w = load<W, N>(up + static_cast<int64_t>(r) * n);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float scale = t < count ? h[static_cast<int64_t>(t) * most + r] : 0.f;
#pragma unroll
            for (int i = 0; i < N; i++) sums[t][i] = fmaf(scale, to_f32(w.v[i]), sums[t][i]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (t >= count) break;
        X* to = x + static_cast<int64_t>(t) * ld;
        if (step == 1) {
            Vec<X, N> v = load<X, N>(to);
#pragma unroll
            for (int i = 0; i < N; i++) v.v[i] = from_f32<X>(to_f32(v.v[i]) + sums[t][i]);
            store(to, v);
        } else {
#pragma unroll
            for (int i = 0; i < N; i++) to[i * step] = from_f32<X>(to_f32(to[i * step]) + sums[t][i]);
        }
    }
}

template <typename X, typename W, int N, int TOKENS>
__device__ __forceinline__ void expand(const lora::Args& p) {
    pdl_wait();
    pdl_launch();
    const lora::Factor& factor = p.factor[blockIdx.z];
    const int column = (blockIdx.x * kExpandThreads + threadIdx.x) * N;
    const int first = blockIdx.y * TOKENS, count = min(TOKENS, p.tokens - first);
    if (column >= factor.n) return;
    const auto run = [&](int token, int many, auto size) {
        const Factor f = factor_of(p.adapters, factor.ranks, token, p.most);
        if (f.rank == 0) return;
        const W* up =
            static_cast<const W*>(factor.up) + static_cast<int64_t>(f.adapter) * p.most * factor.n + column;
        const float* h = p.h + (static_cast<int64_t>(blockIdx.z) * p.tokens + token) * p.most;
        X* x = static_cast<X*>(p.x) + static_cast<int64_t>(token) * p.ld + factor.first + column * p.step;
        expand_tokens<X, W, N, decltype(size)::value>(x, h, up, many, f.rank, p.most, factor.n, p.ld, p.step);
    };
    if (TOKENS == 1 || same_adapter(p.adapters, first, count))
        run(first, count, std::integral_constant<int, TOKENS>());
    else
        for (int t = 0; t < count; t++) run(first + t, 1, std::integral_constant<int, 1>());
}

// out: [T, X], table: [A, V, X]; an id outside of [0, V) adds nothing. A block a token.
template <typename T>
__device__ __forceinline__ void lookup(float* out, const T* table, const int* ids, const int* adapters,
                                       const int* ranks, int x, int v) {
    pdl_wait();
    pdl_launch();
    const int token = blockIdx.x, id = ids[token];
    const Factor f = factor_of(adapters, ranks, token, x);
    const int rank = id >= 0 && id < v ? f.rank : 0;
    const T* row = table + (static_cast<int64_t>(max(f.adapter, 0)) * v + id) * x;
    for (int i = threadIdx.x; i < x; i += blockDim.x)
        out[static_cast<int64_t>(token) * x + i] = i < rank ? to_f32(row[i]) : 0.f;
}

#define SHRINK(NAME, T, N, TOKENS)                               \
    extern "C" __global__ void __launch_bounds__(kShrinkThreads) \
        NAME(const __grid_constant__ lora::Args p) {             \
        shrink<T, N, TOKENS>(p);                                 \
    }
#define EXPAND(NAME, X, W, N, TOKENS)                            \
    extern "C" __global__ void __launch_bounds__(kExpandThreads) \
        NAME(const __grid_constant__ lora::Args p) {             \
        expand<X, W, N, TOKENS>(p);                              \
    }
#define LOOKUP(NAME, T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(128) NAME(                                                \
        float* out, const T* table, const int* ids, const int* adapters, const int* ranks, int x, int v) { \
        lookup<T>(out, table, ids, adapters, ranks, x, v);                                                 \
    }

// variant lora_shrink_bf16: dtype=bf16 multiple=8
SHRINK(lora_shrink_bf16, bf16, 8, 1)
// variant lora_shrink_tile_bf16: dtype=bf16 multiple=8
SHRINK(lora_shrink_tile_bf16, bf16, 8, kTile)
// variant lora_shrink_any_bf16: dtype=bf16
SHRINK(lora_shrink_any_bf16, bf16, 1, 1)
// variant lora_shrink_f16: dtype=f16 multiple=8
SHRINK(lora_shrink_f16, f16, 8, 1)
// variant lora_shrink_tile_f16: dtype=f16 multiple=8
SHRINK(lora_shrink_tile_f16, f16, 8, kTile)
// variant lora_shrink_any_f16: dtype=f16
SHRINK(lora_shrink_any_f16, f16, 1, 1)
// variant lora_shrink_f32: dtype=f32 multiple=4
SHRINK(lora_shrink_f32, float, 4, 1)
// variant lora_shrink_tile_f32: dtype=f32 multiple=4
SHRINK(lora_shrink_tile_f32, float, 4, kTile)
// variant lora_shrink_any_f32: dtype=f32
SHRINK(lora_shrink_any_f32, float, 1, 1)

// variant lora_expand_bf16: dtype=bf16 multiple=8
EXPAND(lora_expand_bf16, bf16, bf16, 8, 1)
// variant lora_expand_tile_bf16: dtype=bf16 multiple=8
EXPAND(lora_expand_tile_bf16, bf16, bf16, 8, kTile)
// variant lora_expand_any_bf16: dtype=bf16
EXPAND(lora_expand_any_bf16, bf16, bf16, 1, 1)
// variant lora_expand_f16: dtype=f16 multiple=8
EXPAND(lora_expand_f16, f16, f16, 8, 1)
// variant lora_expand_tile_f16: dtype=f16 multiple=8
EXPAND(lora_expand_tile_f16, f16, f16, 8, kTile)
// variant lora_expand_any_f16: dtype=f16
EXPAND(lora_expand_any_f16, f16, f16, 1, 1)
// variant lora_expand_f32: dtype=f32 multiple=4
EXPAND(lora_expand_f32, float, float, 4, 1)
// variant lora_expand_tile_f32: dtype=f32 multiple=4
EXPAND(lora_expand_tile_f32, float, float, 4, kTile)
// variant lora_expand_any_f32: dtype=f32
EXPAND(lora_expand_any_f32, float, float, 1, 1)
// Logits are float32, their factors are not.
// variant lora_expand_bf16_f32: dtype=bf16 multiple=8
EXPAND(lora_expand_bf16_f32, float, bf16, 8, 1)
// variant lora_expand_tile_bf16_f32: dtype=bf16 multiple=8
EXPAND(lora_expand_tile_bf16_f32, float, bf16, 8, kTile)
// variant lora_expand_any_bf16_f32: dtype=bf16
EXPAND(lora_expand_any_bf16_f32, float, bf16, 1, 1)

// variant lora_lookup_bf16: dtype=bf16
LOOKUP(lora_lookup_bf16, bf16)
// variant lora_lookup_f16: dtype=f16
LOOKUP(lora_lookup_f16, f16)
// variant lora_lookup_f32: dtype=f32
LOOKUP(lora_lookup_f32, float)
