// GEMMs of FP8 activations with an FP8 weight on Hopper, for many rows of activations.
//
//   out[m, n] = sum over groups g of 128 k: sx[m, g] · sw[n, g] · (sum over k in g of x[m, k] · w[n, k])
//
// wgmma adds E4M3 products up with fewer bits than float32 has, so its sums of 128 columns are promoted:
// scaled and added to float32 sums in registers. Two warpgroups multiply, 64 tokens each, and take turns:
// while one promotes, the tensor cores work for the other. The weight's scale holds for a row, and is applied
// at the end, or for 128 columns of a row (GROUPS), and is applied with the activations'.
//
// Blocks stay: each takes every gridDim.x-th (tile, split of k). One thread brings both operands and their
// scales through a ring of stages and goes on with the next tile while the others finish theirs. Where k is
// split, the block that arrives last at a tile adds the splits up in their order.
#pragma once
#include <cuda.h>

#include "skinny.cuh"

namespace fp8 {

using skinny::Place, skinny::operand, skinny::along, skinny::load_shared4;
using skinny::RESIDUAL, skinny::STORE_F32, skinny::SWIGLU;

constexpr int TOKENS = 128, GROUP = 128;       // rows of x in a tile; columns of k that share scales
constexpr int CONSUMERS = 256, THREADS = 384;  // two warpgroups multiply, a warp of the third fetches
constexpr int STAGE_X = TOKENS * GROUP, SCALES = 4 * TOKENS;
constexpr int CONSUMERS_ONLY = 2;  // named barrier

// Where things lie in shared memory: the ring's stages (x, w, scales of x, scales of w), then barriers.
template <int N>
struct Ring {
    static constexpr int STAGE_W = N * GROUP, STAGE = STAGE_X + STAGE_W + (N > 128 ? 2048 : 1024);
    uint32_t stages, full, empty, last;
    int depth;

    __device__ __forceinline__ Ring(const Args& a, uint32_t shared)
        : stages(shared),
          full(shared + a.depth * STAGE),
          empty(full + 8 * a.depth),
          last(empty + 8 * a.depth),
          depth(a.depth) {}
    __device__ __forceinline__ void make_barriers() const {
        for (int i = 0; i < depth; i++)
            mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, CONSUMERS / 32);
        mbarrier_init_fence();
    }
};

// One piece of work: a tile of the output, and which groups of k are added up for it.
template <int N>
struct Work {
    int tile, row, column, split, first, end;

    __device__ __forceinline__ Work(const Args& a, int i) {
        const int tiles = a.tiles_m * a.tiles_n, groups = a.k / GROUP;
        tile = i % tiles, split = i / tiles;
        row = tile % a.tiles_m * TOKENS, column = tile / a.tiles_m * N;
        first = groups * split / a.splits, end = groups * (split + 1) / a.splits;
    }
    static __device__ __forceinline__ int count(const Args& a) { return a.tiles_m * a.tiles_n * a.splits; }
};

// Iterates over the stages of all of a block's work.
template <int N>
struct Stages {
    const Args& a;
    int i;
    Work<N> work;
    int group;
    Place at = Place(1);

    __device__ __forceinline__ explicit Stages(const Args& args)
        : a(args), i(blockIdx.x), work(args, i), group(work.first) {}
    __device__ __forceinline__ bool has() const { return i < Work<N>::count(a); }
    __device__ __forceinline__ void advance(int depth) {
        at.advance(depth);
        if (++group < work.end) return;
        i += gridDim.x;
        work = Work<N>(a, i), group = work.first;
    }
};

