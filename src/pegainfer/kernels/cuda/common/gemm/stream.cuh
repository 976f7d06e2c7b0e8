// GEMMs of a weight with few rows of activations (decode): bound by how fast the weight can be read.
//
//   out[m, n] = sum over k of x[m, k] · w[n, k],  m ≤ 8 NT,  w: [N, K] read once.
//
// The weight's rows fill the 16-row side of mma.m16n8k16, the tokens its 8-column side. The order of k within
// a GEMM is free as long as both operands share it, so each thread takes 16 contiguous bytes of a weight's
// row as its share of two mma steps: fragments come straight from memory, without a shuffle. Blocks share out
// the weight's rows evenly to the single row (tiles are partly masked), or K as well (`splits`).
//
// Each warp streams its own chunks of 64 k through a ring of cp.async stages that only its own threads read
// back, so the main loop has no barrier. The ring is filled before griddepcontrol.wait: weights are constant.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace stream {

enum class Out { Store, StoreF32, Residual, SwiGLU };

constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int TILE = 16;                 // rows of the weight
constexpr int CHUNK = 64;                // k of one step of one warp
constexpr int STAGE = TILE * CHUNK * 2;  // bytes
constexpr int X_PAD = 64;                // bytes after each token's row, so that two rows share no bank

// Where tile row r of the weight lies: for SwiGLU, rows come as (gate, up) pairs, and a pair must end in one
// thread, which holds rows g and g + 8.
template <Out OUT>
__device__ __forceinline__ int row_in_tile(int r) {
    return OUT == Out::SwiGLU ? 2 * (r & 7) + (r >> 3) : r;
}

template <typename T, Out OUT>
__device__ __forceinline__ void finish(const Args& a, int token, int n, float v, float pair) {
    const int64_t row = static_cast<int64_t>(token) * a.ld_out;
    if constexpr (OUT == Out::Store) static_cast<T*>(a.out)[row + n] = from_f32<T>(v);
    if constexpr (OUT == Out::StoreF32) static_cast<float*>(a.out)[row + n] = v;
    if constexpr (OUT == Out::Residual) {
        T* p = static_cast<T*>(a.out) + row + n;
        *p = from_f32<T>(to_f32(*p) + v);
    }
    if constexpr (OUT == Out::SwiGLU) {
        // The two projections are rounded first, as they are where they are stored.
        const float gate = to_f32(from_f32<T>(v)), up = to_f32(from_f32<T>(pair));
        static_cast<T*>(a.out)[row + n / 2] = from_f32<T>(gate / (1.f + expf(-gate)) * up);
    }
}

// Copies x[m, k0 .. k0 + span) into shared memory, zeros past K. Through registers: waiting for a cp.async
// group would also wait for the ring's stages, which were requested before. Eight loads are under way at a
// time.
template <typename T>
__device__ __forceinline__ void stage_x(const Args& a, uint32_t xs, int stride, int k0, int span) {
    const int pieces = span / 8, total = a.m * pieces;
    const T* x = static_cast<const T*>(a.x);
    for (int i0 = threadIdx.x; i0 < total; i0 += 8 * THREADS) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int i = i0 + j * THREADS, token = i / pieces, k = k0 + i % pieces * 8;
            v[j] = make_uint4(0, 0, 0, 0);
            if (i < total && k < a.k) {
                const int64_t row = a.rows ? a.rows[token] : token;
                v[j] = *reinterpret_cast<const uint4*>(x + row * a.k + k);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int i = i0 + j * THREADS;
            if (i < total) store_shared16(xs + i / pieces * stride + i % pieces * 16, v[j]);
        }
    }
}

