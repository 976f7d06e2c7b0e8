// GEMMs of an FP8 weight with few rows of activations on Hopper: skinny.cuh with half the bytes to stream.
//
//   out[m, n] = sum over k of x[m, k] · E4M3[w[n, k]] · scale of (n, k)
//
// wgmma multiplies E4M3 by E4M3, so no weight is converted. The activations are: each block quantises the x
// that it needs, read as bf16, so that no launch ahead has to do it. A value becomes the sum of two E4M3
// codes, hi = E4M3(v) and lo = E4M3(v - hi), with a power of two for each token and 128 columns as scale.
// Both together hold the 8 significant bits of a bf16 value, so the result is that of bf16 activations; the
// weight is multiplied by both, which costs the tensor cores time that they have.
//
// wgmma adds up with fewer bits than float32 has, so sums of 128 columns are scaled and added to sums in
// registers. The weight's scale holds for a row, and is then applied at the end, or for 128 columns of a row.
#pragma once
#include "e4m3.cuh"
#include "skinny.cuh"

namespace skinny {

constexpr int GROUP = 128;      // columns of k that share a scale of x: one stage of its ring
constexpr int QUANTIZERS = 4;   // warps that quantise x
constexpr int ITEM_TOKENS = 4;  // that a warp quantises at a time, eight lanes each

// Work items of the quantising warps: ITEM_TOKENS tokens of one group of columns. Warps take them in turn.
struct Items {
    int left, quad, quads, group, groups, depth;
    Place place = Place(1);

    template <int NT>
    __device__ __forceinline__ Items(const Args& a, const Block<NT>& b, int warp)
        : quad(warp),
          quads((a.m + ITEM_TOKENS - 1) / ITEM_TOKENS),
          group(0),
          groups((b.k1 - b.k0) * a.wide),
          depth(a.depth_x) {
        left = b.rounds * groups * quads - warp;
        normalize();
    }
    __device__ __forceinline__ bool has() const { return left > 0; }
    __device__ __forceinline__ void advance() {
        left -= QUANTIZERS, quad += QUANTIZERS;
        normalize();
    }
    __device__ __forceinline__ void normalize() {
#pragma unroll 1
        while (quad >= quads) {
            quad -= quads;
            if (++group == groups) group = 0;
            place.advance(depth);
        }
    }
};

// Two pairs of values, each pair in one register as bf16, as codes of hi and of lo.
__device__ __forceinline__ void split_values(uint32_t first, uint32_t second, float inverse, uint32_t& hi,
                                             uint32_t& lo) {
    uint32_t codes[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float2 v = unpack2<bf16>(i ? second : first);
        const uint32_t scaled = pack2<f16>(v.x * inverse, v.y * inverse);  // exact
        codes[0][i] = f16_to_e4m3x2(scaled);
        codes[1][i] = f16_to_e4m3x2(sub_f16x2(scaled, e4m3x2_to_f16(codes[0][i])));
    }
    hi = __byte_perm(codes[0][0], codes[0][1], 0x5410), lo = __byte_perm(codes[1][0], codes[1][1], 0x5410);
}

// Fills the ring of x, by QUANTIZERS warps of which this is number `warp`. A stage is [hi, lo][NT][128]
// codes, swizzled as TMA does. scales: of the ring's first stage in shared memory, [NT] for each stage.
//
// A warp stores PAIR items before it makes them visible with one fence, which also waits for loads in flight:
// those of the next items have arrived by then, and later ones are issued after it.
template <int NT>
__device__ __forceinline__ void quantize_x(const bf16* x, const Args& a, const Block<NT>& b, uint32_t scales,
                                           int warp) {
    constexpr int PAIR = 2;
    const int lane = threadIdx.x & 31, part = lane & 7, within = lane >> 3;
    Items wanted(a, b, warp), item(a, b, warp);
    uint4 held[2 * PAIR][2];
    auto fetch = [&](uint4(&to)[2]) {
        const int token = wanted.quad * ITEM_TOKENS + within;
        const int column = (b.k0 * a.wide + wanted.group) * GROUP + part * 8;
        const bool valid = wanted.has() && token < a.m && column < a.k;
        const uint4* from = reinterpret_cast<const uint4*>(x + static_cast<int64_t>(token) * a.k + column);
        to[0] = valid ? __ldcg(from) : make_uint4(0, 0, 0, 0);
        to[1] = valid ? __ldcg(from + 8) : make_uint4(0, 0, 0, 0);
        wanted.advance();
    };
    int stored = 0, first = 0, second = 0;  // items that are not visible yet, and their slots
    auto publish = [&]() {
        async_proxy_fence();
        __syncwarp();
        if (lane < stored) mbarrier_arrive(b.full_x + 8 * (lane ? second : first));
        stored = 0;
    };
    auto store = [&](const uint4(&values)[2]) {
        const uint32_t words[8] = {values[0].x, values[0].y, values[0].z, values[0].w,
                                   values[1].x, values[1].y, values[1].z, values[1].w};
        // Magnitudes in bf16 are ordered as whole numbers are, NaN above all.
        uint32_t peaks = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) peaks = __vmaxu2(peaks, words[j] & 0x7fff7fff);
#pragma unroll
        for (int o = 1; o < 8; o <<= 1) peaks = __vmaxu2(peaks, __shfl_xor_sync(~0u, peaks, o));
        // The greatest magnitude becomes one of 128 to 256; exponents as float32 has them.
        const uint32_t exponent = max(max(peaks & 0xffff, peaks >> 16) >> 7, 8u);
        const float inverse = __uint_as_float((261 - exponent) << 23);
        const float scale = __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 7) << 23);
        const int slot = item.place.slot, token = item.quad * ITEM_TOKENS + within;
        const uint32_t row = b.x + slot * b.stage_x + token * GROUP, empty = b.empty_x + 8 * slot;
        // The slot may wait for the item that is not visible yet.
        if (stored && !__all_sync(~0u, mbarrier_ready(empty, item.place.parity))) publish();
        mbarrier_wait(empty, item.place.parity);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int piece = half * 4 + part / 2;
            const uint32_t to = row + ((piece ^ (token & 7)) << 4) + part % 2 * 8;
            uint2 hi, lo;
            split_values(words[4 * half], words[4 * half + 1], inverse, hi.x, lo.x);
            split_values(words[4 * half + 2], words[4 * half + 3], inverse, hi.y, lo.y);
            store_shared8(to, hi);
            store_shared8(to + NT * GROUP, lo);
        }
        if (part == 0) store_shared4(scales + (slot * NT + token) * 4, __float_as_uint(scale));
        (stored ? second : first) = slot;
        stored++;
        item.advance();
    };
    pdl_wait();
