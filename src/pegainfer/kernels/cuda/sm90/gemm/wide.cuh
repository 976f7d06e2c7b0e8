// GEMMs of a weight with 65 to 256 rows of activations on Hopper: skinny.cuh's scheme with tokens as
// the rows of wgmma.
//
//   out[m, n] = sum over k of x[m, k] · w[n, k],  m ≤ NT = 128 · WG,  w: [N, K] read once.
//
// Here the tokens fill the 64-row side of wgmma, two blocks of 64 a warpgroup, and a tile's rows of the
// weight are its other side, so that any multiple of 8 is multiplied without waste. x is most of what a block
// brings: 8 to 32 KB for 11 to 19 of the weight; room for enough of both to be under way is what a block
// lacks. So a stage holds no more tokens than there are, and is given back as soon as nothing else is to be
// multiplied.
//
// With one warpgroup (128 tokens) a launch takes half an SM, and the next one's rings fill beside it; with
// two (256 tokens) it takes all of one.
#pragma once
#include "skinny.cuh"

namespace wide {

// Each block has one tile: rounds and wide are 1, sums 0. squares and next_squares are [groups, NT].
using skinny::Args, skinny::Place, skinny::operand, skinny::along;
using skinny::BARRIERS_MADE, skinny::BEFORE_READY, skinny::CONSUMERS_ONLY, skinny::RESIDUAL;

constexpr int PRODUCERS = 128;      // threads that do not multiply
constexpr int FRAGMENT = 512 + 16;  // bytes of the sums of 16 tokens by 8 rows: four of them share no bank
constexpr int UNIT = 4 * FRAGMENT;  // 16 tokens by 32 rows: what a warp finishes at a time

// As skinny's, but that the ring of x comes first and its stages hold as many tokens as there are. Unit u of
// a tile (32 rows by 16 tokens) is finished by the split u % splits as its u / splits-th.
template <int NT>
struct Block : skinny::Block<NT> {
    static constexpr int TOKENS = NT / 16;  // units side by side along the tokens

