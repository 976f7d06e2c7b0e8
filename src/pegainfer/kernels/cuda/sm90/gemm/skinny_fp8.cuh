// GEMMs of an FP8 weight with few rows of activations on Hopper: skinny.cuh with half the bytes to stream.
//
//   out[m, n] = sum over k of x[m, k] · E4M3[w[n, k]] · scale of (n, k)
//
// The activations stay in 16 bits, so nothing is rounded that the same GEMM in bf16 would not round: the
// codes become bf16 in registers, which is exact, and wgmma takes them from there. A scale holds for a row,
// and is then applied to its sums, or for 128 columns of a row; then sums of 128 columns are promoted one by
// one.
//
// Columns lie so that a thread finds what its registers take in 16 bytes of a row (lower/cuda/fp8.py): byte
// 16 t + 4 s + j of 64 columns is column 16 s + 2 t + {8, 0, 9, 1}[j], t = lane % 4. Rows 0, 4, 1, 5, 2, 6,
// 3, 7 of eight are those of the lanes 0, 4, …, 28: so eight lanes that read together meet all banks.
#pragma once
#include "skinny.cuh"

namespace skinny {

// Two values times 2^120, which gives codes that were widened by their bits the exponent of bf16.
__device__ __forceinline__ uint32_t scale_codes(uint32_t v) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(v), "r"(0x7b807b80u));
    return r;
}

// Four codes as two pairs of bf16: bytes 1 and 3, then bytes 0 and 2. Bits of exponent and mantissa move to
// where bf16 has them; subnormal codes become subnormal numbers, so the product is right for them too.
__device__ __forceinline__ void widen_codes(uint32_t codes, uint32_t& odd, uint32_t& even) {
    odd = scale_codes((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u));
    even = scale_codes((codes << 8 & 0x80008000u) | (codes << 4 & 0x07f007f0u));
}

// An FP8 weight. GROUPS: scales are [K / 128, N], else [N].
template <bool GROUPS, int NT>
struct Fp8 {
    static constexpr int COLUMNS = 128, BOXES = 2;
    static constexpr int REGISTERS = 32 + (GROUPS ? NT : 0);
    const float* scales;

    __device__ __forceinline__ int lane() const {
        const int lane = threadIdx.x & 31, g = lane >> 2;
        return ((g >> 1) | (g & 1) << 2) << 2 | (lane & 3);
    }
    // Scales of this thread's two rows of each block of 64, from row `first` of a group's; 0 beyond the tile.
    template <int MB>
    __device__ __forceinline__ void load_scales(const Args& a, int tile, int group,
                                                float (&to)[MB][2]) const {
        const int row = (threadIdx.x >> 5) * 16 + (lane() >> 2);
#pragma unroll
        for (int i = 0; i < 2 * MB; i++) {
            const int r = i / 2 * 64 + row + i % 2 * 8, n = tile * a.rows + r;
            const bool valid = r < a.rows && n < a.n;
            to[i / 2][i % 2] = valid ? __ldg(scales + static_cast<int64_t>(group) * a.n + n) : 0.f;
        }
    }
    // Half a box's operand of this thread: rows `at` and eight more, four steps of 16 columns.
    static __device__ __forceinline__ void load_codes(uint32_t at, uint32_t (&to)[16]) {
        const uint4 upper = load_shared16(at), lower = load_shared16(at + 1024);
        const uint32_t *u = &upper.x, *l = &lower.x;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            widen_codes(u[s], to[4 * s], to[4 * s + 2]);
            widen_codes(l[s], to[4 * s + 1], to[4 * s + 3]);
        }
    }

    template <typename T, int TOKENS, int MB>
    __device__ __forceinline__ void multiply(const Args& a, const Block<NT>& b, int tile,
                                             float (&acc)[MB][NT / 2], Place& at_w, Place& at_x) const;
};

