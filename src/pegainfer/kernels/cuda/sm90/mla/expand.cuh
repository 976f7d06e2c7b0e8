// Keys and values of every head from cached latents (MLA, Hopper): a GEMM whose rows are gathered from pages.
//
// A unit is a tile of 128 tokens and a head: 128 channels of keys, 128 of values, 512 latent numbers. One
// warp brings latents, page by page, and both matrices by TMA through a ring; two warpgroups multiply 64
// tokens each. Tokens behind a row's last one become zeros, because memory there may hold NaN.
#pragma once
#include "../attention/tiles.cuh"

namespace mla {

using attention::ExpandArgs;

struct ExpandShape {
    static constexpr int TOKENS = 128, RANK = 512, WIDTH = 576, DEPTH = 64, CHANNELS = 256;
    static constexpr int STAGES = 4, THREADS = 384, PAGE = 16;
    static constexpr int LATENTS = TOKENS * DEPTH * 2;  // bytes of a stage: latents, then w_k, then w_v
    static constexpr int HALF = DEPTH * 64 * 2;         // of 64 channels of w_k
    static constexpr int KEYS_AT = LATENTS, VALUES_AT = KEYS_AT + 2 * HALF;
    static constexpr int STAGE = VALUES_AT + 128 * DEPTH * 2;
    static constexpr int BARRIERS = STAGES * STAGE, SHARED = BARRIERS + 16 * STAGES;
    static constexpr int LOAD_REGISTERS = 40, COMPUTE_REGISTERS = 232;
};

// A tile of a row's tokens, and a head.
struct ExpandUnit {
    int tile, head, row, first, context;  // tile: where it is written; first: token of the row
    __device__ __forceinline__ ExpandUnit(const ExpandArgs& a, int unit) {
        tile = unit / a.h, head = unit % a.h;
        const int2 source = a.sources[tile];
        row = source.x, first = source.y * ExpandShape::TOKENS, context = a.context_lens[row];
    }
    // The cached row of a token that exists; its block has `block_rows` of them, of all layers.
    __device__ __forceinline__ int cached_row(const ExpandArgs& a, int token, int block_rows) const {
        const int block = a.block_table[static_cast<int64_t>(row) * a.table_width + token / a.block_size];
        return block * block_rows + token % a.block_size;
    }
};

// One warp. latents: [blocks · layers · S, 576]; w_k: [H · 512, 128]; w_v: [H · 128, 512].
__device__ __forceinline__ void load_expand(const ExpandArgs& a, int units, uint32_t ring,
                                            const void* latents, const void* w_k, const void* w_v) {
    using S = ExpandShape;
    constexpr int PAGES = S::TOKENS / S::PAGE;
    const int lane = threadIdx.x & 31, block_rows = static_cast<int>(a.page_stride / S::WIDTH);
    const uint64_t policy = l2_evict_last();
    int taken = 0;
    for (int n = blockIdx.x; n < units; n += gridDim.x) {
        const ExpandUnit unit(a, n);
        const int token = min(unit.first + lane % PAGES * S::PAGE, (unit.context - 1) / S::PAGE * S::PAGE);
        const int from = unit.cached_row(a, token, block_rows);
        for (int k = 0; k < S::RANK; k += S::DEPTH, taken++) {
            const int stage = taken % S::STAGES;
            const uint32_t at = ring + stage * S::STAGE, full = ring + S::BARRIERS + 8 * stage;
            mbarrier_wait(full + 8 * S::STAGES, (taken / S::STAGES & 1) ^ 1);
            if (lane == 0) mbarrier_arrive_expect(full, S::STAGE);
            __syncwarp();
            if (lane < PAGES)
                tma_load2(at + lane * S::PAGE * 128, latents, k, from, full, policy);
            else if (lane < PAGES + 2)
                tma_load2(at + S::KEYS_AT + (lane - PAGES) * S::HALF, w_k, (lane - PAGES) * 64,
                          unit.head * S::RANK + k, full, policy);
            else if (lane == PAGES + 2)
                tma_load2(at + S::VALUES_AT, w_v, k, unit.head * 128, full, policy);
        }
    }
}

// 128 channels of this thread's two rows of a tile, whose first is r; zeros from row `held` on.
template <typename T>
__device__ __forceinline__ void store_expanded(T* to, int64_t pitch, const float (&x)[64], int r, int held) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t w[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                w[k] = pack2<T>(x[16 * j + 4 * k + 2 * i], x[16 * j + 4 * k + 2 * i + 1]);
            uint4 piece = attention::gather_piece(w);
            if (r + 8 * i >= held) piece = make_uint4(0, 0, 0, 0);
            *reinterpret_cast<uint4*>(to + (r + 8 * i) * pitch + (4 * j + (threadIdx.x & 3)) * 8) = piece;
        }
}

