// Products of a weight with few rows of activations on Hopper: as fast as the weight can be read.
//
//   out[m, n] = sum over k of x[m, k] · w[n, k],  m ≤ NT,  w: [N, K] read once.
//
// The weight's rows fill the 64-row side of wgmma, the tokens its other side. One warp streams boxes of the
// weight through a ring of shared memory by TMA, another streams x, four multiply. Blocks get equal shares of
// the weight: `rows` of it, and where the rows do not fill the device, a share of k too (`splits`); the
// blocks of one share are a cluster and add up through each other's shared memory, in their order.
//
// A launch takes at most half of an SM's shared memory and registers, so that the next one's blocks fit
// beside it. They are let in `trigger` stages before the last of the weight is asked for; they fill their own
// rings while this launch multiplies, adds up and ends, and memory never rests.
//
// A norm ahead of the product costs nothing here: whoever wrote x has multiplied it by the norm's weight and
// left sums of squares; the scale 1 / rms is applied to the sums, as RESIDUAL leaves it for the next product.
#pragma once
#include <cuda.h>

#include "cluster.cuh"
#include "reduce.cuh"

namespace skinny {

enum Out : int { STORE, STORE_F32, RESIDUAL, SWIGLU };  // SWIGLU: w's rows are (gate, up) pairs

constexpr int MAX_TOKENS = 64;                 // of a row of sums of squares
constexpr int CONSUMERS = 128, THREADS = 256;  // four warps multiply; weight, x, and scale have one each
constexpr int SWIZZLE = 64;                    // elements of k in a box: 128 bytes
constexpr int SCALE_READY = 1, CONSUMERS_ONLY = 2, BARRIERS_MADE = 3;  // named barriers

struct Args {
    void* out;             // [M, ld_out]; for RESIDUAL it is added to
    const float* squares;  // [square_groups, MAX_TOKENS] of what x was before the norm; null: x as it is
    const float* norm;     // RESIDUAL: [N] weight of the norm that follows; null: none does
    void* normed;          // [M, N]: the new residual times `norm`
    float* next_squares;   // [tiles · ⌈rows / 16⌉, MAX_TOKENS] of the new residual
    int m, n, k, ld_out, kind;
    int tiles, groups;     // a group of `splits` blocks takes every groups-th tile
    int rows;              // of a tile: a multiple of 8
    int chunks;            // of k: what a stage holds
    int splits;            // of k; then each cluster has one tile
    int multicast;         // blocks of a cluster that share one copy of x; 1 if splits > 1
    int wide;              // boxes of 64 k in a stage
    int depth_w, depth_x;  // stages of the rings
    int trigger;           // stages still to ask for when the next launch may start
    int square_groups;
    int sums;  // where a tile's sums lie in shared memory: in the rings where it is the only one
    float eps;
};

// What a ring of stages knows on one side: the slot, and the parity of the phase to wait for. Those who read
// begin with parity 0, those who fill with 1.
struct Place {
    int slot = 0;
    uint32_t parity;
    __device__ __forceinline__ explicit Place(uint32_t first) : parity(first) {}
    __device__ __forceinline__ void advance(int depth) {
        if (++slot == depth) slot = 0, parity ^= 1;
    }
};

// A barrier of some of the block's warps, by number (0 is __syncthreads).
__device__ __forceinline__ void warps_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void warps_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Where things lie in shared memory, and which part of the work is this block's.
template <int NT>
struct Block {
    static constexpr int J = NT / 8;  // fragments beside each other: 16 rows of the weight, 8 tokens
    uint32_t w, x, full_w, empty_w, full_x, empty_x, summed, scale, sums;
    int stage_w, stage_x;  // bytes
    int group, split, rounds, k0, k1;
    int fragments;  // of a tile; fragment u is finished by the split u % splits as its u / splits-th