// Multiplies the staged x[m, K] by norm[K] in place and puts 1 / rms of each row into scale[m], to be applied
// to the sums later. float16 could overflow so: EARLY applies the scale as well, after a pass for the
// squares. Each thread takes its k of every token, so that norm is read once.
template <typename T, int TOKENS, bool EARLY>
__device__ __forceinline__ void normalise(const Args& a, uint32_t xs, int stride, float* scale, float* sums) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    float squares[TOKENS] = {};
    for (int pass = EARLY ? 0 : 1; pass < 2; pass++) {
        for (int k = threadIdx.x * 8; k < a.k; k += THREADS * 8) {
            const float4 g0 = *reinterpret_cast<const float4*>(a.norm + k);
            const float4 g1 = *reinterpret_cast<const float4*>(a.norm + k + 4);
            const float2 g[4] = {{g0.x, g0.y}, {g0.z, g0.w}, {g1.x, g1.y}, {g1.z, g1.w}};
#pragma unroll
            for (int token = 0; token < TOKENS; token++) {
                if (token >= a.m) break;
                const uint32_t at = xs + token * stride + k * 2;
                uint4 v = load_shared16(at);
                uint32_t* words = &v.x;
                const float s = EARLY && pass ? scale[token] : 1.f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float2 f = unpack2<T>(words[i]);
                    squares[token] += f.x * f.x + f.y * f.y;
                    words[i] = pack2<T>(f.x * s * g[i].x, f.y * s * g[i].y);
                }
                if (pass) store_shared16(at, v);
            }
        }
        if (EARLY && pass) break;
#pragma unroll
        for (int token = 0; token < TOKENS; token++) {
            const float sum = warp_sum(squares[token]);
            if (lane == 0) sums[token * WARPS + warp] = sum;
        }
        __syncthreads();
        if (threadIdx.x < TOKENS) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += sums[threadIdx.x * WARPS + i];
            scale[threadIdx.x] = rsqrtf(sum / a.k + a.eps);
        }
        __syncthreads();
    }
    __syncthreads();
}

