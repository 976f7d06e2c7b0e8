// op moe: the router's logits of up to 8 tokens, and their rows as the experts take them.
//
//   h[token] = x[token] · norm;  scales[token] = 1 / rms(x[token]);  logits = scales · (h · wᵀ)
//
// A block has all tokens and every gridDim.x-th expert; its threads split the columns. The gate of a shared
// expert has a row of its own, behind the experts'.
#include "arguments.cuh"
#include "ptx.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, TOKENS = 8;

// Sums of N values over the warp; each lane gets that of value lane % N.
template <int N>
__device__ __forceinline__ float sum_each(float (&v)[N]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = N / 2; half; half >>= 1) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            const float keep = upper ? v[half + i] : v[i], give = upper ? v[i] : v[half + i];
            v[i] = keep + __shfl_xor_sync(~0u, give, half);
        }
    }
    float sum = v[0];
#pragma unroll
    for (int shift = N; shift < 32; shift <<= 1) sum += __shfl_xor_sync(~0u, sum, shift);
    return sum;
}

// The sum over the block of each of N values, in thread i < N for value i.
template <int N>
__device__ __forceinline__ float sum_block(float (&v)[N], float (&shared)[WARPS][TOKENS]) {
    const float own = sum_each(v);
    __syncthreads();
    if ((threadIdx.x & 31) < N) shared[threadIdx.x >> 5][threadIdx.x & 31] = own;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += shared[w][threadIdx.x % N];
    return sum;
}

__device__ __forceinline__ float dot(uint4 a, uint4 b, float sum) {
    const uint32_t *as = &a.x, *bs = &b.x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 x = unpack2<bf16>(as[i]), y = unpack2<bf16>(bs[i]);
        sum = fmaf(x.x, y.x, sum), sum = fmaf(x.y, y.y, sum);
    }
    return sum;
}

// The row of the router, or of the shared expert's gate, in 16-byte words.
__device__ __forceinline__ const uint4* row_of(const route::LogitsArgs& a, int e) {
    const void* from = e < a.n ? a.w : a.w_shared;
    return static_cast<const uint4*>(from) + static_cast<int64_t>(e < a.n ? e : 0) * (a.m / 8);
}

// CHUNKS: of 8 columns a thread.
template <int CHUNKS>
__device__ __forceinline__ void logits(const route::LogitsArgs& a) {
    __shared__ float shared[WARPS][TOKENS];
    const int row = a.m / 8;  // 16-byte words
    const int count = a.n + (a.w_shared != nullptr);
    uint4 ws[CHUNKS], h[CHUNKS][TOKENS];
    Vec<float, 8> norm[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {  // constants: before the wait
        const int i = threadIdx.x + c * THREADS;
        ws[c] = make_uint4(0, 0, 0, 0);
        if (i >= row) continue;
        ws[c] = row_of(a, blockIdx.x)[i], norm[c] = load<float, 8>(a.norm + 8 * i);
        for (int e = blockIdx.x + gridDim.x; e < count; e += gridDim.x) prefetch_l2(row_of(a, e) + i);
    }
    pdl_launch();  // the next launch reads only constants before its wait, so it may start now
    pdl_wait();
    float square[TOKENS] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int i = threadIdx.x + c * THREADS;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            h[c][t] = make_uint4(0, 0, 0, 0);
            if (t < a.tokens && i < row) h[c][t] = static_cast<const uint4*>(a.x)[t * row + i];
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int i = threadIdx.x + c * THREADS;
        if (i >= row) continue;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t >= a.tokens) break;
            square[t] = dot(h[c][t], h[c][t], square[t]);
            uint32_t* pairs = &h[c][t].x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 x = unpack2<bf16>(pairs[j]);
                pairs[j] = pack2<bf16>(x.x * norm[c].v[2 * j], x.y * norm[c].v[2 * j + 1]);
            }
            if (blockIdx.x == 0) static_cast<uint4*>(a.h)[t * row + i] = h[c][t];
        }
    }
    const float scale = rsqrtf(sum_block(square, shared) / a.m + a.eps);
    if (blockIdx.x == 0 && threadIdx.x < a.tokens) a.scales[threadIdx.x] = scale;
    for (int e = blockIdx.x; e < count; e += gridDim.x) {
        float sum[TOKENS] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int i = threadIdx.x + c * THREADS;
            if (i < row && e != blockIdx.x) ws[c] = row_of(a, e)[i];
#pragma unroll
            for (int t = 0; t < TOKENS; t++) sum[t] = dot(h[c][t], ws[c], sum[t]);
        }
        const float logit = sum_block(sum, shared) * scale;
        if (threadIdx.x >= a.tokens) continue;
        if (e < a.n)
            a.logits[static_cast<int64_t>(threadIdx.x) * a.n + e] = logit;
        else
            a.shared_gates[threadIdx.x] = 1.f / (1.f + expf(-logit));
    }
}

}  // namespace

// variant router_logits_bf16_1: dtype=bf16 multiple=8 chunks=1
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    router_logits_bf16_1(const __grid_constant__ route::LogitsArgs a) {
    logits<1>(a);
}
// variant router_logits_bf16_2: dtype=bf16 multiple=8 chunks=2
extern "C" __global__ void __launch_bounds__(THREADS)
    router_logits_bf16_2(const __grid_constant__ route::LogitsArgs a) {
    logits<2>(a);
}
