// GEMMs of a weight with few rows of activations on Hopper: as fast as the weight can be read.
//
//   out[m, n] = sum over k of x[m, k] · w[n, k],  m ≤ NT,  w: [N, K] read once.
//
// The weight's rows fill the 64-row side of wgmma, the tokens its other side. One warp streams boxes of the
// weight through a ring of shared memory by TMA, another streams x, four multiply. Blocks get equal shares of
// the weight: `rows` of it, and where the rows do not fill the device, a share of k too (`splits`); the
// blocks of one share are a cluster and add up through each other's shared memory, in their order.
//
// A launch takes at most half of an SM's shared memory and registers, so that the next one's blocks fit
// beside it. They are let in `trigger` stages before the last of the weight is requested; they fill their own
// rings while this launch multiplies, adds up and ends, and memory never rests.
//
// A norm ahead of the GEMM costs nothing here: whoever wrote x has multiplied it by the norm's weight and
// left sums of squares; the scale 1 / rms is applied to the sums, as RESIDUAL leaves it for the next GEMM.
#pragma once
#include <cuda.h>

#include "arguments.cuh"
#include "cluster.cuh"
#include "lora.cuh"
#include "reduce.cuh"

namespace skinny {

enum Out : int { STORE, STORE_F32, RESIDUAL, SWIGLU };  // SWIGLU: w's rows are (gate, up) pairs

constexpr int MAX_TOKENS = 64;                 // of a row of sums of squares
constexpr int CONSUMERS = 128, THREADS = 256;  // four warps multiply, the others fetch
constexpr int SWIZZLE = 64;                    // elements of k in a box: 128 bytes
constexpr int BEFORE_READY = 1, CONSUMERS_ONLY = 2, BARRIERS_MADE = 3;  // named barriers

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

// Where things lie in shared memory, and which part of the work is this block's. Sums are finished in units
// of 32 rows by 8 tokens, unit u by the split u % splits as its u / splits-th.
template <int NT>
struct Block {
    static constexpr int J = NT / 8;
    uint32_t w, x, full_w, empty_w, full_x, empty_x, summed, scale, sums, before;
    int stage_w, stage_x;  // bytes
    int group, split, rounds, k0, k1, units, slots;

    __device__ __forceinline__ Block(const Args& a, uint32_t shared, int bytes_x) {
        stage_w = a.rows * 128 * a.wide, stage_x = bytes_x;
        w = shared, x = w + a.depth_w * stage_w;
        full_w = x + a.depth_x * stage_x, empty_w = full_w + 8 * a.depth_w;
        full_x = empty_w + 8 * a.depth_w, empty_x = full_x + 8 * a.depth_x;
        summed = empty_x + 8 * a.depth_x, scale = summed + 16;
        sums = shared + a.sums, before = shared + a.before;
        split = blockIdx.x;
        group = blockIdx.y, rounds = a.rounds + (group < a.longer);
        k0 = split * a.chunks + min(split, a.leftover), k1 = k0 + a.chunks + (split < a.leftover);
        units = (a.rows + 31) / 32 * J;
        slots = a.splits > 1 ? (units + a.splits - 1) / a.splits : units;
    }
    __device__ __forceinline__ int tile(const Args& a, int round) const { return group + round * a.groups; }