template <typename T>
__device__ __forceinline__ void compute_expand(const ExpandArgs& a, int units, uint32_t ring) {
    using S = ExpandShape;
    const int warpgroup = (threadIdx.x >> 7) - 1, lane = threadIdx.x & 31, mine = threadIdx.x - 128;
    const int r0 = warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const int64_t pitch = a.h * S::CHANNELS + (S::WIDTH - S::RANK);
    const int block_rows = static_cast<int>(a.page_stride / S::WIDTH);
    int taken = 0;
    for (int n = blockIdx.x; n < units; n += gridDim.x) {
        const ExpandUnit unit(a, n);
        float keys[64], values[64];
        for (int k = 0; k < S::RANK / S::DEPTH; k++, taken++) {
            const int stage = taken % S::STAGES;
            const uint32_t at = ring + stage * S::STAGE, full = ring + S::BARRIERS + 8 * stage;
            const uint64_t latents = wgmma_operand(at + warpgroup * 64 * 128, 1024);
            const uint64_t w_k = wgmma_operand(at + S::KEYS_AT, 1024, S::HALF);
            const uint64_t w_v = wgmma_operand(at + S::VALUES_AT, 1024);
            mbarrier_wait(full, taken / S::STAGES & 1);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < S::DEPTH / 16; i++) {
                Wgmma<T, 128>::ss_k_rows(keys, latents + (i * 32 >> 4), w_k + (i * 2048 >> 4), k + i > 0);
                Wgmma<T, 128>::ss(values, latents + (i * 32 >> 4), w_v + (i * 32 >> 4), k + i > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (k && lane == 0)
                mbarrier_arrive(ring + S::BARRIERS + 8 * (S::STAGES + (taken - 1) % S::STAGES));
        }
        wgmma_wait<0>();
        wgmma_pin(keys);
        wgmma_pin(values);
        if (lane == 0) mbarrier_arrive(ring + S::BARRIERS + 8 * (S::STAGES + (taken - 1) % S::STAGES));
        T* tile = static_cast<T*>(a.out) + static_cast<int64_t>(unit.tile) * S::TOKENS * pitch;
        const int held = unit.context - unit.first;
        store_expanded(tile + unit.head * S::CHANNELS, pitch, keys, r0, held);
        store_expanded(tile + unit.head * S::CHANNELS + 128, pitch, values, r0, held);
        if (unit.head) continue;
        for (int i = mine; i < S::TOKENS * 8; i += 256) {  // what all heads share
            const int r = i / 8, c = i % 8 * 8;
            uint4 piece = make_uint4(0, 0, 0, 0);
            if (r < held) {
                const int64_t row = unit.cached_row(a, unit.first + r, block_rows);
                piece = *reinterpret_cast<const uint4*>(static_cast<const T*>(a.kv) + row * S::WIDTH +
                                                        S::RANK + c);
            }
            *reinterpret_cast<uint4*>(tile + r * pitch + a.h * S::CHANNELS + c) = piece;
        }
    }
}

template <typename T>
__device__ __forceinline__ void expand(const void* latents, const void* w_k, const void* w_v,
                                       const ExpandArgs& a) {
    using S = ExpandShape;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t ring = shared_address(shared);
    if (threadIdx.x == 0) {
        tma_prefetch(latents);
        tma_prefetch(w_k);
        tma_prefetch(w_v);
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(ring + S::BARRIERS + 8 * i, 1);
            mbarrier_init(ring + S::BARRIERS + 8 * (S::STAGES + i), 8);  // the computing warps
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int units = a.plan->expanded * a.h;
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < 128) {
        registers_drop<S::LOAD_REGISTERS>();
        if (threadIdx.x < 32) load_expand(a, units, ring, latents, w_k, w_v);
    } else {
        registers_raise<S::COMPUTE_REGISTERS>();
        compute_expand<T>(a, units, ring);
    }
}

}  // namespace mla

#define EXPAND_KERNEL(TYPE, T)                                                                    \
    static_assert(mla::ExpandShape::SHARED == 196672);                                            \
    extern "C" __global__ void __launch_bounds__(mla::ExpandShape::THREADS, 1) mla_expand_##TYPE( \
        const __grid_constant__ CUtensorMap latents, const __grid_constant__ CUtensorMap w_k,     \
        const __grid_constant__ CUtensorMap w_v, mla::ExpandArgs a) {                             \
        mla::expand<T>(&latents, &w_k, &w_v, a);                                                  \
    }