    __device__ __forceinline__ Block(const Args& a, uint32_t shared) {
        stage_w = a.rows * 128 * a.wide, stage_x = NT * 128 * a.wide;
        w = shared, x = w + a.depth_w * stage_w;
        full_w = x + a.depth_x * stage_x, empty_w = full_w + 8 * a.depth_w;
        full_x = empty_w + 8 * a.depth_w, empty_x = full_x + 8 * a.depth_x;
        summed = empty_x + 8 * a.depth_x, scale = summed + 16, sums = shared + a.sums;
        group = blockIdx.x / a.splits, split = blockIdx.x % a.splits;
        // Blocks that share x take the same number of tiles, some of them past the end.
        const int first = a.multicast > 1 ? 0 : group;
        rounds = (a.tiles - first + a.groups - 1) / a.groups;
        k0 = a.chunks * split / a.splits, k1 = a.chunks * (split + 1) / a.splits;
        fragments = (a.rows + 15) / 16 * J;
    }
    __device__ __forceinline__ int tile(const Args& a, int round) const { return group + round * a.groups; }
    __device__ __forceinline__ int slots(const Args& a) const {
        return (fragments + a.splits - 1) / a.splits;
    }

    // Makes the barriers, by one warp.
    __device__ __forceinline__ void make_barriers(const Args& a) const {
        const int lane = threadIdx.x & 31;
#pragma unroll 1
        for (int i = lane; i < 2 * (a.depth_w + a.depth_x) + 1; i += 32) {
            const uint32_t bar = full_w + 8 * i;
            const bool by_warps = (bar >= empty_w && bar < full_x) || (bar >= empty_x && bar < summed);
            barrier_init(bar, by_warps ? CONSUMERS / 32 * (bar >= empty_x ? a.multicast : 1) : 1);
        }
        __syncwarp();
        if (lane == 0 && a.splits > 1) {
            const int mine = (fragments - split + a.splits - 1) / a.splits;
            barrier_arrive_expect(summed, mine * a.splits * 512);
        }
        barrier_init_fence();
        __syncwarp();
    }
};

template <int NT>
__device__ __forceinline__ void stream_weight(const void* map, const Args& a, const Block<NT>& b) {
    const int total = b.rounds * (b.k1 - b.k0), fire = max(total - a.trigger, min(a.depth_w, total));
    const uint64_t policy = l2_evict_first();
    Place at(1);
    int i = 0;
#pragma unroll 1
    for (int round = 0; round < b.rounds; round++) {
#pragma unroll 1
        for (int k = b.k0; k < b.k1; k++, i++) {
            if (i == fire) pdl_wait(), pdl_launch();
            const uint32_t full = b.full_w + 8 * at.slot, to = b.w + at.slot * b.stage_w;
            barrier_wait(b.empty_w + 8 * at.slot, at.parity);
            barrier_arrive_expect(full, b.stage_w);
#pragma unroll 1
            for (int j = 0; j < a.wide; j++)
                tma_load2(to + j * a.rows * 128, map, (k * a.wide + j) * SWIZZLE, b.tile(a, round) * a.rows,
                          full, policy);
            at.advance(a.depth_w);
        }
    }
    if (fire == total) pdl_wait(), pdl_launch();
}

template <int NT>
__device__ __forceinline__ void stream_x(const void* map, const Args& a, const Block<NT>& b) {
    const uint64_t policy = l2_evict_last();
    const uint32_t rank = a.multicast > 1 ? cluster_rank() : 0;
    const int slice = NT / a.multicast;  // rows of x that this block fetches for all
    const uint16_t all = (1 << a.multicast) - 1;
    pdl_wait();
    Place at(1);
#pragma unroll 1
    for (int round = 0; round < b.rounds; round++) {
#pragma unroll 1
        for (int k = b.k0; k < b.k1; k++) {
            const uint32_t full = b.full_x + 8 * at.slot;
            const uint32_t to = b.x + at.slot * b.stage_x + rank * slice * 128;
            barrier_wait(b.empty_x + 8 * at.slot, at.parity);
            barrier_arrive_expect(full, b.stage_x);
#pragma unroll 1
#pragma unroll 1
            for (int j = 0; j < a.wide; j++) {
                const int column = (k * a.wide + j) * SWIZZLE;
                if (a.multicast > 1)
                    tma_multicast2(to + j * NT * 128, map, column, rank * slice, full, all, policy);
                else
                    tma_load2(to + j * NT * 128, map, column, 0, full, policy);
            }
            at.advance(a.depth_x);
        }
    }
}

// scale[token] = 1 / rms from the sums of squares, added in an order that does not depend on NT: four sums of
// every fourth group.
template <int NT>
__device__ __forceinline__ void prepare_scale(const Args& a, float* scale) {
    constexpr int EACH = NT > 32 ? NT / 32 : 1, SLICES = NT < 32 ? 32 / NT : 1, SUMS = 4 / SLICES;
    const int lane = threadIdx.x & 31, token = lane % min(NT, 32) * EACH, slice = lane / min(NT, 32);
    pdl_wait();
    float sum[SUMS][EACH] = {};
#pragma unroll 4
    for (int i = slice; i < a.square_groups; i += 4) {
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            if (i + s * SLICES >= a.square_groups) continue;
            auto v = load<float, EACH>(a.squares + (i + s * SLICES) * MAX_TOKENS + token);
#pragma unroll
            for (int e = 0; e < EACH; e++) sum[s][e] += v.v[e];
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
        for (int s = 0; s < SUMS; s++) {
            if (SLICES >= 2) sum[s][e] += __shfl_xor_sync(~0u, sum[s][e], NT);
            if (SLICES == 4) sum[s][e] += __shfl_xor_sync(~0u, sum[s][e], 2 * NT);
        }
        float all = sum[0][e];
        if constexpr (SUMS == 2) all += sum[1][e];
        if constexpr (SUMS == 4) all = (all + sum[1][e]) + (sum[2][e] + sum[3][e]);
        if (slice == 0) scale[token + e] = rsqrtf(all / a.k + a.eps);
    }
}

// What an output fragment (16 rows of the weight, 8 tokens) needs from memory, asked for ahead of the sums.
struct Before {
    uint32_t old[2];
    float norm[2];
};

struct Fragment {
    int token0, row, n0;  // row: in its tile
    bool valid[2];        // its halves of eight rows
    __device__ __forceinline__ Fragment(const Args& a, int tile, int row, int token0)
        : token0(token0), row(row), n0(tile * a.rows + row) {
        valid[0] = row < a.rows && n0 < a.n, valid[1] = row + 8 < a.rows && n0 + 8 < a.n;
    }
};

template <typename T>
__device__ __forceinline__ Before look_before(const Args& a, const Fragment& f) {
    const int lane = threadIdx.x & 31, token = f.token0 + lane / 4;
    Before b = {};
    if (a.kind != RESIDUAL) return b;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!f.valid[h]) continue;
        const T* p = static_cast<const T*>(a.out) + static_cast<int64_t>(token) * a.ld_out + f.n0 + 8 * h;
        if (token < a.m) b.old[h] = *reinterpret_cast<const uint32_t*>(p + lane % 4 * 2);
        if (a.norm) b.norm[h] = a.norm[f.n0 + 8 * h + lane / 4];
    }
    return b;
}