    // Makes the barriers, by one warp.
    __device__ __forceinline__ void make_barriers(const Args& a) const {
        const int lane = threadIdx.x & 31;
#pragma unroll 1
        for (uint32_t bar = full_w + 8 * lane; bar <= summed + 8; bar += 8 * 32) {
            const bool by_warps = (bar >= empty_w && bar < full_x) || (bar >= empty_x && bar < summed);
            mbarrier_init(bar, by_warps ? CONSUMERS / 32 : bar > summed ? a.splits : 1);
        }
        mbarrier_init_fence();
        __syncwarp();
    }
};

// By one warp, whose first lane issues the copies. It waits at the cluster's barrier before it needs anything
// from the block's other warps, not at its end: the barrier may hold those until all warps have arrived, as
// racecheck shows.
//
// COLUMNS: of the weight in a box.
template <int NT, int COLUMNS = SWIZZLE>
__device__ __forceinline__ void stream_weight(const void* map, const Args& a, const Block<NT>& b) {
    const bool issues = (threadIdx.x & 31) == 0, cluster = a.splits > 1;
    const int total = b.rounds * (b.k1 - b.k0), fire = max(total - a.trigger, min(a.depth_w, total));
    const uint64_t policy = l2_evict_first();
    Place at(1);
    int i = 0;
#pragma unroll 1
    for (int round = 0; round < b.rounds; round++) {
#pragma unroll 1
        for (int k = b.k0; k < b.k1; k++, i++) {
            if (cluster && i == a.depth_w) cluster_wait();
            if (issues) {
                if (i == fire) pdl_wait(), pdl_launch();
                const uint32_t full = b.full_w + 8 * at.slot, to = b.w + at.slot * b.stage_w;
                mbarrier_wait(b.empty_w + 8 * at.slot, at.parity);
                mbarrier_arrive_expect(full, b.stage_w);
#pragma unroll 1
                for (int j = 0; j < a.wide; j++)
                    tma_load2(to + j * a.rows * 128, map, (k * a.wide + j) * COLUMNS,
                              b.tile(a, round) * a.rows, full, policy);
            }
            __syncwarp();
            at.advance(a.depth_w);
        }
    }
    if (issues && fire == total) pdl_wait(), pdl_launch();
    __syncwarp();
    if (cluster && total <= a.depth_w) cluster_wait();
}

template <int NT>
__device__ __forceinline__ void stream_x(const void* map, const Args& a, const Block<NT>& b) {
    const uint64_t policy = l2_evict_last();
    pdl_wait();
    Place at(1);
#pragma unroll 1
    for (int round = 0; round < b.rounds; round++) {
#pragma unroll 1
        for (int k = b.k0; k < b.k1; k++) {
            const uint32_t full = b.full_x + 8 * at.slot;
            mbarrier_wait(b.empty_x + 8 * at.slot, at.parity);
            mbarrier_arrive_expect(full, b.stage_x);
#pragma unroll 1
            for (int j = 0; j < a.wide; j++)
                tma_load2(b.x + at.slot * b.stage_x + j * NT * 128, map, (k * a.wide + j) * SWIZZLE, 0, full,
                          policy);
            at.advance(a.depth_x);
        }
    }
}

// scale[token] = 1 / rms from the sums of squares, by two warps; `part`: which. A token's sums are added in
// an order that does not depend on NT: four sums of every fourth group.
template <int NT>
__device__ __forceinline__ void prepare_scale(const Args& a, float* scale, int part) {
    constexpr int LANES = NT < 32 ? NT : 32, SLICES = 32 / LANES, SUMS = 4 / SLICES;
    const int lane = threadIdx.x & 31, token = part * 32 + lane % LANES, slice = lane / LANES;
    if (part * 32 >= NT) return;
    pdl_wait();
    float sum[SUMS] = {};
#pragma unroll 8
    for (int i = slice; i < a.square_groups; i += 4) {
#pragma unroll
        for (int s = 0; s < SUMS; s++)
            if (i + s * SLICES < a.square_groups) sum[s] += a.squares[(i + s * SLICES) * MAX_TOKENS + token];
    }
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
        if (SLICES >= 2) sum[s] += __shfl_xor_sync(~0u, sum[s], LANES);
        if (SLICES == 4) sum[s] += __shfl_xor_sync(~0u, sum[s], 2 * LANES);
    }
    float all = sum[0];
    if constexpr (SUMS == 2) all += sum[1];
    if constexpr (SUMS == 4) all = (all + sum[1]) + (sum[2] + sum[3]);
    if (slice == 0) scale[token] = rsqrtf(all / a.k + a.eps);
}