template <typename T, int NT, Out OUT, bool NORM>
__device__ __forceinline__ void run(const Args& a) {
    constexpr int TOKENS = 8 * NT, UNIT = OUT == Out::SwiGLU ? 2 : 1;
    constexpr bool LATE = NORM && __is_same(T, bf16);
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float scale[TOKENS], sums[TOKENS * WARPS];
    __shared__ bool last;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

    // This block's rows [r0, r1) and chunks [c0, c1).
    const int groups = gridDim.x / a.splits, group = blockIdx.x / a.splits, split = blockIdx.x % a.splits;
    const int units = a.n / UNIT;
    const int r0 = static_cast<int64_t>(units) * group / groups * UNIT;
    const int r1 = static_cast<int64_t>(units) * (group + 1) / groups * UNIT;
    const int chunks = (a.k + CHUNK - 1) / CHUNK;
    const int c0 = chunks * split / a.splits, c1 = chunks * (split + 1) / a.splits;
    const int tiles = (r1 - r0 + TILE - 1) / TILE;
    auto tile_row = [&](int tile) { return r0 + (r1 - r0) / UNIT * tile / max(tiles, 1) * UNIT; };

    // Ring of stages, this warp's; each thread reads back what it fetched itself.
    const uint32_t ring = shared_address(shared) + (warp * a.depth) * STAGE + lane * 16;
    const int steps = (c1 - c0 - warp + WARPS - 1) / WARPS;  // of this warp, per tile; may be ≤ 0
    const T* w = static_cast<const T*>(a.w);
    int fetch_tile = steps > 0 ? 0 : tiles, fetch_chunk = c0 + warp, fetch_slot = 0;
    auto fetch = [&]() {
        if (fetch_tile < tiles) {
            const int begin = tile_row(fetch_tile), end = tile_row(fetch_tile + 1);
            const int k = fetch_chunk * CHUNK + t * 8;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int row = begin + row_in_tile<OUT>(g + 8 * h);
                const T* from = w + static_cast<int64_t>(row) * a.k + k;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const bool valid = row < end && k + 32 * j < a.k;
                    cp_async16(ring + fetch_slot * STAGE + (2 * j + h) * 512, valid ? from + 32 * j : w,
                               valid);
                }
            }
            fetch_chunk += WARPS;
            if (fetch_chunk >= c1) fetch_chunk = c0 + warp, fetch_tile++;
            if (++fetch_slot == a.depth) fetch_slot = 0;
        }
        cp_async_commit();
    };
    for (int i = 0; i < a.depth; i++) fetch();
    pdl_wait();
    pdl_launch();

    const int span = (chunks + a.splits - 1) / a.splits * CHUNK, stride = span * 2 + X_PAD;
    const uint32_t xs = shared_address(shared) + WARPS * a.depth * STAGE;
    float* red = reinterpret_cast<float*>(shared + WARPS * a.depth * STAGE + a.m * stride);
    stage_x<T>(a, xs, stride, c0 * CHUNK, (c1 - c0) * CHUNK);
    __syncthreads();
    if constexpr (NORM) normalise<T, TOKENS, __is_same(T, f16)>(a, xs, stride, scale, sums);

    int slot = 0;
    for (int tile = 0; tile < tiles; tile++) {
        float acc[NT][4] = {};
        uint32_t xp = xs + warp * (CHUNK * 2) + g * stride + t * 16;
        for (int s = 0; s < steps; s++, xp += WARPS * CHUNK * 2) {
            cp_async_wait_upto(a.depth - 1);
            const uint32_t stage = ring + slot * STAGE;
            if (++slot == a.depth) slot = 0;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 lo = load_shared16(stage + (2 * j) * 512),
                            hi = load_shared16(stage + (2 * j + 1) * 512);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    uint4 b = make_uint4(0, 0, 0, 0);
                    if (nt * 8 + g < a.m) b = load_shared16(xp + nt * 8 * stride + j * 64);
                    mma<T>(acc[nt], lo.x, hi.x, lo.y, hi.y, b.x, b.y);
                    mma<T>(acc[nt], lo.z, hi.z, lo.w, hi.w, b.z, b.w);
                }
            }
            fetch();  // the mma above have read the stage that this overwrites
        }
        // Sum over the warps in their order; two buffers, so that one barrier a tile is enough.
        float* mine = red + (tile & 1) * (WARPS * NT * 128);
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) mine[(warp * NT + nt) * 128 + i * 32 + lane] = acc[nt][i];
        __syncthreads();
        const int begin = tile_row(tile), end = tile_row(tile + 1);
        for (int i = threadIdx.x; i < TILE / UNIT * TOKENS; i += THREADS) {
            const int r = i % (TILE / UNIT), token = i / (TILE / UNIT), n = begin + r * UNIT;
            if (token >= a.m || n >= end) continue;
            float v[2] = {};
            const float* from = mine + token / 8 * 128 + (r & 7) * 4 + (token & 7) / 2;  // lane 4 g + t
#pragma unroll
            for (int u = 0; u < UNIT; u++) {
                const int half = OUT == Out::SwiGLU ? u : r >> 3, i4 = half * 2 + (token & 1);
#pragma unroll
                for (int from_warp = 0; from_warp < WARPS; from_warp++)
                    v[u] += from[from_warp * NT * 128 + i4 * 32];
                if (LATE) v[u] *= scale[token];
            }
            if (a.splits == 1) {
                finish<T, OUT>(a, token, n, v[0], v[1]);
            } else {
                float* p = a.partial + (static_cast<int64_t>(split) * a.m + token) * a.n + n;
#pragma unroll
                for (int u = 0; u < UNIT; u++) p[u] = v[u];
            }
        }
    }
    if (a.splits == 1) return;

    // The split that comes last adds all of them, in their order.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(a.arrivals + group, 1) == a.splits - 1;
        if (last) a.arrivals[group] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    const int width = (r1 - r0) / UNIT;
    for (int i = threadIdx.x; i < width * a.m; i += THREADS) {
        const int token = i / width, n = r0 + i % width * UNIT;
        float v[2] = {};
        for (int s = 0; s < a.splits; s++)
#pragma unroll
            for (int u = 0; u < UNIT; u++)
                v[u] += __ldcg(a.partial + (static_cast<int64_t>(s) * a.m + token) * a.n + n + u);
        finish<T, OUT>(a, token, n, v[0], v[1]);
    }
}

}  // namespace stream

#define STREAM_KERNEL(NAME, T, NT, OUT, NORM)                                               \
    extern "C" __global__ void __launch_bounds__(stream::THREADS, 2) NAME(stream::Args a) { \
        stream::run<T, NT, stream::Out::OUT, NORM>(a);                                      \
    }