// Finishes and stores a fragment. Pairs of rows of one token are stored: the transpose of what lanes hold.
template <typename T>
__device__ __forceinline__ void finish(const Args& a, const Fragment& f, const float* scale, float4 sums,
                                       const Before& before) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4, token = f.token0 + g;
    const int64_t row = static_cast<int64_t>(token) * a.ld_out;
    float v[2][2] = {{sums.x, sums.y}, {sums.z, sums.w}}, squares[2] = {};
    if (a.squares) {
        const float2 s = *reinterpret_cast<const float2*>(scale + f.token0 + 2 * t);
#pragma unroll
        for (int h = 0; h < 2; h++) v[h][0] *= s.x, v[h][1] *= s.y;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (!f.valid[h]) continue;
        const int n = f.n0 + 8 * h;
        if (a.kind == STORE_F32) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int mine = f.token0 + 2 * t + i;
                if (mine < a.m)
                    static_cast<float*>(a.out)[static_cast<int64_t>(mine) * a.ld_out + n + g] = v[h][i];
            }
            continue;
        }
        if (a.kind == RESIDUAL) {
            const float2 old = unpack2<T>(movmatrix(before.old[h]));
            v[h][0] += old.x, v[h][1] += old.y;
        }
        const uint32_t packed = pack2<T>(v[h][0], v[h][1]), pair = movmatrix(packed);
        if (a.kind == SWIGLU) {
            // The two projections are rounded first, as they are where they are stored.
            const float2 p = unpack2<T>(pair);
            if (token < a.m)
                static_cast<T*>(a.out)[row + n / 2 + t] = from_f32<T>(p.x / (1.f + expf(-p.x)) * p.y);
            continue;
        }
        if (token < a.m) *reinterpret_cast<uint32_t*>(static_cast<T*>(a.out) + row + n + 2 * t) = pair;
        if (a.kind == RESIDUAL && a.norm) {
            const float2 x = unpack2<T>(packed);
            squares[0] += x.x * x.x, squares[1] += x.y * x.y;
            const uint32_t normed = movmatrix(pack2<T>(x.x * before.norm[h], x.y * before.norm[h]));
            T* to = static_cast<T*>(a.normed) + static_cast<int64_t>(token) * a.n + n + 2 * t;
            if (token < a.m) *reinterpret_cast<uint32_t*>(to) = normed;
        }
    }
    if (a.kind == RESIDUAL && a.norm) {
#pragma unroll
        for (int o = 4; o < 32; o *= 2)
#pragma unroll
            for (int i = 0; i < 2; i++) squares[i] += __shfl_xor_sync(~0u, squares[i], o);
        const int tile = (f.n0 - f.row) / a.rows, group = tile * ((a.rows + 15) / 16) + f.row / 16;
        float* to = a.next_squares + group * MAX_TOKENS + f.token0 + 2 * t;
        if (g == 0) *reinterpret_cast<float2*>(to) = make_float2(squares[0], squares[1]);
    }
}