// By one thread: requests the operands of all stages. The weight's part of the first ones is requested ahead
// of the wait for the launch before.
template <bool GROUPS, int N>
__device__ __forceinline__ void issue_tma(const void* w, const void* x, const Args& a, const Ring<N>& ring) {
    const uint64_t kept = l2_evict_last(), policy = a.tiles_m > 1 ? kept : l2_evict_first();
    auto request_weight = [&](const Stages<N>& s) {
        const uint32_t full = ring.full + 8 * s.at.slot, to = ring.stages + s.at.slot * ring.STAGE + STAGE_X;
        const int scales = GROUPS ? min(N, a.n - s.work.column) * 4 : 0;
        mbarrier_arrive_expect(full, STAGE_X + ring.STAGE_W + SCALES + scales);
        tma_load2(to, w, s.group * GROUP, s.work.column, full, policy);
        if constexpr (GROUPS)
            bulk_load(to + ring.STAGE_W + SCALES,
                      a.w_scales + static_cast<int64_t>(s.group) * a.n + s.work.column, scales, full, kept);
    };
    Stages<N> first(a), s(a);
    int ahead = 0;
#pragma unroll 1
    for (; ahead < ring.depth && first.has(); ahead++, first.advance(ring.depth)) request_weight(first);
    pdl_wait();
    pdl_launch();
#pragma unroll 1
    for (; s.has(); s.advance(ring.depth)) {
        const uint32_t full = ring.full + 8 * s.at.slot, to = ring.stages + s.at.slot * ring.STAGE;
        if (--ahead < 0) {
            mbarrier_wait(ring.empty + 8 * s.at.slot, s.at.parity);
            request_weight(s);
        }
        tma_load2(to, x, s.group * GROUP, s.work.row, full, kept);
        bulk_load(to + STAGE_X + ring.STAGE_W,
                  a.x_scales + static_cast<int64_t>(s.group) * a.pitch + s.work.row, SCALES, full, kept);
    }
}

__device__ __forceinline__ float2 load_shared8(uint32_t p) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(p) : "memory");
    return v;
}

// One tile's sums: of this warpgroup's 64 tokens with N rows of the weight.
template <bool GROUPS, int N>
__device__ __forceinline__ void multiply(const Ring<N>& ring, int groups, float (&acc)[N / 2], Place& at) {
    const int lane = threadIdx.x & 31, token = (threadIdx.x >> 5) * 16 + lane / 4;
    const uint32_t mine = (threadIdx.x >> 7) * 64 * GROUP;
    float part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0;
#pragma unroll 1
    for (int g = 0; g < groups; g++) {
        const uint32_t stage = ring.stages + at.slot * ring.STAGE, scales = stage + STAGE_X + ring.STAGE_W;
        mbarrier_wait(ring.full + 8 * at.slot, at.parity);
        const uint64_t x = operand(stage + mine), w = operand(stage + STAGE_X);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++) Wgmma<e4m3, N>::ss(part, along(x, kk * 32), along(w, kk * 32), kk > 0);
        wgmma_commit();
        const float sx[2] = {load_shared4(scales + 4 * token), load_shared4(scales + 4 * token + 32)};
        wgmma_wait<0>();
        wgmma_pin(part);
        if constexpr (!GROUPS) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty + 8 * at.slot);
        }
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            float2 sw = make_float2(1, 1);
            if constexpr (GROUPS) sw = load_shared8(scales + SCALES + 4 * (8 * j + 2 * (lane & 3)));
#pragma unroll
            for (int h = 0; h < 2; h++) {
                acc[4 * j + 2 * h] += part[4 * j + 2 * h] * (GROUPS ? sx[h] * sw.x : sx[h]);
                acc[4 * j + 2 * h + 1] += part[4 * j + 2 * h + 1] * (GROUPS ? sx[h] * sw.y : sx[h]);
            }
        }
        if constexpr (GROUPS) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(ring.empty + 8 * at.slot);
        }
        at.advance(ring.depth);
    }
}

// Leaves this split's sums of a tile and adds all of them up where it is the last to come. Returns whether it
// is. Four sums of a thread lie together, and those of all threads side by side.
template <int N>
__device__ __forceinline__ bool add_splits(const Args& a, const Work<N>& work, uint32_t flag,
                                           float (&acc)[N / 2]) {
    const int tiles = a.tiles_m * a.tiles_n;
    float4* sums = reinterpret_cast<float4*>(a.sums) + threadIdx.x;
    float4* mine = sums + (static_cast<int64_t>(work.split) * tiles + work.tile) * (N / 8) * CONSUMERS;
#pragma unroll
    for (int j = 0; j < N / 8; j++)
        mine[j * CONSUMERS] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
    __threadfence();
    named_wait<CONSUMERS>(CONSUMERS_ONLY);
    if (threadIdx.x == 0) {
        const bool last = atomicAdd(a.arrivals + work.tile, 1u) == a.splits - 1u;
        if (last) a.arrivals[work.tile] = 0;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(flag), "r"(static_cast<uint32_t>(last)) : "memory");
    }
    named_wait<CONSUMERS>(CONSUMERS_ONLY);
    if (__float_as_uint(load_shared4(flag)) == 0) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = 0;