#pragma unroll
    for (int i = 0; i < 2 * PAIR; i++) fetch(held[i]);
#pragma unroll 1
    while (item.has()) {
#pragma unroll
        for (int pair = 0; pair < 2 * PAIR; pair += PAIR) {
#pragma unroll
            for (int i = pair; i < pair + PAIR; i++)
                if (item.has()) store(held[i]);
            if (stored) publish();
#pragma unroll
            for (int i = pair; i < pair + PAIR; i++) fetch(held[i]);
        }
    }
}

// An FP8 weight. GROUPS: scales are [K / 128, N], else [N].
template <bool GROUPS, int NT>
struct Fp8 {
    static constexpr int COLUMNS = GROUP, THREADS = skinny::THREADS + 32 * QUANTIZERS;
    static constexpr bool BRINGS_X = true;
    const float* scales;
    const bf16* x;

    static __device__ __forceinline__ int stage_x(const Args&) { return 2 * NT * GROUP; }
    static __device__ __forceinline__ int arrivals_x(const Args& a) {
        return (a.m + ITEM_TOKENS - 1) / ITEM_TOKENS;
    }
    static __device__ __forceinline__ uint32_t x_scales(const Block<NT>& b) { return b.scale + 4 * NT; }
    __device__ __forceinline__ void bring_x(const Args& a, const Block<NT>& b) const {
        quantize_x<NT>(x, a, b, x_scales(b), (threadIdx.x - skinny::THREADS) >> 5);
    }

    // Scales of this thread's two rows of each block of 64, from row `first` of a group's; 0 beyond the tile.
    template <int MB>
    __device__ __forceinline__ void load_scales(const Args& a, int tile, int group,
                                                float (&to)[MB][2]) const {
        const int row = (threadIdx.x >> 5) * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
        for (int i = 0; i < 2 * MB; i++) {
            const int r = i / 2 * 64 + row + i % 2 * 8, n = tile * a.rows + r;
            const bool valid = r < a.rows && n < a.n;
            to[i / 2][i % 2] = valid ? __ldg(scales + static_cast<int64_t>(group) * a.n + n) : 0.f;
        }
    }