    __device__ __forceinline__ Block(const Args& a, uint32_t shared)
        : skinny::Block<NT>(a, shared, (a.m + 7) / 8 * 1024) {
        this->x = shared, this->w = shared + a.depth_x * this->stage_x;
        this->full_w = this->w + a.depth_w * this->stage_w, this->empty_w = this->full_w + 8 * a.depth_w;
        this->full_x = this->empty_w + 8 * a.depth_w, this->empty_x = this->full_x + 8 * a.depth_x;
        this->summed = this->empty_x + 8 * a.depth_x, this->scale = this->summed + 16;
        this->units = (a.rows + 31) / 32 * TOKENS;
        this->slots = (this->units + a.splits - 1) / a.splits;
    }
    // Makes the barriers, by one warp; `warps`: that multiply.
    __device__ __forceinline__ void make(const Args& a, int warps) const {
        const int lane = threadIdx.x & 31;
#pragma unroll 1
        for (uint32_t bar = this->full_w + 8 * lane; bar <= this->summed + 8; bar += 8 * 32) {
            const bool by_warps =
                (bar >= this->empty_w && bar < this->full_x) || (bar >= this->empty_x && bar < this->summed);
            mbarrier_init(bar, by_warps ? warps : bar > this->summed ? a.splits : 1);
        }
        mbarrier_init_fence();
        __syncwarp();
    }
};

// scale[token] = 1 / rms from the sums of squares, by two warps; `part`: which.
template <int NT>
__device__ __forceinline__ void prepare_scale(const Args& a, float* scale, int part) {
    constexpr int EACH = NT / 64;  // tokens of a thread
    const int token = (part * 32 + (threadIdx.x & 31)) * EACH;
    pdl_wait();
    float sum[4][EACH] = {};
#pragma unroll(8 / EACH)
    for (int i = 0; i < a.square_groups; i += 4) {
#pragma unroll
        for (int s = 0; s < 4; s++) {
            if (i + s < a.square_groups) {
                const auto squares = load<float, EACH>(a.squares + (i + s) * NT + token);
#pragma unroll
                for (int e = 0; e < EACH; e++) sum[s][e] += squares.v[e];
            }
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        scale[token + e] = rsqrtf(((sum[0][e] + sum[1][e]) + (sum[2][e] + sum[3][e])) / a.k + a.eps);
}

// What the end of a tile needs beside the sums, fetched while the GEMMs are under way by two warps
// (`part`: which): the residual of this block's units, as their threads will take it, and the weight of the
// norm that follows.
template <typename T, int NT>
__device__ __forceinline__ void fetch_before(const Args& a, const Block<NT>& b, int part) {
    const int lane = threadIdx.x & 31, first = b.tile(a, 0) * a.rows;
    const uint32_t norm = b.before + b.slots * 1024;
    if (a.norm && part == 0) skinny::fetch_norm(a, first, norm);
    pdl_wait();
#pragma unroll 4
    for (int slot = part; slot < b.slots; slot += 2) {
        const int u = slot * a.splits + b.split;
        const int row = u / b.TOKENS * 32 + lane % 4 * 8, token = u % b.TOKENS * 16 + lane / 4;
        if (u >= b.units || row >= a.rows || first + row >= a.n) continue;
        const T* p = static_cast<const T*>(a.out) + static_cast<int64_t>(token) * a.ld_out + first + row;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (token + 8 * half < a.m)
                store_shared16(
                    b.before + (slot * 64 + half * 32 + lane) * 16,
                    *reinterpret_cast<const uint4*>(p + static_cast<int64_t>(8 * half) * a.ld_out));
    }
}

// One tile's GEMMs: of this warpgroup's 128 tokens with N rows. What is read past the tokens or the rows
// of a stage goes into sums that mean nothing.
template <typename T, int NT, int N>
__device__ __forceinline__ void multiply(const Args& a, const Block<NT>& b, float (&acc)[2][N / 2],
                                         Place& at_w, Place& at_x) {
    const int lane = threadIdx.x & 31, tokens = (threadIdx.x >> 7) * 128 * 128;  // bytes of a stage
    int last_w = -1, last_x = -1;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[m][i] = 0;
    auto release = [&]() {
        if (lane == 0) mbarrier_arrive(b.empty_w + 8 * last_w), mbarrier_arrive(b.empty_x + 8 * last_x);
    };
#pragma unroll 1
    for (int k = b.k0; k < b.k1; k++) {
        const uint32_t full_w = b.full_w + 8 * at_w.slot, full_x = b.full_x + 8 * at_x.slot;
        const bool ready = mbarrier_ready(full_w, at_w.parity) && mbarrier_ready(full_x, at_x.parity);
        if (!__all_sync(~0u, ready)) {  // so give back what it would otherwise keep until this has come
            wgmma_wait<0>();
            if (last_w >= 0) release();
            last_w = -1;
            mbarrier_wait(full_w, at_w.parity);
            mbarrier_wait(full_x, at_x.parity);
        }
        const uint64_t w = operand(b.w + at_w.slot * b.stage_w);
        const uint64_t x = operand(b.x + at_x.slot * b.stage_x + tokens);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
#pragma unroll
            for (int m = 0; m < 2; m++)
                Wgmma<T, N>::ss(acc[m], along(x, m * 8192 + kk * 32), along(w, kk * 32), true);
        wgmma_commit();
        wgmma_wait<1>();  // the stage before
        if (last_w >= 0) release();
        last_w = at_w.slot, last_x = at_x.slot;
        at_w.advance(a.depth_w), at_x.advance(a.depth_x);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < 2; m++) wgmma_pin(acc[m]);
    if (last_w >= 0) release();
}

// Puts the sums of a tile where they are finished, as skinny's does. `units`: 0 to do nothing but fetch the
// code.
template <int NT, int N>
__device__ __forceinline__ void leave_sums(const Args& a, const Block<NT>& b, const float (&acc)[2][N / 2],
                                           int units) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t inverse = 65536 / a.splits + 1;  // u · inverse >> 16 = u / splits for u < 4096
    const int first = warp / 4 * 8 + warp % 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        if (j / 4 * b.TOKENS >= units) break;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int u = j / 4 * b.TOKENS + m * 4 + first;
            const uint32_t to = b.sums + j % 4 * FRAGMENT + lane * 16;
            const float4 v =
                make_float4(acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2], acc[m][4 * j + 3]);
            if (a.splits == 1) {
                store_shared16(to + u * UNIT, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y),
                                                         __float_as_uint(v.z), __float_as_uint(v.w)));
            } else {
                const int slot = u * inverse >> 16;
                store_cluster16(to + (b.split * b.slots + slot) * UNIT, u - slot * a.splits, v, b.summed);
            }
        }
    }
}

// Bytes that all splits together send to this block for the units that it finishes.
template <int NT, int N>
__device__ __forceinline__ uint32_t bytes_to_come(const Args& a, const Block<NT>& b) {
    uint32_t fragments = 0;
#pragma unroll 1
    for (int u = b.split; u < b.units; u += a.splits) fragments += min(4, N / 8 - u / b.TOKENS * 4);
    return fragments * a.splits * 512;
}

// Adds up what the splits of a tile left here, in their order, and finishes this block's units: a thread
// takes 8 rows of two tokens. `dry`: does nothing but fetch the code.
template <typename T, int NT>
__device__ __forceinline__ void finish_tile(const Args& a, const Block<NT>& b, int tile, const float* scale,
                                            bool dry) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane / 4, part = lane % 4;
    if (a.splits > 1 && !dry) mbarrier_wait(b.summed, 0);