// By one warp: the weight of the norm that follows, of a tile's rows from `first` on. A constant: ahead of
// the wait.
__device__ __forceinline__ void fetch_norm(const Args& a, int first, uint32_t to) {
#pragma unroll 1
    for (int i = (threadIdx.x & 31) * 4; i < a.rows; i += 128)
        if (first + i < a.n) store_shared16(to + i * 4, *reinterpret_cast<const uint4*>(a.norm + first + i));
}

// What the end of a tile needs beside the sums, fetched while the GEMMs are under way: the residual of
// this block's units, as their threads will take it, and the weight of the norm that follows.
template <typename T, int NT>
__device__ __forceinline__ void fetch_before(const Args& a, const Block<NT>& b) {
    const int lane = threadIdx.x & 31, first = b.tile(a, 0) * a.rows;
    const uint32_t norm = b.before + b.slots * 512;
    if (a.norm) fetch_norm(a, first, norm);
    pdl_wait();
#pragma unroll 4
    for (int slot = 0; slot < b.slots; slot++) {
        const int u = slot * a.splits + b.split;
        const int row = u / b.J * 32 + lane % 4 * 8, token = u % b.J * 8 + lane / 4;
        if (u >= b.units || row >= a.rows || first + row >= a.n || token >= a.m) continue;
        const T* p = static_cast<const T*>(a.out) + static_cast<int64_t>(token) * a.ld_out + first + row;
        store_shared16(b.before + (slot * 32 + lane) * 16, *reinterpret_cast<const uint4*>(p));
    }
}

__device__ __forceinline__ float load_shared4(uint32_t p) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p) : "memory");
    return v;
}

// Finishes 8 rows of one token: v are the sums of rows n … n + 7. `old`, `norm`: where fetch_before left
// them, or is about to: only valid rows read there.
template <typename T>
__device__ __forceinline__ void finish(const Args& a, float (&v)[8], int token, int n, bool valid,
                                       uint32_t old, uint32_t norm, float* squares) {
    uint4 packed;
    uint32_t* words = &packed.x;
    const int64_t row = static_cast<int64_t>(token) * a.ld_out;
    if (a.kind == STORE_F32) {
        float4* to = reinterpret_cast<float4*>(static_cast<float*>(a.out) + row + n);
        if (valid) to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
    if (a.kind == RESIDUAL) {
        const uint4 x = valid ? load_shared16(old) : make_uint4(0, 0, 0, 0);
        const uint32_t* xs = &x.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = unpack2<T>(xs[i]);
            v[2 * i] += f.x, v[2 * i + 1] += f.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pack2<T>(v[2 * i], v[2 * i + 1]);
    if (a.kind == SWIGLU) {
        // The two projections are rounded first, as they are where they are stored.
        float gated[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 p = unpack2<T>(words[i]);
            gated[i] = __fdividef(p.x, 1.f + __expf(-p.x)) * p.y;
        }
        const uint2 pair = make_uint2(pack2<T>(gated[0], gated[1]), pack2<T>(gated[2], gated[3]));
        if (valid) *reinterpret_cast<uint2*>(static_cast<T*>(a.out) + row + n / 2) = pair;
        return;
    }
    if (valid) *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + row + n) = packed;
    if (a.kind == RESIDUAL && a.norm) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 f = unpack2<T>(words[i]);
            sum += f.x * f.x, sum += f.y * f.y;
            if (valid)
                words[i] = pack2<T>(f.x * load_shared4(norm + 8 * i), f.y * load_shared4(norm + 8 * i + 4));
        }
        if (valid)
            *reinterpret_cast<uint4*>(static_cast<T*>(a.normed) + static_cast<int64_t>(token) * a.n + n) =
                packed;
        sum = valid ? sum : 0;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (squares && threadIdx.x % 4 == 0) squares[token] = sum;
    }
}

