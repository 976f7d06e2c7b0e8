// Causal attention of rows with several query tokens over their pages, by warpgroups (Hopper).
//
// A block takes tiles of 128 (token, head) pairs of one KV head's group, as common/attention/prefill.cuh
// does, from the same work list. Two warpgroups own 64 rows each; four more warps bring what these read: one
// the keys, one the values, page by page through the tensor memory accelerator into rings of two tiles of 128
// tokens, two the queries. While the tensor cores work on a block's weighted values and on the next block's
// scores, the other warpgroup raises its scores to weights; the two take turns in asking for products. Blocks
// are taken from the last to the first, so that those that hide keys come first.
//
// Tiles lie in shared memory as [rows / 8][D / 64][8][64], 16-byte pieces swizzled by row: a page's box is
// 16 rows of that, whatever the page's own size.
#pragma once
#include <cuda.h>
#include "../../common/attention/attention.cuh"

#include <type_traits>

#include "hopper.cuh"

namespace attention {

template <int D>
struct TileShape {
    static constexpr int ROWS = 128, KEYS = 128, STAGES = 2, BOX = 16;
    static constexpr int THREADS = 384;      // a warpgroup that loads, two that compute
    static constexpr int EIGHT = 8 * D * 2;  // bytes of eight rows
    static constexpr int QUERY = ROWS * D * 2, TILE = KEYS * D * 2;
    static constexpr int BARRIERS = 2 * QUERY + 2 * STAGES * TILE;  // where they lie, behind the tiles
    static constexpr int SHARED = BARRIERS + 128;
    static constexpr int LOAD_REGISTERS = 40, COMPUTE_REGISTERS = 232;
};

// A block's share of one tile and KV head.
struct Tile {
    Item item;
    int kv_head, group, row0;  // row0: the tile's first (token, head) pair of the row
    int before;                // keys that every query of the row sees
    int full;                  // keys that the tile's first query sees
    int b0, b1;                // blocks of keys
    __device__ __forceinline__ Tile(const Args& a, const Item& i, int unit) : item(i) {
        constexpr int ROWS = TileShape<64>::ROWS,
                      KEYS = TileShape<64>::KEYS;  // the same for all sizes of heads
        kv_head = unit % a.g, group = a.h / a.g, row0 = item.tile * ROWS;
        before = item.context - item.end;
        full = before + row0 / group + 1;
        const int keys = before + min(item.end - 1, (row0 + ROWS - 1) / group) + 1;
        const int blocks = (keys + KEYS - 1) / KEYS;
        b0 = blocks * item.part() / item.parts(), b1 = blocks * (item.part() + 1) / item.parts();
    }
};

// Units go to blocks there and back again: the longest come first, and no block gets the longer one each
// time.
__device__ __forceinline__ int unit_of(int round) {
    return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

// Where in shared memory tiles and barriers are. `stage`: of the queries, too.
template <int D>
struct Places {
    using Shape = TileShape<D>;
    uint32_t base;
    __device__ __forceinline__ uint32_t query(int stage) const { return base + stage * Shape::QUERY; }
    __device__ __forceinline__ uint32_t tile(int values, int stage) const {
        return base + 2 * Shape::QUERY + (values * Shape::STAGES + stage) * Shape::TILE;
    }
    __device__ __forceinline__ uint32_t full(int values, int stage) const {
        return base + Shape::BARRIERS + 8 * (values * Shape::STAGES + stage);
    }
    __device__ __forceinline__ uint32_t empty(int values, int stage) const {
        return full(values, stage) + 16 * Shape::STAGES;
    }
    __device__ __forceinline__ uint32_t query_full(int stage) const {
        return base + Shape::BARRIERS + 32 * Shape::STAGES + 8 * stage;
    }
    __device__ __forceinline__ uint32_t query_empty(int stage) const { return query_full(stage) + 16; }
};

// One warp: keys (or values) of all tiles, block by block; a lane a page.
template <int D>
__device__ __forceinline__ void load_pages(const Args& a, const void* map, const Places<D>& places,
                                           int values) {
    using Shape = TileShape<D>;
    constexpr int PAGES = Shape::KEYS / Shape::BOX;
    const int lane = threadIdx.x & 31, total = a.plan->prefill * a.g;
    const int heads =
        static_cast<int>(a.page_stride / (a.block_size * D));  // of a block, over layers and kinds
    int taken = 0;
    for (int round = 0; unit_of(round) < total; round++) {
        const Tile tile(a, load_item(a.items + unit_of(round) / a.g), unit_of(round));
        const int* table = a.block_table + static_cast<int64_t>(tile.item.row) * a.table_width;
        const int head = values * a.g + tile.kv_head, last = tile.item.context - 1;
        auto token_of = [&](int block) { return block * Shape::KEYS + lane * Shape::BOX; };
        auto entry_of = [&](int block) {
            return block >= tile.b0 && lane < PAGES ? table[min(token_of(block), last) / a.block_size] : 0;
        };
        int entry = entry_of(tile.b1 - 1);
        for (int block = tile.b1 - 1; block >= tile.b0; block--, taken++) {
            const int stage = taken % Shape::STAGES, token = token_of(block), from = entry;
            const int pages =
                min(PAGES, (tile.item.context - block * Shape::KEYS + Shape::BOX - 1) / Shape::BOX);
            entry = entry_of(block - 1);
            barrier_wait(places.empty(values, stage), (taken / Shape::STAGES & 1) ^ 1);
            if (lane == 0) barrier_arrive_expect(places.full(values, stage), pages * (Shape::BOX * D * 2));
            __syncwarp();
            if (lane < pages)
                tma_load5(places.tile(values, stage) + lane * (Shape::BOX * D * 2), map, 0, 0, 0,
                          token % a.block_size / 8, from * heads + head, places.full(values, stage));
        }
    }
}

// Two warps: the tiles' queries.
template <typename T, int D>
__device__ __forceinline__ void load_queries(const Args& a, const Places<D>& places) {
    using Shape = TileShape<D>;
    constexpr int PIECES = D / 8, STEP = 64 / PIECES;  // rows at a time
    const int thread = threadIdx.x & 63, c = thread % PIECES, total = a.plan->prefill * a.g;
    for (int round = 0; unit_of(round) < total; round++) {
        const Tile tile(a, load_item(a.items + unit_of(round) / a.g), unit_of(round));
        const int group = tile.group, step_tokens = STEP / group, step_heads = STEP % group;
        int token = (tile.row0 + thread / PIECES) / group, head = (tile.row0 + thread / PIECES) % group;
        const T* q = static_cast<const T*>(a.q) +
                     (static_cast<int64_t>(tile.item.start) * a.h + tile.kv_head * group) * D + c * 8;
        barrier_wait(places.query_empty(round & 1), (round >> 1 & 1) ^ 1);
        for (int r = thread / PIECES; r < Shape::ROWS; r += STEP) {
            const bool valid = token < tile.item.end;
            const uint32_t to = places.query(round & 1) + r / 8 * Shape::EIGHT + c / 8 * 1024 +
                                (r & 7) * 128 + ((c & 7) ^ (r & 7)) * 16;
            cp_async16(to, valid ? q + (token * a.h + head) * D : q, valid);
            token += step_tokens, head += step_heads;
            if (head >= group) head -= group, token++;
        }
        cp_async_commit();
        cp_async_wait<0>();
        async_proxy_fence();
        barrier_arrive(places.query_full(round & 1));
    }
}

// Named barriers: a warpgroup's turn to ask for products; a warpgroup's own.
constexpr int TURN = 1, OWN = 3;
template <int THREADS>
__device__ __forceinline__ void named_sync(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// A thread's two rows (g and g + 8 of its warp's 16) on their way through the blocks of keys.
template <typename T, int D>
struct Softmax {
    static constexpr int KEYS = TileShape<D>::KEYS;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // maximum, in powers of two; sum over this lane's keys
    float scale[2];                                  // of what was summed before the last block

    // Scores of a block become weights. HIDES: keys from `limit[i]` on, counted from this lane's first, do
    // not count for row i.
    template <bool HIDES>
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 2], const int (&limit)[2], float scale_log2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[4 * j + 2 * i + e];
                    if (HIDES && 8 * j + e >= limit[i]) x = -INFINITY;
                    top = fmaxf(top, x);
                }
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            top = fmaxf(m[i], top * scale_log2);
            const float base = HIDES && top == -INFINITY ? 0.f : top;  // a row that has seen no key yet
            scale[i] = exp2_fast(m[i] - base);
            m[i] = top;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[4 * j + 2 * i + e];
                    x = exp2_fast(fmaf(x, scale_log2, -base));
                    sum += x;
                }
            l[i] = l[i] * scale[i] + sum;
        }
    }
};