    template <typename T, int MB>
    __device__ __forceinline__ void multiply(const Args& a, const Block<NT>& b, int tile,
                                             float (&acc)[MB][NT / 2], Place& at_w, Place& at_x) const;
};

template <bool GROUPS, int NT>
template <typename T, int MB>
__device__ __forceinline__ void Fp8<GROUPS, NT>::multiply(const Args& a, const Block<NT>& b, int tile,
                                                          float (&acc)[MB][NT / 2], Place& at_w,
                                                          Place& at_x) const {
    constexpr int PARTS = MB > 1 && NT < 64 ? 2 : 1;  // sums of 128 columns: one is added up beside the other
    const uint32_t my_scales = x_scales(b) + (threadIdx.x & 3) * 8;
    const int last = a.k / GROUP - 1;
    float scale[MB][2], part[PARTS][NT / 2];
    load_scales<MB>(a, tile, GROUPS ? b.k0 * a.wide : 0, scale);
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
        for (int i = 0; i < NT / 2; i++) acc[m][i] = 0;
    int j = 0;  // box of the weight's stage
#pragma unroll 1
    for (int group = b.k0 * a.wide; group < b.k1 * a.wide; group++) {
        float next[MB][2];
        if constexpr (GROUPS) load_scales<MB>(a, tile, min(group + 1, last), next);
        if (j == 0) mbarrier_wait(b.full_w + 8 * at_w.slot, at_w.parity);
        mbarrier_wait(b.full_x + 8 * at_x.slot, at_x.parity);
        const uint64_t w = operand(b.w + at_w.slot * b.stage_w + j * a.rows * GROUP);
        const uint64_t hi = operand(b.x + at_x.slot * b.stage_x), lo = along(hi, NT * GROUP);
        const uint32_t x_scale = my_scales + at_x.slot * NT * 4;
        auto promote = [&](int m) {
            float (&sums)[NT / 2] = part[m % PARTS];
            wgmma_pin(sums);
#pragma unroll
            for (int i = 0; i < NT / 8; i++) {
                const uint2 pair = load_shared8(x_scale + i * 32);
                const float sx[2] = {__uint_as_float(pair.x), __uint_as_float(pair.y)};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    acc[m][4 * i + e] += sums[4 * i + e] * (GROUPS ? sx[e % 2] * scale[m][e / 2] : sx[e % 2]);
            }
        };
#pragma unroll
        for (int m = 0; m < MB; m++) {
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < 4; kk++) {
                const uint64_t rows = along(w, m * 8192 + kk * 32);
                Wgmma<e4m3, NT>::ss(part[m % PARTS], rows, along(hi, kk * 32), kk > 0);
                Wgmma<e4m3, NT>::ss(part[m % PARTS], rows, along(lo, kk * 32), true);
            }
            wgmma_commit();
            if constexpr (PARTS == 1) {
                wgmma_wait<0>();
                promote(m);
            } else if (m > 0) {
                wgmma_wait<1>();
                promote(m - 1);
            }
        }
        if constexpr (PARTS > 1) {
            wgmma_wait<0>();
            promote(MB - 1);
        }
        __syncwarp();
        const bool end = ++j == a.wide;
        if ((threadIdx.x & 31) == 0) {
            mbarrier_arrive(b.empty_x + 8 * at_x.slot);
            if (end) mbarrier_arrive(b.empty_w + 8 * at_w.slot);
        }
        at_x.advance(a.depth_x);
        if (end) j = 0, at_w.advance(a.depth_w);
        if constexpr (GROUPS) {
#pragma unroll
            for (int i = 0; i < 2 * MB; i++) scale[i / 2][i % 2] = next[i / 2][i % 2];
        }
    }
    if constexpr (!GROUPS) {
#pragma unroll
        for (int m = 0; m < MB; m++)
#pragma unroll
            for (int e = 0; e < NT / 2; e++) acc[m][e] *= scale[m][e / 2 % 2];
    }
}

}  // namespace skinny

#define SKINNY_FP8_KERNEL(NAME, GROUPS, NT, MB)                                                           \
    extern "C" __global__ void __launch_bounds__(skinny::Fp8<GROUPS, NT>::THREADS, 2)                     \
        NAME(const __grid_constant__ CUtensorMap w, const bf16* x, skinny::Args a, const float* scales) { \
        skinny::run<bf16, NT, MB>(&w, nullptr, a, skinny::Fp8<GROUPS, NT>{scales, x});                    \
    }