template <bool GROUPS, int NT>
template <typename T, int TOKENS, int MB>
__device__ __forceinline__ void Fp8<GROUPS, NT>::multiply(const Args& a, const Block<NT>& b, int tile,
                                                          float (&acc)[MB][NT / 2], Place& at_w,
                                                          Place& at_x) const {
    const int warp = threadIdx.x >> 5, row = lane() >> 2, piece = threadIdx.x & 3;
    const uint32_t mine = (warp * 16 + row) * 128;
    int last_x = -1, group = b.k0 * a.wide, j = 0;  // j: box of the stage
    float scale[MB][2], part[GROUPS ? NT / 2 : 1];
    load_scales<MB>(a, tile, GROUPS ? group : 0, scale);
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
        for (int i = 0; i < NT / 2; i++) acc[m][i] = 0;
    auto release = [&](uint32_t barrier) {
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
    };
#pragma unroll 1
    for (const int end = b.k1 * a.wide; group < end; group++) {
        if (j == 0) {
            mbarrier_wait(b.full_w + 8 * at_w.slot, at_w.parity);
            mbarrier_wait(b.full_x + 8 * at_x.slot, at_x.parity);
        }
        const uint32_t w = b.w + at_w.slot * b.stage_w + j * a.rows * 128 + mine;
        const uint64_t x = operand(b.x + at_x.slot * b.stage_x + j * 2 * NT * 128);
        uint32_t codes[2][16];  // one is loaded while wgmma reads the other
        float next[MB][2];
        if constexpr (GROUPS) load_scales<MB>(a, tile, min(group + 1, end - 1), next);
#pragma unroll
        for (int i = 0; i < 2 * MB; i++) {
            const int m = i / 2, half = i % 2;
            load_codes(w + m * 8192 + ((half * 4 + piece) ^ row) * 16, codes[i % 2]);
            float (&sums)[NT / 2] = GROUPS ? reinterpret_cast<float (&)[NT / 2]>(part) : acc[m];
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; s++)
                Wgmma<T, NT>::rs_rows(sums, codes[i % 2] + 4 * s, along(x, half * NT * 128 + s * 32),
                                      !GROUPS || half > 0 || s > 0);
            wgmma_commit();
            if (half == 1 && (GROUPS || MB > 1)) {
                // Nothing is under way when the next block's codes are loaded: ptxas would serialise all
                // wgmma.
                wgmma_wait<0>();
                wgmma_pin(sums);
            } else {
                wgmma_wait<1>();  // what was issued before this
            }
            if constexpr (GROUPS) {
#pragma unroll
                for (int e = 0; half == 1 && e < NT / 2; e++) acc[m][e] += scale[m][e / 2 % 2] * sums[e];
            }
            if (i == 0 && last_x >= 0) release(b.empty_x + 8 * last_x), last_x = -1;
        }
        if constexpr (GROUPS) {
#pragma unroll
            for (int i = 0; i < 2 * MB; i++) scale[i / 2][i % 2] = next[i / 2][i % 2];
        }
        if (++j == a.wide) {  // the weight's stage has been read, that of x not yet
            __syncwarp();
            release(b.empty_w + 8 * at_w.slot);
            j = 0, last_x = at_x.slot;
            at_w.advance(a.depth_w), at_x.advance(a.depth_x);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MB; m++) {
        wgmma_pin(acc[m]);
        if constexpr (!GROUPS) {
#pragma unroll
            for (int e = 0; e < NT / 2; e++) acc[m][e] *= scale[m][e / 2 % 2];
        }
    }
    if (last_x >= 0) release(b.empty_x + 8 * last_x);
}

}  // namespace skinny

#define SKINNY_FP8_KERNEL(NAME, TYPE, GROUPS, NT, MB)                                                      \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 2)                                       \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, skinny::Args a, \
             const float* scales) {                                                                        \
        skinny::run<TYPE, NT, MB>(&w, &x, a, skinny::Fp8<GROUPS, NT>{scales});                             \
    }