// One tile's products: [64 MB rows x NT tokens], of which the rows past a.rows mean nothing.
template <typename T, int NT, int MB>
__device__ __forceinline__ void multiply(const Args& a, const Block<NT>& b, float (&acc)[MB][NT / 2],
                                         Place& at_w, Place& at_x) {
    const int lane = threadIdx.x & 31;
    int last_w = -1, last_x = -1;
    auto release = [&]() {
        if (lane == 0) barrier_arrive(b.empty_w + 8 * last_w);
        if (a.multicast == 1) {
            if (lane == 0) barrier_arrive(b.empty_x + 8 * last_x);
        } else if (lane < a.multicast) {
            barrier_arrive_at(b.empty_x + 8 * last_x, lane);
        }
    };
#pragma unroll 1
    for (int k = b.k0; k < b.k1; k++) {
        barrier_wait(b.full_w + 8 * at_w.slot, at_w.parity);
        barrier_wait(b.full_x + 8 * at_x.slot, at_x.parity);
        wgmma_fence();
#pragma unroll 1
        for (int j = 0; j < a.wide; j++) {
            const uint32_t w = b.w + at_w.slot * b.stage_w + j * a.rows * 128;
            const uint32_t x = b.x + at_x.slot * b.stage_x + j * NT * 128;
#pragma unroll
            for (int kk = 0; kk < 4; kk++)
#pragma unroll
                for (int m = 0; m < MB; m++)
                    Wgmma<T, NT>::ss(acc[m], wgmma_operand(w + m * 8192 + kk * 32, 1024),
                                     wgmma_operand(x + kk * 32, 1024), kk > 0 || j > 0 || k > b.k0);
        }
        wgmma_commit();
        if (last_w >= 0) wgmma_wait<1>(), release();
        last_w = at_w.slot, last_x = at_x.slot;
        at_w.advance(a.depth_w), at_x.advance(a.depth_x);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MB; m++) wgmma_pin(acc[m]);
    if (last_w >= 0) release();
}

// Puts the sums of a tile where they are finished: into this block's shared memory, or the share of each
// split into that split's. From there one loop finishes them all; unrolled over the registers instead, it is
// code that every launch has to fetch anew.
template <int NT, int MB>
__device__ __forceinline__ void leave_sums(const Args& a, const Block<NT>& b,
                                           const float (&acc)[MB][NT / 2]) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slots = b.slots(a);
    const uint32_t inverse = 65536 / a.splits + 1;  // u · inverse >> 16 = u / splits for u < 4096
#pragma unroll
    for (int m = 0; m < MB; m++) {
#pragma unroll
        for (int j = 0; j < NT / 8; j++) {
            const int u = (m * 4 + warp) * (NT / 8) + j;
            if (u >= b.fragments) continue;
            const float4 v =
                make_float4(acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2], acc[m][4 * j + 3]);
            if (a.splits == 1) {
                store_shared16(b.sums + (u * 32 + lane) * 16,
                               make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                          __float_as_uint(v.w)));
            } else {
                const int slot = u * inverse >> 16, rank = u - slot * a.splits;
                store_cluster16(b.sums + ((b.split * slots + slot) * 32 + lane) * 16, rank, v, b.summed);
            }
        }
    }
}

