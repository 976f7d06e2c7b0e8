// GEMMs of an FP8 weight with few rows of activations on Hopper: skinny.cuh with half the bytes to stream.
//
//   out[m, n] = sum over k of x[m, k] · E4M3[w[n, k]] · scale of (n, k)
//
// wgmma multiplies E4M3 by E4M3, so no weight is converted. The activations are, by a launch ahead
// (sm90/quantize/rows.cu): a value becomes the sum of two E4M3 codes, hi = E4M3(v) and lo = E4M3(v - hi),
// with a power of two for each token and 128 columns as scale. Both together hold the 8 significant bits of a
// bf16 value, so the result is that of bf16 activations; the weight is multiplied by both. The tensor
// cores have time for that, because the kernel is bound by memory.
//
// wgmma adds up with fewer bits than float32 has, so sums of 128 columns are scaled and added to sums in
// registers. The weight's scale holds for a row, and is then applied at the end, or for 128 columns of a row.
#pragma once
#include "skinny.cuh"

namespace skinny {

constexpr int GROUP = 128;  // columns of k that share a scale of x: one stage of its ring

// An FP8 weight. GROUPS: scales are [K / 128, N], else [N].
template <bool GROUPS, int NT>
struct Fp8 {
    static constexpr int COLUMNS = GROUP;
    static constexpr int REGISTERS = NT;  // of the sums of 128 columns
    const float* scales;
    const float* x_scales;  // [K / 128, MAX_TOKENS]

    static __device__ __forceinline__ int stage_x(const Args&) { return 2 * NT * GROUP; }
    // Where the ring's scales of x lie in shared memory, [NT] for each stage.
    static __device__ __forceinline__ uint32_t ring_scales(const Block<NT>& b) { return b.scale + 4 * NT; }
    // map: [hi, lo][MAX_TOKENS][K] codes as [2 MAX_TOKENS, K]. A stage is [hi, lo][NT][128]. By one thread.
    __device__ __forceinline__ void stream_x(const void* map, const Args& a, const Block<NT>& b) const {
        const uint64_t policy = l2_evict_last();
        const int last = a.k / GROUP - 1;
        pdl_wait();
        Place at(1);
#pragma unroll 1
        for (int round = 0; round < b.rounds; round++) {
#pragma unroll 1
            for (int group = b.k0 * a.wide; group < b.k1 * a.wide; group++) {
                const uint32_t full = b.full_x + 8 * at.slot, to = b.x + at.slot * b.stage_x;
                mbarrier_wait(b.empty_x + 8 * at.slot, at.parity);
                mbarrier_arrive_expect(full, b.stage_x + NT * 4);
                tma_load2(to, map, group * GROUP, 0, full, policy);
                tma_load2(to + NT * GROUP, map, group * GROUP, MAX_TOKENS, full, policy);
                bulk_load(ring_scales(b) + at.slot * NT * 4, x_scales + min(group, last) * MAX_TOKENS, NT * 4,
                          full, policy);
                at.advance(a.depth_x);
            }
        }
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
    constexpr int PARTS = MB > 1 ? 2 : 1;  // sums of 128 columns: one is added up beside the other
    const uint32_t my_scales = ring_scales(b) + (threadIdx.x & 3) * 8;
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

#define SKINNY_FP8_KERNEL(NAME, GROUPS, NT, MB)                                                            \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 2)                                       \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, skinny::Args a, \
             const float* scales, const float* x_scales) {                                                 \
        skinny::run<bf16, NT, MB>(&w, &x, a, skinny::Fp8<GROUPS, NT>{scales, x_scales});                   \
    }
