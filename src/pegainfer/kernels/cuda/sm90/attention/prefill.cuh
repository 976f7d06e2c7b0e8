// Causal attention of rows with several query tokens over their pages, by warpgroups (Hopper).
//
// A block takes tiles of 128 (token, head) pairs of one KV head's group, as common/attention/prefill.cuh
// does, from the same work list. Four warps bring what the computing ones read: one the keys, one the values,
// page by page through the tensor memory accelerator into rings of two tiles of 128 tokens (64 where heads
// have 256 channels), two the queries. Blocks are taken from the last to the first, so that those that hide
// keys come first.
//
// Tiles lie in shared memory as [rows / 8][D / 64][8][64], 16-byte pieces swizzled by row: a page's box is
// 16 rows of that, whatever the page's own size.
#pragma once
#include "tiles.cuh"

namespace attention {

constexpr int BOX = 16;  // tokens of a copy
template <int D>
using PageTiles = TileShape<D, D, 1024, 16 * D, 64, false>;

// One warp: keys (or values) of all tiles, block by block; a lane a page. What the next block needs of the
// work list and the block table is requested a block ahead.
template <typename S>
__device__ __forceinline__ void load_pages(const Work& work, const void* map, const Places<S>& places,
                                           int values) {
    constexpr int D = S::D, PAGES = S::KEYS / BOX, BYTES = BOX * D * 2;
    const Args& a = work.a;
    const int lane = threadIdx.x & 31;
    const int heads = static_cast<int>(a.page_stride / (a.block_size * D));  // of a block, all layers
    auto token_of = [&](int block) { return block * S::KEYS + lane * BOX; };
    auto entry_of = [&](const Tile<S>& tile, int block) {
        const int* table = a.block_table + static_cast<int64_t>(tile.item.row) * a.table_width;
        return lane < PAGES ? table[min(token_of(block), tile.item.context - 1) / a.block_size] : 0;
    };
    if (!work.has(0)) return;
    Tile<S> tile(work, work.item(0), 0);
    Item ahead = work.item(1);
    int block = tile.b1 - 1, entry = entry_of(tile, block), round = 0;
    pdl_wait();
    pdl_launch();
    for (int taken = 0; work.has(round); taken++) {
        const int stage = taken % S::STAGES, token = token_of(block);
        const int from = entry * heads + values * a.g + tile.kv_head;
        const int pages = min(PAGES, (tile.item.context - block * S::KEYS + BOX - 1) / BOX);
        if (--block < tile.b0) {
            tile = Tile<S>(work, ahead, ++round);
            ahead = work.item(round + 1);
            block = tile.b1 - 1;
        }
        entry = entry_of(tile, block);
        mbarrier_wait(places.empty(values, stage), (taken / S::STAGES & 1) ^ 1);
        if (lane == 0) mbarrier_arrive_expect(places.full(values, stage), pages * BYTES);
        __syncwarp();
        if (lane < pages)
            tma_load5(places.tile(values, stage) + lane * BYTES, map, 0, 0, 0, token % a.block_size / 8, from,
                      places.full(values, stage));
    }
}

// Two warps: the tiles' queries.
template <typename T, typename S>
__device__ __forceinline__ void load_queries(const Work& work, const Places<S>& places) {
    constexpr int D = S::D, PIECES = D / 8, STEP = 64 / PIECES;  // rows at a time
    const Args& a = work.a;
    const int row = (threadIdx.x & 63) / PIECES, c = threadIdx.x % PIECES, group = work.group.by;
    const int step_tokens = work.group.quotient(STEP), step_heads = work.group.rest(STEP);
    pdl_wait();
    pdl_launch();
    for (int round = 0; work.has(round); round++) {
        const Tile<S> tile(work, work.item(round), round);
        const int stage = places.query_stage(round);
        int token = work.group.quotient(tile.row0 + row), head = work.group.rest(tile.row0 + row);
        const int64_t first = static_cast<int64_t>(tile.item.start) * a.h + tile.kv_head * group;
        const T* q = static_cast<const T*>(a.q) + first * D + c * 8;
        mbarrier_wait(places.query_empty(stage), places.query_phase(round) ^ 1);
        for (int r = row; r < S::ROWS; r += STEP) {
            const bool valid = token < tile.item.end;
            cp_async16(places.query(stage) + S::piece(r, c), valid ? q + (token * a.h + head) * D : q, valid);
            token += step_tokens, head += step_heads;
            if (head >= group) head -= group, token++;
        }
        cp_async_commit();
        cp_async_wait<0>();
        async_proxy_fence();
        mbarrier_arrive(places.query_full(stage));
    }
}

template <typename T, typename S>
__device__ __forceinline__ void prefill_tiles(const void* map, const Args& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Places<S> places{shared_address(shared)};
    if (threadIdx.x == 0) {
        tma_prefetch(map);
        make_barriers(places);
    }
    __syncthreads();
    const Work work(a);
    if (threadIdx.x < 128) {
        registers_drop<S::LOAD_REGISTERS>();
        const int warp = threadIdx.x >> 5;
        if (warp < 2)
            load_pages(work, map, places, warp);
        else
            load_queries<T>(work, places);
    } else {
        registers_raise<S::COMPUTE_REGISTERS>();
        Pipeline<T, S>{work, places}.run();
    }
}

}  // namespace attention

#define PREFILL_TILES_KERNEL(TYPE, T, D, BYTES)                                                             \
    static_assert(attention::PageTiles<D>::SHARED == BYTES);                                                \
    extern "C" __global__ void __launch_bounds__(attention::PageTiles<D>::THREADS, 1)                       \
        attention_prefill_tiles_##TYPE##_d##D(const __grid_constant__ CUtensorMap map, attention::Args a) { \
        attention::prefill_tiles<T, attention::PageTiles<D>>(&map, a);                                      \
    }