// In a quad, lane t has word t of four 16-byte pieces; afterwards it has all of piece t.
__device__ __forceinline__ uint4 gather_piece(uint32_t (&w)[4]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int bit = 1; bit < 4; bit <<= 1)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(i & bit)) {
                const bool upper = t & bit;
                const uint32_t other = __shfl_xor_sync(~0u, upper ? w[i] : w[i | bit], bit);
                if (upper)
                    w[i] = other;
                else
                    w[i | bit] = other;
            }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

template <typename T, int D>
__device__ __forceinline__ void store_rows(const Args& a, const Tile& tile, Softmax<T, D>& rows,
                                           float (&o)[D / 2], int r0) {
    constexpr int ROWS = TileShape<D>::ROWS;
    const int t = threadIdx.x & 3, count = tile.item.end * tile.group - tile.row0;
    const int64_t at = (static_cast<int64_t>(tile.item.slot + tile.item.part()) * a.g + tile.kv_head) * ROWS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 1);
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 2);
        const int r = r0 + 8 * i;
        if (tile.item.slot < 0) {
            const float inverse = 1.f / rows.l[i];
            const int pair = tile.row0 + r, token = tile.item.start + pair / tile.group;
            T* out = static_cast<T*>(a.out) +
                     (static_cast<int64_t>(token) * a.h + tile.kv_head * tile.group + pair % tile.group) * D;
#pragma unroll
            for (int j = 0; j < D / 32; j++) {
                uint32_t w[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float* x = o + 16 * j + 4 * k + 2 * i;
                    w[k] = pack2<T>(x[0] * inverse, x[1] * inverse);
                }
                const uint4 piece = gather_piece(w);
                if (r < count) *reinterpret_cast<uint4*>(out + (4 * j + t) * 8) = piece;
            }
        } else if (r < count) {
            if (t == 0) a.heads[at + r] = make_float2(rows.m[i], rows.l[i]);
#pragma unroll
            for (int j = 0; j < D / 8; j++)
                *reinterpret_cast<float2*>(a.sums + (at + r) * D + j * 8 + 2 * t) =
                    make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
        }
    }
}

