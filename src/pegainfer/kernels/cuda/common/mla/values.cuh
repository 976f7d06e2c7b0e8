// The end of latent attention over decoded rows: parts added up, and each head's values of the sums.
//
// A block takes 16 tokens and 64 channels of one head's values. Its rows of the matrix are copied before
// griddepcontrol.wait. Four groups of threads add up the parts of the tokens in their order, and leave the
// sums in shared memory in 16 bits, as attention leaves rows that were not cut; then sixteen warps multiply,
// each eight channels and half of the 512 latent numbers.
#pragma once
#include "../attention/merge.cuh"
#include "head_linear.cuh"

namespace mla {

struct ValueShape {
    static constexpr int TOKENS = 16, ROWS = 64, RANK = 512, THREADS = 512, GROUPS = 4;
    static constexpr int CHUNKS = RANK / 64, HALVES = 2;
    static constexpr int MATRIX = ROWS * RANK * 2, LATENTS = TOKENS * RANK * 2;  // bytes
    static constexpr int SHARED = MATRIX + LATENTS + ROWS / 8 * 32 * 16;         // and sums of half of K
};

// Leaves the latents of the tokens of this thread's group, EACH at the most, in shared memory.
template <typename T, int EACH>
__device__ __forceinline__ void add_up(const HeadArgs& a, const attention::MergeArgs& m,
                                       const attention::Cut* cuts, uint32_t latents, int t0, int head) {
    using S = ValueShape;
    constexpr int PARTS = 8 / EACH;  // of each token, under way at a time
    const int group = threadIdx.x / (S::RANK / 4), quad = threadIdx.x % (S::RANK / 4);
    attention::Sum sums[EACH];
    attention::Cut cut[EACH];
    int most = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) cut[j] = cuts[group + S::GROUPS * j], most = max(most, cut[j].parts);
    for (int p0 = 0; p0 < most; p0 += PARTS) {
        float2 ends[EACH][PARTS];
        float4 v[EACH][PARTS];
#pragma unroll
        for (int j = 0; j < EACH; j++)
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                if (p0 + p < cut[j].parts) {
                    const int64_t at = static_cast<int64_t>(cut[j].slot + p0 + p) * m.h + head;
                    ends[j][p] = m.heads[at], v[j][p] = m.sums[at * (S::RANK / 4) + quad];
                }
#pragma unroll
        for (int j = 0; j < EACH; j++)
#pragma unroll
            for (int p = 0; p < PARTS; p++)
                if (p0 + p < cut[j].parts) sums[j].add(ends[j][p].x, ends[j][p].y, v[j][p]);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int token = group + S::GROUPS * j;
        uint2 packed = {};
        if (cut[j].parts)
            sums[j].store(reinterpret_cast<T*>(&packed));
        else if (t0 + token < a.tokens)
            packed = *reinterpret_cast<const uint2*>(
                static_cast<const T*>(a.a) + (static_cast<int64_t>(t0 + token) * a.h + head) * S::RANK +
                4 * quad);
        const uint32_t line = latents + quad / 16 * (S::TOKENS * 128);
        store_shared8(line + line_piece(token, quad % 16 / 2) + quad % 2 * 8, packed);
    }
}

// cuts: rows that may be in several parts.
template <typename T>
__device__ __forceinline__ void latent_values(const HeadArgs& a, const attention::MergeArgs& m, int cuts) {
    using S = ValueShape;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ attention::Cut mine[S::TOKENS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int head = blockIdx.z, n0 = blockIdx.x * S::ROWS, t0 = blockIdx.y * S::TOKENS;
    const uint32_t matrix = shared_address(shared), latents = matrix + S::MATRIX;
    const T* w = static_cast<const T*>(a.w) + (static_cast<int64_t>(head) * a.n + n0) * S::RANK;
    for (int i = threadIdx.x; i < S::ROWS * (S::RANK / 8); i += S::THREADS) {
        const int r = i / (S::RANK / 8), c = i % (S::RANK / 8);
        const bool there = n0 + r < a.n;
        cp_async16(matrix + c / 8 * (S::ROWS * 128) + line_piece(r, c % 8),
                   there ? w + r * S::RANK + c * 8 : w, there);
    }
    cp_async_commit();
    // The work list is older than the kernel before this one.
    if (threadIdx.x < S::TOKENS) mine[threadIdx.x] = {};
    __syncthreads();
    for (int i = threadIdx.x; i < cuts; i += S::THREADS) {
        const attention::Cut cut = m.cuts[i];
        if (cut.parts && cut.token >= t0 && cut.token < t0 + S::TOKENS) mine[cut.token - t0] = cut;
    }
    __syncthreads();
    pdl_wait();
    pdl_launch();
    const int tokens = a.tokens - t0;
    if (tokens < S::TOKENS)  // rows without a token have no effect; zeros keep stale NaN out of them
        for (int i = threadIdx.x; i < S::LATENTS / 16; i += S::THREADS)
            store_shared16(latents + i * 16, make_uint4(0, 0, 0, 0));
    if (tokens < S::TOKENS) __syncthreads();
    if (tokens <= S::GROUPS)
        add_up<T, 1>(a, m, mine, latents, t0, head);
    else if (tokens <= 2 * S::GROUPS)
        add_up<T, 2>(a, m, mine, latents, t0, head);
    else
        add_up<T, 4>(a, m, mine, latents, t0, head);
    cp_async_wait<0>();
    __syncthreads();

    const int n = warp % (S::ROWS / 8) * 8, half = warp / (S::ROWS / 8);
    float o[2][4] = {};
#pragma unroll
    for (int i = 0; i < S::CHUNKS / S::HALVES; i++) {
        const int chunk = half * (S::CHUNKS / S::HALVES) + i;
        const uint32_t rows = matrix + chunk * (S::ROWS * 128), x = latents + chunk * (S::TOKENS * 128);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t r[4];
            ldmatrix4(r, rows + line_piece(n + (lane & 7), 4 * k + (lane >> 3)));
#pragma unroll
            for (int s = 0; s < 2; s++) {
                uint32_t f[4];
                ldmatrix4(f, x + line_piece(lane & 15, 4 * k + 2 * s + (lane >> 4)));
                mma<T>(o[s], f[0], f[1], f[2], f[3], r[2 * s], r[2 * s + 1]);
            }
        }
    }
    float4* sums = reinterpret_cast<float4*>(shared + S::MATRIX + S::LATENTS);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = o[0][i] + o[1][i];
    if (half) sums[threadIdx.x % 256] = make_float4(v[0], v[1], v[2], v[3]);
    __syncthreads();
    if (half || n0 + n >= a.n) return;
    const float4 other = sums[threadIdx.x];
    v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
    T* out = static_cast<T*>(a.out) + static_cast<int64_t>(head) * a.n + n0 + n + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int token = t0 + g + 8 * i;
        if (token < a.tokens)
            *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(token) * a.h * a.n) =
                pack2<T>(v[2 * i], v[2 * i + 1]);
    }
}

}  // namespace mla

#define LATENT_VALUES_KERNEL(TYPE, T)                                             \
    static_assert(mla::ValueShape::SHARED == 86016);                              \
    extern "C" __global__ void __launch_bounds__(mla::ValueShape::THREADS)        \
        latent_values_##TYPE(mla::HeadArgs a, attention::MergeArgs m, int cuts) { \
        mla::latent_values<T>(a, m, cuts);                                        \
    }