// wgmma's view of a stage, in registers that the warp shares: taken from one lane, it is known to be the same
// in all, and the addresses that follow from it cost next to nothing.
__device__ __forceinline__ uint64_t operand(uint32_t at) {
    return wgmma_operand(__shfl_sync(~0u, at, 0), 1024);
}
__device__ __forceinline__ uint64_t along(uint64_t operand, uint32_t bytes) {
    return (operand & 0xffffffff00000000) | (static_cast<uint32_t>(operand) + bytes / 16);
}

// A weight in the dtype of x.
template <int NT>
struct SameType {
    static constexpr int COLUMNS = SWIZZLE;  // of the weight in a box
    static constexpr int REGISTERS = 0;      // that a thread takes beside its sums

    static __device__ __forceinline__ int stage_x(const Args& a) { return NT * 128 * a.wide; }
    __device__ __forceinline__ void stream_x(const void* map, const Args& a, const Block<NT>& b) const {
        skinny::stream_x<NT>(map, a, b);
    }
    template <typename T, int MB>
    __device__ __forceinline__ void multiply(const Args& a, const Block<NT>& b, int tile,
                                             float (&acc)[MB][NT / 2], Place& at_w, Place& at_x) const;
};

// One tile's GEMMs: [64 MB rows x NT tokens], of which the rows past a.rows mean nothing.
template <int NT>
template <typename T, int MB>
__device__ __forceinline__ void SameType<NT>::multiply(const Args& a, const Block<NT>& b, int tile,
                                                       float (&acc)[MB][NT / 2], Place& at_w,
                                                       Place& at_x) const {
    const int lane = threadIdx.x & 31;
    int last_w = -1, last_x = -1;
#pragma unroll
    for (int m = 0; m < MB; m++)
#pragma unroll
        for (int i = 0; i < NT / 2; i++) acc[m][i] = 0;
    auto release = [&]() {
        if (lane == 0) mbarrier_arrive(b.empty_w + 8 * last_w), mbarrier_arrive(b.empty_x + 8 * last_x);
    };
    int j = 0;  // box of the stage
#pragma unroll 1
    for (int box = 0; box < (b.k1 - b.k0) * a.wide; box++) {
        if (j == 0) {
            mbarrier_wait(b.full_w + 8 * at_w.slot, at_w.parity);
            mbarrier_wait(b.full_x + 8 * at_x.slot, at_x.parity);
        }
        const uint64_t w = operand(b.w + at_w.slot * b.stage_w + j * a.rows * 128);
        const uint64_t x = operand(b.x + at_x.slot * b.stage_x + j * NT * 128);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
#pragma unroll
            for (int m = 0; m < MB; m++)
                Wgmma<T, NT>::ss(acc[m], along(w, m * 8192 + kk * 32), along(x, kk * 32), true);
        wgmma_commit();
        wgmma_wait<1>();  // the box before
        if (j == 0 && last_w >= 0) release();
        if (++j == a.wide) {
            j = 0, last_w = at_w.slot, last_x = at_x.slot;
            at_w.advance(a.depth_w), at_x.advance(a.depth_x);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MB; m++) wgmma_pin(acc[m]);
    if (last_w >= 0) release();
}

constexpr int FRAGMENT = 512 + 64;  // bytes of 16 rows by 8 tokens: two of them share no bank

// Puts the sums of a tile where they are finished: into this block's shared memory, or the units of each
// split into that split's. From there one loop finishes them all; unrolled over the registers instead, it is
// code that every launch has to fetch anew. `units`: 0 to do nothing but fetch the code.
template <int NT, int MB>
__device__ __forceinline__ void leave_sums(const Args& a, const Block<NT>& b, const float (&acc)[MB][NT / 2],
                                           int units) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t inverse = 65536 / a.splits + 1;  // u · inverse >> 16 = u / splits for u < 4096
    const uint32_t to = b.sums + warp % 2 * FRAGMENT + lane * 16;
#pragma unroll
    for (int m = 0; m < MB; m++) {
        const int first = (m * 2 + warp / 2) * b.J;
        if (first >= units) break;
#pragma unroll
        for (int j = 0; j < NT / 8; j++) {
            const float4 v =
                make_float4(acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2], acc[m][4 * j + 3]);
            if (a.splits == 1) {
                store_shared16(to + (first + j) * 2 * FRAGMENT,
                               make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                                          __float_as_uint(v.w)));
            } else {
                const int slot = (first + j) * inverse >> 16;
                store_cluster16(to + (b.split * b.slots + slot) * 2 * FRAGMENT, first + j - slot * a.splits,
                                v, b.summed);
            }
        }
    }
}