// A warpgroup's way through the tiles: one pipeline over the blocks of all of them. While a block's weighted
// values are added, the scores of the next one, maybe of the next tile, are made and weighed.
template <typename T, int D>
struct Pipeline {
    using Shape = TileShape<D>;
    static constexpr int KEYS = Shape::KEYS, STAGES = Shape::STAGES, EIGHT = Shape::EIGHT;
    const Args& a;
    const Places<D>& places;
    const int warpgroup = (threadIdx.x >> 7) - 1, lane = threadIdx.x & 31;
    const int r0 =
        warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;  // of the tile; the other is r0 + 8
    int taken = 0;                                                // blocks of keys
    float o[D / 2], s[KEYS / 2];
    uint32_t p[KEYS / 4];

    __device__ __forceinline__ void ask_scores(int n, int round) {  // n: of all blocks taken
        using Scores = Wgmma<T, KEYS>;
        const uint64_t keys = wgmma_operand(places.tile(0, n % STAGES), EIGHT);
        const uint64_t query = wgmma_operand(places.query(round & 1) + warpgroup * 8 * EIGHT, EIGHT);
        barrier_wait(places.full(0, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const int at = (k / 4 * 1024 + k % 4 * 32) >> 4;
            Scores::ss(s, query + at, keys + at, k > 0);
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_outputs(int n) {
        using Outputs = Wgmma<T, D>;
        const uint64_t values = wgmma_operand(places.tile(1, n % STAGES), EIGHT, 1024);
        barrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) Outputs::rs(o, p + 4 * k, values + (k * 2 * EIGHT >> 4), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_both(int round) {  // the last block's values, the next one's scores
        named_sync<256>(TURN + warpgroup);
        ask_scores(taken + 1, round);
        ask_outputs(taken);
        named_arrive<256>(TURN + (warpgroup ^ 1));
    }
    template <int PENDING>
    __device__ __forceinline__ void await_scores(int n) {
        wgmma_wait<PENDING>();
        wgmma_pin(s);
        release(places.empty(0, n % STAGES));
    }
    __device__ __forceinline__ void await_outputs() {
        wgmma_wait<0>();
        wgmma_pin(o);
        release(places.empty(1, taken++ % STAGES));
    }
    __device__ __forceinline__ void release(uint32_t barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }
    template <bool HIDES>
    __device__ __forceinline__ void weigh(Softmax<T, D>& rows, const Tile& tile, int block) {
        int limit[2] = {};
        if (HIDES) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                limit[i] =
                    tile.before + (tile.row0 + r0 + 8 * i) / tile.group + 1 - 2 * (lane & 3) - block * KEYS;
        }
        rows.template weigh<HIDES>(s, limit, a.scale_log2);
    }
    __device__ __forceinline__ void keep_weights() {
#pragma unroll
        for (int k = 0; k < KEYS / 4; k++) p[k] = pack2<T>(s[2 * k], s[2 * k + 1]);
    }
    // Block n of all is the last of a row: what lies behind its `held` tokens is not ours and may be NaN.
    __device__ __forceinline__ void clear_values(int n, int held) const {
        if (held >= KEYS) return;
        const uint32_t values = places.tile(1, n % STAGES);
        barrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        for (int i = threadIdx.x & 127; i < (KEYS - held) * (D / 8); i += 128) {
            const int r = held + i / (D / 8), c = i % (D / 8);
            store_shared16(values + r / 8 * EIGHT + c / 8 * 1024 + (r & 7) * 128 + (c & 7) * 16,
                           make_uint4(0, 0, 0, 0));
        }
        async_proxy_fence();
        named_sync<128>(OWN + warpgroup);
    }
    // A block of the tile under way, behind its first.
    template <bool HIDES>
    __device__ __forceinline__ void step(Softmax<T, D>& rows, const Tile& tile, int block, int round) {
        ask_both(round);
        await_scores<1>(taken + 1);
        if (block == tile.b0) release(places.query_empty(round & 1));
        weigh<HIDES>(rows, tile, block);
        await_outputs();
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= rows.scale[i >> 1 & 1];
        keep_weights();
    }
    // A tile's first block, the last of its keys: its scores have been asked for.
    template <int PENDING>
    __device__ __forceinline__ void begin(Softmax<T, D>& rows, const Tile& tile, int n, int round) {
        await_scores<PENDING>(n);
        if (tile.b1 - 1 == tile.b0) release(places.query_empty(round & 1));
        weigh<true>(rows, tile, tile.b1 - 1);
    }
    __device__ __forceinline__ void clear_outputs() {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0;
    }

    __device__ __forceinline__ void run() {
        const int total = a.plan->prefill * a.g;
        if (unit_of(0) >= total) return;
        if (warpgroup == 1) named_arrive<256>(TURN);
        Tile tile(a, load_item(a.items + unit_of(0) / a.g), unit_of(0));
        Softmax<T, D> rows;
        barrier_wait(places.query_full(0), 0);
        ask_scores(taken, 0);
        begin<0>(rows, tile, taken, 0);
        clear_values(taken, tile.item.context - (tile.b1 - 1) * KEYS);
        clear_outputs();
        keep_weights();
        for (int round = 0;; round++) {
            const int unit = unit_of(round + 1);
            const bool more = unit < total;
            const Item ahead = load_item(a.items + (more ? unit : 0) / a.g);
            const int shown = tile.full / KEYS;  // blocks that hide no key from any row
            int block = tile.b1 - 2;
            for (; block >= max(tile.b0, shown); block--) step<true>(rows, tile, block, round);
            for (; block >= tile.b0; block--) step<false>(rows, tile, block, round);
            if (!more) break;
            const Tile next(a, ahead, unit);
            Softmax<T, D> fresh;
            barrier_wait(places.query_full((round + 1) & 1), (round + 1) >> 1 & 1);
            ask_both(round + 1);
            begin<1>(fresh, next, taken + 1, round + 1);
            await_outputs();
            store_rows<T, D>(a, tile, rows, o, r0);
            clear_values(taken, next.item.context - (next.b1 - 1) * KEYS);
            clear_outputs();
            keep_weights();
            tile = next, rows = fresh;
        }
        ask_outputs(taken);
        await_outputs();
        store_rows<T, D>(a, tile, rows, o, r0);
        if (warpgroup == 0) named_sync<256>(TURN);  // the other one's last arrival
    }
};

template <typename T, int D>
__device__ __forceinline__ void prefill_tiles(const void* map, const Args& a) {
    using Shape = TileShape<D>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const Places<D> places{shared_address(shared)};
    if (threadIdx.x == 0) {
        tma_prefetch(map);
        for (int i = 0; i < 2 * Shape::STAGES; i++) {
            barrier_init(places.full(0, i), 1);
            barrier_init(places.empty(0, i), 8);  // the computing warps
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(places.query_full(i), 64);
            barrier_init(places.query_empty(i), 8);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < 128) {
        registers_drop<Shape::LOAD_REGISTERS>();
        const int warp = threadIdx.x >> 5;
        if (warp < 2)
            load_pages<D>(a, map, places, warp);
        else
            load_queries<T, D>(a, places);
    } else {
        registers_raise<Shape::COMPUTE_REGISTERS>();
        Pipeline<T, D>{a, places}.run();
    }
}

}  // namespace attention

#define PREFILL_TILES_KERNEL(TYPE, T, D, BYTES)                                                             \
    static_assert(attention::TileShape<D>::SHARED == BYTES);                                                \
    extern "C" __global__ void __launch_bounds__(attention::TileShape<D>::THREADS, 1)                       \
        attention_prefill_tiles_##TYPE##_d##D(const __grid_constant__ CUtensorMap map, attention::Args a) { \
        attention::prefill_tiles<T, D>(&map, a);                                                            \
    }
