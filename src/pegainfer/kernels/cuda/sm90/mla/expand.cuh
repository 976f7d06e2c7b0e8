// Keys and values of every head from cached latents (MLA, Hopper): a GEMM whose rows are gathered from pages.
//
// A unit is a tile of 128 tokens and a head: 128 channels of keys, 128 of values, 512 latent numbers. A block
// takes units that follow each other, so that most share their tile, which stays in shared memory: both
// matrices of a head pass through a ring, while latents are brought once, page by page. Two warpgroups
// multiply 64 tokens each. Tokens behind a row's last one become zeros, because memory there may hold NaN.
#pragma once
#include "../attention/tiles.cuh"

namespace mla {

using attention::ExpandArgs;

struct ExpandShape {
    static constexpr int TOKENS = 128, RANK = 512, WIDTH = 576, DEPTH = 64, CHANNELS = 256;
    static constexpr int CHUNKS = RANK / DEPTH, STAGES = 3, THREADS = 384, PAGE = 16;
    static constexpr int CHUNK = TOKENS * DEPTH * 2;  // bytes of 64 latent numbers of a tile
    static constexpr int HALF = DEPTH * 64 * 2;       // of 64 channels of w_k
    static constexpr int STAGE = 2 * HALF + 128 * DEPTH * 2;
    static constexpr int RING = CHUNKS * CHUNK, BARRIERS = RING + STAGES * STAGE;
    static constexpr int SHARED = BARRIERS + 16 * (STAGES + CHUNKS);
    static constexpr int LOAD_REGISTERS = 40, COMPUTE_REGISTERS = 232;
};

// Where in shared memory latents, stages of matrices and their barriers are.
struct ExpandPlaces {
    using S = ExpandShape;
    uint32_t base;
    __device__ __forceinline__ uint32_t chunk(int k) const { return base + k * S::CHUNK; }
    __device__ __forceinline__ uint32_t stage(int n) const { return base + S::RING + n * S::STAGE; }
    __device__ __forceinline__ uint32_t full(int n) const { return base + S::BARRIERS + 8 * n; }
    __device__ __forceinline__ uint32_t empty(int n) const { return full(S::STAGES + n); }
    __device__ __forceinline__ uint32_t chunk_full(int k) const { return full(2 * S::STAGES + k); }
    __device__ __forceinline__ uint32_t chunk_empty(int k) const { return chunk_full(S::CHUNKS + k); }
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
__device__ __forceinline__ void load_expand(const ExpandArgs& a, int first, int end,
                                            const ExpandPlaces& places, const void* latents, const void* w_k,
                                            const void* w_v) {
    using S = ExpandShape;
    constexpr int PAGES = S::TOKENS / S::PAGE;
    const int lane = threadIdx.x & 31, block_rows = static_cast<int>(a.page_stride / S::WIDTH);
    const uint64_t once = l2_evict_first(), again = l2_evict_last();
    int taken = 0, tiles = 0, from = 0;
    for (int n = first; n < end; n++) {
        const ExpandUnit unit(a, n);
        const bool fresh = n == first || unit.head == 0;
        if (fresh) {
            const int last = (unit.context - 1) / S::PAGE * S::PAGE;
            from = unit.cached_row(a, min(unit.first + lane % PAGES * S::PAGE, last), block_rows);
            tiles++;
        }
        for (int k = 0; k < S::CHUNKS; k++, taken++) {
            if (fresh) {
                mbarrier_wait(places.chunk_empty(k), tiles & 1);
                if (lane == 0) mbarrier_arrive_expect(places.chunk_full(k), S::CHUNK);
                __syncwarp();
                if (lane < PAGES)
                    tma_load2(places.chunk(k) + lane * S::PAGE * 128, latents, k * S::DEPTH, from,
                              places.chunk_full(k), once);
            }
            const int stage = taken % S::STAGES;
            const uint32_t at = places.stage(stage), full = places.full(stage);
            mbarrier_wait(places.empty(stage), (taken / S::STAGES & 1) ^ 1);
            if (lane == 0) mbarrier_arrive_expect(full, S::STAGE);
            __syncwarp();
            if (lane < 2)
                tma_load2(at + lane * S::HALF, w_k, lane * 64, unit.head * S::RANK + k * S::DEPTH, full,
                          again);
            else if (lane == 2)
                tma_load2(at + 2 * S::HALF, w_v, k * S::DEPTH, unit.head * 128, full, again);
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
__device__ __forceinline__ void compute_expand(const ExpandArgs& a, int first, int end,
                                               const ExpandPlaces& places) {
    using S = ExpandShape;
    const int warpgroup = (threadIdx.x >> 7) - 1, lane = threadIdx.x & 31, mine = threadIdx.x - 128;
    const int r0 = warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;
    const int64_t pitch = a.h * S::CHANNELS + (S::WIDTH - S::RANK);
    const int block_rows = static_cast<int>(a.page_stride / S::WIDTH);
    int taken = 0, tiles = 0;
    for (int n = first; n < end; n++) {
        const ExpandUnit unit(a, n);
        const bool fresh = n == first || unit.head == 0, last = n + 1 == end || unit.head + 1 == a.h;
        tiles += fresh;
        auto release = [&](int k) {  // what chunk k of the unit was multiplied from
            if (lane) return;
            mbarrier_arrive(places.empty((taken - 1) % S::STAGES));
            if (last) mbarrier_arrive(places.chunk_empty(k));
        };
        float keys[64], values[64];
        for (int k = 0; k < S::CHUNKS; k++, taken++) {
            const int stage = taken % S::STAGES;
            const uint32_t at = places.stage(stage);
            const uint64_t latents = wgmma_operand(places.chunk(k) + warpgroup * 64 * 128, 1024);
            const uint64_t w_k = wgmma_operand(at, 1024, S::HALF),
                           w_v = wgmma_operand(at + 2 * S::HALF, 1024);
            mbarrier_wait(places.chunk_full(k), (tiles & 1) ^ 1);
            mbarrier_wait(places.full(stage), taken / S::STAGES & 1);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < S::DEPTH / 16; i++) {
                Wgmma<T, 128>::ss_k_rows(keys, latents + (i * 32 >> 4), w_k + (i * 2048 >> 4), k + i > 0);
                Wgmma<T, 128>::ss(values, latents + (i * 32 >> 4), w_v + (i * 32 >> 4), k + i > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (k) release(k - 1);
        }
        wgmma_wait<0>();
        wgmma_pin(keys);
        wgmma_pin(values);
        release(S::CHUNKS - 1);
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
    const ExpandPlaces places{shared_address(shared)};
    if (threadIdx.x == 0) {
        tma_prefetch(latents);
        tma_prefetch(w_k);
        tma_prefetch(w_v);
        for (int i = 0; i < S::STAGES; i++) {
            mbarrier_init(places.full(i), 1);
            mbarrier_init(places.empty(i), 8);  // the computing warps
        }
        for (int i = 0; i < S::CHUNKS; i++) {
            mbarrier_init(places.chunk_full(i), 1);
            mbarrier_init(places.chunk_empty(i), 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int64_t units = static_cast<int64_t>(a.plan->expanded) * a.h;
    const int first = units * blockIdx.x / gridDim.x, end = units * (blockIdx.x + 1) / gridDim.x;
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < 128) {
        registers_drop<S::LOAD_REGISTERS>();
        if (threadIdx.x < 32) load_expand(a, first, end, places, latents, w_k, w_v);
    } else {
        registers_raise<S::COMPUTE_REGISTERS>();
        compute_expand<T>(a, first, end, places);
    }
}

}  // namespace mla

#define EXPAND_KERNEL(TYPE, T)                                                                    \
    static_assert(mla::ExpandShape::SHARED == 229552);                                            \
    extern "C" __global__ void __launch_bounds__(mla::ExpandShape::THREADS, 1) mla_expand_##TYPE( \
        const __grid_constant__ CUtensorMap latents, const __grid_constant__ CUtensorMap w_k,     \
        const __grid_constant__ CUtensorMap w_v, mla::ExpandArgs a) {                             \
        mla::expand<T>(&latents, &w_k, &w_v, a);                                                  \
    }