// Adds up what the splits of a tile left here, in their order, and finishes this block's units: a thread
// takes 8 rows of one token. `dry`: does nothing but fetch the code.
template <typename T, int NT>
__device__ __forceinline__ void finish_tile(const Args& a, const Block<NT>& b, int tile, const float* scale,
                                            bool dry) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane / 4, part = lane % 4;
    if (a.splits > 1 && !dry) mbarrier_wait(b.summed, 0);
#pragma unroll 1
    for (int slot = warp; slot < b.slots; slot += CONSUMERS / 32) {
        const int u = slot * a.splits + b.split, row = u / b.J * 32 + part * 8, token = u % b.J * 8 + t;
        if (u >= b.units) break;
        const int n = tile * a.rows + row;
        const bool valid = !dry && row < a.rows && n < a.n && token < a.m;
        // Row i of the eight, as wgmma left it: thread 4 i + t / 2 of the fragment, number 2 (half) + t % 2.
        uint32_t from =
            b.sums + slot * 2 * FRAGMENT + part / 2 * FRAGMENT + t / 2 * 16 + part % 2 * 8 + t % 2 * 4;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = load_shared4(from + i * 64);
#pragma unroll 1
        for (int r = 1; r < a.splits; r++) {
            from += b.slots * 2 * FRAGMENT;
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += load_shared4(from + i * 64);
        }
        if (a.squares && !dry) {
            const float s = scale[token];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] *= s;
        }
        float* squares = a.next_squares + (tile * ((a.rows + 31) / 32) + u / b.J) * MAX_TOKENS;
        finish<T>(a, v, token, n, valid, b.before + (slot * 32 + lane) * 16,
                  b.before + b.slots * 512 + row * 4, dry ? nullptr : squares);
        if (dry) break;
    }
}

template <typename T, int NT, int MB, typename Weight, typename Adapters>
__device__ __forceinline__ void consume(const Args& a, const Block<NT>& b, const float* scale,
                                        const Weight& weight, const Adapters& adapters) {
    Place at_w(0), at_x(0);
    float acc[MB][NT / 2] = {};
    // Round -1 runs the code of a tile's end while there is nothing to do yet, so that it is there in time.
#pragma unroll 1
    for (int round = -1; round < b.rounds; round++) {
        if (round >= 0) weight.template multiply<T, MB>(a, b, b.tile(a, round), acc, at_w, at_x);
        if (round == 0) {
            pdl_wait();
            named_wait<CONSUMERS + 64>(BEFORE_READY);
        }
        if constexpr (Adapters::ON)
            if (round >= 0) adapters.template expand<MB>(acc, b.tile(a, round) * a.rows, b.split, a.splits);
        // Nobody reads the rings, or the sums of the tile before, any more; nor do the others' rings where
        // sums are sent there.
        if (a.splits == 1 || a.sums == 0) named_wait<CONSUMERS>(CONSUMERS_ONLY);
        if (a.splits > 1 && a.sums == 0 && round == 0) {
            if (threadIdx.x < a.splits) mbarrier_arrive_at(b.summed + 8, threadIdx.x);
            mbarrier_wait(b.summed + 8, 0);
        }
        leave_sums<NT, MB>(a, b, acc, round < 0 ? 0 : b.units);
        if (a.splits == 1) named_wait<CONSUMERS>(CONSUMERS_ONLY);
        finish_tile<T, NT>(a, b, b.tile(a, max(round, 0)), scale, round < 0);
    }
}