#pragma unroll 1
    for (int slot = warp; slot < b.slots; slot += NT / 32) {
        const int u = slot * a.splits + b.split, row = u / b.TOKENS * 32 + part * 8;
        const int token = u % b.TOKENS * 16 + t, n = tile * a.rows + row;
        if (u >= b.units) break;
        // wgmma left rows 2 i and 2 i + 1 of both tokens in lane 4 t + i of the fragment.
        uint32_t from = b.sums + slot * UNIT + part * FRAGMENT + t * 64;
        float v[2][8] = {};
#pragma unroll 1
        for (int r = 0; r < a.splits; r++, from += b.slots * UNIT) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 four = load_shared16(from + i * 16);
                v[0][2 * i] += __uint_as_float(four.x), v[0][2 * i + 1] += __uint_as_float(four.y);
                v[1][2 * i] += __uint_as_float(four.z), v[1][2 * i + 1] += __uint_as_float(four.w);
            }
        }
        const bool rows = !dry && row < a.rows && n < a.n;
        float* squares = a.next_squares + (tile * ((a.rows + 31) / 32) + u / b.TOKENS) * NT;
        if (dry) squares = nullptr;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (a.squares && !dry) {
                const float s = scale[token + 8 * half];
#pragma unroll
                for (int i = 0; i < 8; i++) v[half][i] *= s;
            }
            skinny::finish<T>(a, v[half], token + 8 * half, n, rows && token + 8 * half < a.m,
                              b.before + (slot * 64 + half * 32 + lane) * 16,
                              b.before + b.slots * 1024 + row * 4, squares);
        }
        if (dry) break;
    }
}

template <typename T, int NT, int N>
__device__ __forceinline__ void consume(const Args& a, const Block<NT>& b, const float* scale) {
    Place at_w(0), at_x(0);
    float acc[2][N / 2] = {};
    // Round -1 runs the code of a tile's end while there is nothing to do yet, so that it is there in time.
#pragma unroll 1
    for (int round = -1; round < 1; round++) {
        if (round == 0) {
            multiply<T, NT, N>(a, b, acc, at_w, at_x);
            pdl_wait();
            named_wait<NT + 64>(BEFORE_READY);
        }
        named_wait<NT>(CONSUMERS_ONLY);    // nobody reads the rings any more,
        if (a.splits > 1 && round == 0) {  // nor the others theirs, where sums are sent there
            if (threadIdx.x < a.splits) mbarrier_arrive_at(b.summed + 8, threadIdx.x);
            mbarrier_wait(b.summed + 8, 0);
        }
        leave_sums<NT, N>(a, b, acc, round < 0 ? 0 : b.units);
        if (a.splits == 1) named_wait<NT>(CONSUMERS_ONLY);
        finish_tile<T, NT>(a, b, b.tile(a, 0), scale, round < 0);
    }
}

template <typename T, int WG, int N>
__device__ __forceinline__ void run(const void* w, const void* x, const Args& a) {
    constexpr int NT = 128 * WG, WARPS = 4 * WG;  // WARPS: that multiply; as many threads as tokens
    extern __shared__ __align__(1024) uint8_t shared[];
    const Block<NT> b(a, shared_address(shared));
    float* scale = reinterpret_cast<float*>(shared + (b.scale - b.x));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    const bool cluster = a.splits > 1;
    if (warp == WARPS) {  // the weight's warp waits for nobody
        b.make(a, WARPS);
        named_arrive<NT + PRODUCERS>(BARRIERS_MADE);
    } else {
        named_wait<NT + PRODUCERS>(BARRIERS_MADE);
    }
    if (cluster) cluster_arrive();  // before anything is sent to a block, its barriers are made
    if (warp < WARPS) {
        registers_raise<WG == 1 ? 208 : 216>();
        if (cluster) cluster_wait();
        consume<T, NT, N>(a, b, scale);
    } else {
        registers_drop<WG == 1 ? 48 : 72>();
        if (warp == WARPS) skinny::stream_weight<NT>(w, a, b);
        if (warp == WARPS + 1 && lane == 0) {
            tma_prefetch(x);
            if (a.splits > 1) mbarrier_arrive_expect(b.summed, bytes_to_come<NT, N>(a, b));
        }
        __syncwarp();
        if (cluster && warp > WARPS) cluster_wait();
        if (warp == WARPS + 1 && lane == 0) skinny::stream_x<NT>(x, a, b);
        if (warp >= WARPS + 2) {
            if (a.squares) wide::prepare_scale<NT>(a, scale, warp - WARPS - 2);
            if (a.kind == RESIDUAL) fetch_before<T, NT>(a, b, warp - WARPS - 2);
        }
        __syncwarp();
        if (warp >= WARPS + 2) named_arrive<NT + 64>(BEFORE_READY);
    }
}

}  // namespace wide

#define WIDE_KERNEL(TYPE, WG, NT, N)                                                    \
    extern "C" __global__ void __launch_bounds__(128 * WG + wide::PRODUCERS, 3 - WG)    \
        wide_##TYPE##_##NT##_##N(const __grid_constant__ CUtensorMap w,                 \
                                 const __grid_constant__ CUtensorMap x, wide::Args a) { \
        wide::run<TYPE, WG, N>(&w, &x, a);                                              \
    }