#pragma unroll 1
    for (int s = 0; s < a.splits; s++) {
        const float4* theirs = sums + (static_cast<int64_t>(s) * tiles + work.tile) * (N / 8) * CONSUMERS;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float4 v = __ldcg(theirs + j * CONSUMERS);
            acc[4 * j] += v.x, acc[4 * j + 1] += v.y, acc[4 * j + 2] += v.z, acc[4 * j + 3] += v.w;
        }
    }
    return true;
}

// Stores a thread's sums of tokens `token` and token + 8. wgmma leaves it columns 8 j + 2 t and one more;
// four lanes exchange theirs, so that each stores columns that lie together.
template <typename T, int N>
__device__ __forceinline__ void store_sums(const Args& a, const float (&acc)[N / 2], int token, int column) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const bool valid = token + 8 * h < a.m;
        const int64_t row = static_cast<int64_t>(token + 8 * h) * a.ld_out;
#pragma unroll
        for (int j = 0; j < N / 8; j += 4) {
            const int n = column + 8 * (j + t);  // the first of 8 that this lane stores
            const bool stores = valid && n < a.n;
            if (a.kind == STORE_F32) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int c = column + 8 * (j + i) + 2 * t;
                    if (valid && c < a.n)
                        *reinterpret_cast<float2*>(static_cast<float*>(a.out) + row + c) =
                            make_float2(acc[4 * (j + i) + 2 * h], acc[4 * (j + i) + 2 * h + 1]);
                }
                continue;
            }
            uint32_t old[4] = {}, v[4];
            if (a.kind == RESIDUAL) {
                uint4 four = make_uint4(0, 0, 0, 0);
                if (stores) four = *reinterpret_cast<const uint4*>(static_cast<T*>(a.out) + row + n);
                old[0] = four.x, old[1] = four.y, old[2] = four.z, old[3] = four.w;
                transpose4(old);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = unpack2<T>(old[i]);
                v[i] = pack2<T>(acc[4 * (j + i) + 2 * h] + x.x, acc[4 * (j + i) + 2 * h + 1] + x.y);
                if (a.kind == SWIGLU) {  // the projections are rounded, as they are where they are stored
                    const float2 p = unpack2<T>(v[i]);
                    v[i] = pack2<T>(__fdividef(p.x, 1.f + __expf(-p.x)) * p.y, 0.f);
                }
            }
            transpose4(v);
            if (!stores) continue;
            if (a.kind == SWIGLU) {
                const uint2 words = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410)};
                *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + row + n / 2) = words;
            } else {
                *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + row + n) =
                    make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

template <typename T, bool GROUPS, int N>
__device__ __forceinline__ void consume(const Args& a, const Ring<N>& ring) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    Place at(0);
    float acc[N / 2];
#pragma unroll 1
    for (int i = blockIdx.x; i < Work<N>::count(a); i += gridDim.x) {
        const Work<N> work(a, i);
        multiply<GROUPS, N>(ring, work.end - work.first, acc, at);
        if (a.splits > 1 && !add_splits<N>(a, work, ring.last, acc)) continue;
        if constexpr (!GROUPS) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                const int n = work.column + 8 * j + 2 * (lane & 3);
                float2 sw = make_float2(0, 0);
                if (n < a.n) sw = __ldg(reinterpret_cast<const float2*>(a.w_scales + n));
                acc[4 * j] *= sw.x, acc[4 * j + 1] *= sw.y, acc[4 * j + 2] *= sw.x, acc[4 * j + 3] *= sw.y;
            }
        }
        store_sums<T, N>(a, acc, work.row + warp * 16 + lane / 4, work.column);
    }
}

template <typename T, bool GROUPS, int N>
__device__ __forceinline__ void run(const void* w, const void* x, const Args& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Ring<N> ring(a, shared_address(shared));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) ring.make_barriers(), tma_prefetch(w), tma_prefetch(x);
    __syncthreads();
    if (warp < CONSUMERS / 32) {
        registers_raise<232>();
        pdl_wait();
        consume<T, GROUPS, N>(a, ring);
    } else {
        registers_drop<40>();
        if (warp == CONSUMERS / 32 && lane == 0) issue_tma<GROUPS, N>(w, x, a, ring);
    }
}

}  // namespace fp8

#define FP8_KERNEL(NAME, TYPE, GROUPS, N)                                                                 \
    extern "C" __global__ void __launch_bounds__(fp8::THREADS, 1)                                         \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, fp8::Args a) { \
        fp8::run<TYPE, GROUPS, N>(&w, &x, a);                                                             \
    }