template <typename T, int NT, int MB, typename Weight = SameType<NT>, typename Adapters = lora::None>
__device__ __forceinline__ void run(const void* w, const void* x, const Args& a,
                                    const Weight& weight = Weight(), const Adapters& adapters = Adapters()) {
    // What a thread holds does not fit half of an SM's registers shared out evenly.
    constexpr bool BIG = MB * NT + Weight::REGISTERS + Adapters::REGISTERS > 96;
    extern __shared__ __align__(1024) uint8_t shared[];
    const Block<NT> b(a, shared_address(shared), Weight::stage_x(a));
    float* scale = reinterpret_cast<float*>(shared + (b.scale - b.w));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool cluster = a.splits > 1;
    if (warp == 4) {  // the weight's warp waits for nobody
        b.make_barriers(a);
        named_arrive<THREADS>(BARRIERS_MADE);
    } else {
        named_wait<THREADS>(BARRIERS_MADE);
    }
    if (cluster) cluster_arrive();  // before anything is sent to a block, its barriers are made
    if (warp < CONSUMERS / 32) {
        if constexpr (BIG) registers_raise<184>();
        if (cluster) cluster_wait();
        consume<T, NT, MB>(a, b, scale, weight, adapters);
    } else {
        if constexpr (BIG) registers_drop<72>();
        if (warp == 4) stream_weight<NT, Weight::COLUMNS>(w, a, b);
        if (warp == 5 && lane == 0) {
            tma_prefetch(x);
            if (a.splits > 1)  // of the units finished here
                mbarrier_arrive_expect(b.summed,
                                       (b.units - b.split + a.splits - 1) / a.splits * a.splits * 1024);
        }
        __syncwarp();
        if (cluster && warp > 4) cluster_wait();
        if (warp == 5 && lane == 0) weight.stream_x(x, a, b);
        if constexpr (Adapters::ON)
            if (warp >= 6) adapters.begin(warp - 6, b.tile(a, 0) * a.rows, a.rows);
        if (warp >= 6 && a.squares) prepare_scale<NT>(a, scale, warp - 6);
        if (warp == 7 && a.kind == RESIDUAL) fetch_before<T, NT>(a, b);
        if constexpr (Adapters::ON)
            if (warp >= 6) adapters.gather(warp - 6);
        __syncwarp();
        if (warp >= 6) named_arrive<CONSUMERS + 64>(BEFORE_READY);
    }
}

}  // namespace skinny

#define SKINNY_KERNEL(TYPE, NT, MB)                                                                     \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 2) skinny_##TYPE##_##NT##_##MB(       \
        const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, skinny::Args a) { \
        skinny::run<TYPE, NT, MB>(&w, &x, a);                                                           \
    }

// With what adapters add to each token's sums.
#define SKINNY_LORA_KERNEL(TYPE, NT, MB)                                                                    \
    extern "C" __global__ void __launch_bounds__(skinny::THREADS, 2) skinny_lora_##TYPE##_##NT##_##MB(      \
        const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, const skinny::Args a, \
        const __grid_constant__ lora::Fused p) {                                                            \
        extern __shared__ __align__(1024) uint8_t shared[];                                                 \
        const int first = blockIdx.y * a.rows,                                                              \
                  last = gridDim.y < (a.n + a.rows - 1) / a.rows ? a.n : first + a.rows;                    \
        skinny::run<TYPE, NT, MB>(&w, &x, a, skinny::SameType<NT>(),                                        \
                                  lora::Adapters<TYPE, NT>(p, shared, first, last));                        \
    }