// Adds up what the splits of a tile left here, in their order, and finishes this block's fragments.
template <typename T, int NT>
__device__ __forceinline__ void finish_tile(const Args& a, const Block<NT>& b, int tile, const float* scale) {
    constexpr int J = NT / 8;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slots = b.slots(a);
#pragma unroll 1
    for (int slot = warp; slot * a.splits + b.split < b.fragments; slot += CONSUMERS / 32) {
        const int u = slot * a.splits + b.split;
        const Fragment f(a, tile, u / J * 16, u % J * 8);
        const Before before = look_before<T>(a, f);
        if (a.splits > 1 && slot == warp) barrier_wait(b.summed, 0);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
        for (int r = 0; r < a.splits; r++) {
            const uint4 v = load_shared16(b.sums + ((r * slots + slot) * 32 + lane) * 16);
            sum.x += __uint_as_float(v.x), sum.y += __uint_as_float(v.y);
            sum.z += __uint_as_float(v.z), sum.w += __uint_as_float(v.w);
        }
        finish<T>(a, f, scale, sum, before);
    }
}

template <typename T, int NT, int MB>
__device__ __forceinline__ void consume(const Args& a, const Block<NT>& b, const float* scale) {
    Place at_w(0), at_x(0);
#pragma unroll 1
    for (int round = 0; round < b.rounds; round++) {
        float acc[MB][NT / 2];
        multiply<T, NT, MB>(a, b, acc, at_w, at_x);
        if (round == 0) {
            pdl_wait();
            if (a.squares) warps_sync(SCALE_READY, CONSUMERS + 32);
        }
        // Of one block's sums: nobody reads the ring, or the sums of the tile before, any more.
        if (a.splits == 1) warps_sync(CONSUMERS_ONLY, CONSUMERS);
        leave_sums<NT, MB>(a, b, acc);
        if (a.splits == 1) warps_sync(CONSUMERS_ONLY, CONSUMERS);
        finish_tile<T, NT>(a, b, b.tile(a, round), scale);
    }
}

template <typename T, int NT, int MB>
__device__ __forceinline__ void run(const void* w, const void* x, const Args& a) {
    constexpr bool BIG = MB * NT > 96;  // sums that do not fit half of an SM's registers shared out evenly
    extern __shared__ __align__(1024) uint8_t shared[];
    const Block<NT> b(a, shared_address(shared));
    float* scale = reinterpret_cast<float*>(shared + (b.scale - b.w));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool cluster = a.splits > 1 || a.multicast > 1;
    if (warp == 4) {  // the weight's warp waits for nobody
        b.make_barriers(a);
        warps_arrive(BARRIERS_MADE, THREADS);
    } else {
        warps_sync(BARRIERS_MADE, THREADS);
    }
    if (cluster) cluster_arrive();  // before anything is sent to a block, its barriers are made
    if (warp < CONSUMERS / 32) {
        if constexpr (BIG) registers_raise<200>();
        if (cluster) cluster_wait();
        consume<T, NT, MB>(a, b, scale);
    } else {
        if constexpr (BIG) registers_drop<56>();
        if (warp == 4 && lane == 0) stream_weight<NT>(w, a, b);
        __syncwarp();
        if (cluster) cluster_wait();
        if (warp == 5 && lane == 0) stream_x<NT>(x, a, b);
        if (warp == 6 && a.squares) {
            prepare_scale<NT>(a, scale);
            warps_arrive(SCALE_READY, CONSUMERS + 32);
        }
        __syncwarp();
    }
    if (a.multicast > 1) {  // shared memory that the others may still use must not go away
        cluster_arrive();
        cluster_wait();
    }
}

}  // namespace skinny

#define SKINNY_KERNEL(TYPE, NT, MB)                                                                     \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 2) skinny_##TYPE##_##NT##_##MB(       \
        const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, skinny::Args a) { \
        skinny::run<TYPE, NT, MB>(&w, &x, a);                                                           \
    }
