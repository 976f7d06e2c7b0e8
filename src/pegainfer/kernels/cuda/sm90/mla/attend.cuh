// Causal attention over expanded latents (MLA, Hopper): heads of 128 + 64 channels, values of 128.
//
// expand.cuh leaves keys and values in float16 or bfloat16 as [tile, 128 tokens, H · 256 + 64]: each head's
// 128 channels of keys and 128 of values, then the 64 rotated channels that all heads share. A launch attends
// over the tiles of one round; a row whose keys take several rounds is resumed from sums that the launch
// before kept. Items name their blocks of keys, and `row` is where the row's first tile of keys lies among
// those of the round: below zero if it was in an earlier one.
#pragma once
#include "../attention/tiles.cuh"

namespace attention {

// Columns of 64 channels follow each other, each 128 rows of 128 bytes.
using ExpandedTiles = TileShape<192, 128, 128 * 128, 1024, 1, true>;
constexpr int HEAD_CHANNELS = 256;  // of a token and head, expanded

// One thread: keys (or values) of all tiles, block by block.
__device__ __forceinline__ void load_expanded(const Work& work, const void* map,
                                              const Places<ExpandedTiles>& places, int values) {
    using S = ExpandedTiles;
    constexpr int COLUMNS = 64, BYTES = S::KEYS * COLUMNS * 2;
    const uint64_t policy = l2_evict_last();  // other blocks read the same head
    pdl_wait();
    pdl_launch();
    int taken = 0;
    for (int round = 0; work.has(round); round++) {
        const Tile<S> tile(work, work.item(round), round);
        const int channel = tile.kv_head * HEAD_CHANNELS + values * 128;
        for (int block = tile.b1 - 1; block >= tile.b0; block--, taken++) {
            const int stage = taken % S::STAGES, row = (tile.item.row + block) * S::KEYS;
            const uint32_t full = places.full(values, stage), to = places.tile(values, stage);
            mbarrier_wait(places.empty(values, stage), (taken / S::STAGES & 1) ^ 1);
            mbarrier_arrive_expect(full, values ? S::VALUE_TILE : S::KEY_TILE);
            tma_load2(to, map, channel, row, full, policy);
            tma_load2(to + BYTES, map, channel + COLUMNS, row, full, policy);
            if (!values) tma_load2(to + 2 * BYTES, map, work.a.h * HEAD_CHANNELS, row, full, policy);
        }
    }
}

// One thread: the tiles' queries. What follows a row's last token is read and has no effect.
__device__ __forceinline__ void load_whole_queries(const Work& work, const void* map,
                                                   const Places<ExpandedTiles>& places) {
    using S = ExpandedTiles;
    const uint64_t policy = l2_evict_first();
    pdl_wait();
    pdl_launch();
    for (int round = 0; work.has(round); round++) {
        const Tile<S> tile(work, work.item(round), round);
        const int stage = places.query_stage(round);
        mbarrier_wait(places.query_empty(stage), places.query_phase(round) ^ 1);
        mbarrier_arrive_expect(places.query_full(stage), S::QUERY);
#pragma unroll
        for (int column = 0; column < S::D / 64; column++)
            tma_load2(places.query(stage) + column * S::COLUMN, map, tile.kv_head * S::D + column * 64,
                      tile.item.start + tile.row0, places.query_full(stage), policy);
    }
}

template <typename T>
__device__ __forceinline__ void attend_expanded(const void* queries, const void* keys, const Args& a) {
    using S = ExpandedTiles;
    extern __shared__ __align__(1024) uint8_t shared[];
    const Places<S> places{shared_address(shared)};
    if (threadIdx.x == 0) {
        tma_prefetch(queries);
        tma_prefetch(keys);
        make_barriers(places);
    }
    __syncthreads();
    const Work work(a);
    if (threadIdx.x < 128) {
        registers_drop<S::LOAD_REGISTERS>();
        if (threadIdx.x == 0) load_expanded(work, keys, places, 0);
        if (threadIdx.x == 32) load_expanded(work, keys, places, 1);
        if (threadIdx.x == 64) load_whole_queries(work, queries, places);
    } else {
        registers_raise<S::COMPUTE_REGISTERS>();
        Pipeline<T, S>{work, places}.run();
    }
}

}  // namespace attention

#define ATTEND_EXPANDED_KERNEL(TYPE, T)                                                           \
    static_assert(attention::ExpandedTiles::SHARED == 213120);                                    \
    extern "C" __global__ void __launch_bounds__(attention::ExpandedTiles::THREADS, 1)            \
        mla_attend_expanded_##TYPE(const __grid_constant__ CUtensorMap queries,                   \
                                   const __grid_constant__ CUtensorMap keys, attention::Args a) { \
        attention::attend_expanded<T>(&queries, &keys, a);                                        \
    }
