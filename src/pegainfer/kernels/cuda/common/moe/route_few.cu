// op moe: norm, router and order of the slots of a few tokens, in one launch.
//
// Every block has a few experts and up to 8 tokens: it normalises the tokens and multiplies them with the
// experts' rows of the router. The block that comes last routes all tokens and sorts their slots.
#include "route.cuh"
#include "slots.cuh"

using route::FewArgs;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TOKENS = 8;  // of a block

// h = x / rms(x) · norm, a warp a token: into shared memory, and by the first blocks into a.h.
__device__ __forceinline__ void normalise(const FewArgs& a, int token, bf16* to) {
    const int lane = threadIdx.x & 31;
    const bf16* row = static_cast<const bf16*>(a.x) + static_cast<int64_t>(token) * a.m;
    float sum = 0;
#pragma unroll 8
    for (int i = lane * 8; i < a.m; i += 256) {
        const auto v = load<bf16, 8>(row + i);
        store(to + i, v);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
    }
    const float scale = rsqrtf(warp_sum(sum) / a.m + a.eps);
#pragma unroll 4
    for (int i = lane * 8; i < a.m; i += 256) {
        auto v = load<bf16, 8>(to + i);
        const auto w = load<float, 8>(a.norm + i);
#pragma unroll
        for (int j = 0; j < 8; j++) v.v[j] = from_f32<bf16>(to_f32(v.v[j]) * scale * w.v[j]);
        store(to + i, v);
        if (blockIdx.x == 0) store(static_cast<bf16*>(a.h) + static_cast<int64_t>(token) * a.m + i, v);
    }
}

// logits[token, expert] of up to TOKENS tokens, by a warp.
__device__ __forceinline__ void multiply(const FewArgs& a, const bf16* h, int first, int count, int expert,
                                         int experts) {
    const int lane = threadIdx.x & 31;
    const bf16* w = static_cast<const bf16*>(a.w) + static_cast<int64_t>(expert) * a.m;
    float sum[TOKENS] = {};
#pragma unroll 4
    for (int k = lane * 8; k < a.m; k += 256) {
        const auto ws = load<bf16, 8>(w + k);
#pragma unroll
        for (int i = 0; i < TOKENS; i++) {
            if (i >= count) break;
            const auto hs = load<bf16, 8>(h + i * a.m + k);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[i] += to_f32(hs.v[j]) * to_f32(ws.v[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < TOKENS; i++) {
        if (i >= count) break;
        const float v = warp_sum(sum[i]);
        if (lane == 0) a.logits[static_cast<int64_t>(first + i) * experts + expert] = v;
    }
}

}  // namespace

// Grid: (N over WARPS, T over TOKENS). Shared memory: 8 rows of h, or 3 N numbers for each warp.

// variant route_few: dtype=bf16 multiple=8
extern "C" __global__ void __launch_bounds__(THREADS)
    route_few(const route::Args r, const slots::SortArgs s, const FewArgs a) {
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ int64_t scratch[32];
    __shared__ bool last;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int expert = blockIdx.x * WARPS + warp, first = blockIdx.y * TOKENS;
    const int count = min(r.tokens - first, TOKENS);
    if (expert < r.n) {  // the router's rows are constant: they may come while the kernel ahead runs
        const bf16* w = static_cast<const bf16*>(a.w) + static_cast<int64_t>(expert) * a.m;
        for (int k = lane * 64; k < a.m; k += 32 * 64) prefetch_l2(w + k);
    }
    pdl_wait();
    pdl_launch();
    bf16* h = reinterpret_cast<bf16*>(shared);
    if (warp < count) normalise(a, first + warp, h + warp * a.m);
    __syncthreads();
    if (expert < r.n) multiply(a, h, first, count, expert, r.n);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(a.arrivals, 1) == static_cast<int>(gridDim.x * gridDim.y) - 1;
        if (last) *a.arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    float* scores = reinterpret_cast<float*>(shared) + warp * 3 * r.n;
    for (int token = warp; token < r.tokens; token += WARPS)
        route::route_token(r, token, scores, scores + r.n, reinterpret_cast<uint32_t*>(scores + 2 * r.n));
    __syncthreads();
    slots::sort<THREADS>(s, reinterpret_cast<int*>(shared), scratch);
}
