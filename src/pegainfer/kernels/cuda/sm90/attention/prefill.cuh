// Causal attention of rows with several query tokens over their pages, by warpgroups (Hopper).
//
// A block takes tiles of 128 (token, head) pairs of one KV head's group, as common/attention/prefill.cuh
// does, from the same work list. Two warpgroups own 64 rows each; four more warps bring what these read: one
// the keys, one the values, page by page through the tensor memory accelerator into rings of two tiles of 128
// tokens (64 where heads have 256 channels), two the queries. While the tensor cores work on a block's
// weighted values and on the next block's scores, the other warpgroup raises its scores to weights; the two
// issue their GEMMs alternately. Blocks are taken from the last to the first, so that those that hide keys
// come first.
//
// Tiles lie in shared memory as [rows / 8][D / 64][8][64], 16-byte pieces swizzled by row: a page's box is
// 16 rows of that, whatever the page's own size.
#pragma once
#include <cuda.h>

#include "../../common/attention/attention.cuh"
#include "hopper.cuh"

namespace attention {

template <int D>
struct TileShape {
    static constexpr int ROWS = 128, KEYS = D > 128 ? 64 : 128, STAGES = 2, BOX = 16;
    static constexpr int QUERIES = D > 128 ? 1 : 2;  // tiles of queries that there is room for
    static constexpr int THREADS = 384;              // a warpgroup that loads, two that compute
    static constexpr int EIGHT = 8 * D * 2;          // bytes of eight rows
    static constexpr int QUERY = ROWS * D * 2, TILE = KEYS * D * 2;
    static constexpr int BARRIERS = QUERIES * QUERY + 2 * STAGES * TILE;  // where they lie, behind the tiles
    static constexpr int SHARED = BARRIERS + 128;
    static constexpr int LOAD_REGISTERS = 40, COMPUTE_REGISTERS = 232;
    // Where 16-byte piece c of row r lies in a tile, and column 16k of its rows for wgmma.
    static __device__ __forceinline__ uint32_t piece(int r, int c) {
        return r / 8 * EIGHT + c / 8 * 1024 + (r & 7) * 128 + ((c & 7) ^ (r & 7)) * 16;
    }
    static constexpr __device__ __forceinline__ int column(int k) { return k / 4 * 1024 + k % 4 * 32; }
};

// Division by a number that is known early: exact while number and divisor multiply to less than 2^32.
struct Divisor {
    uint32_t by, magic;
    __device__ __forceinline__ explicit Divisor(uint32_t d)
        : by(d), magic(d == 1 ? 0 : 0xffffffffu / d + 1) {}
    __device__ __forceinline__ int quotient(int n) const {
        return magic ? static_cast<int>(__umulhi(n, magic)) : n;
    }
    __device__ __forceinline__ int rest(int n) const { return n - quotient(n) * static_cast<int>(by); }
};

// The units of a launch: an item and a KV head each.
struct Work {
    const Args& a;
    Divisor kv_heads, group;
    int total;
    __device__ __forceinline__ explicit Work(const Args& args)
        : a(args), kv_heads(args.g), group(args.h / args.g), total(args.plan->prefill * args.g) {}
    // Units go to blocks there and back again: the longest come first, and no block gets the longer one each
    // time.
    __device__ __forceinline__ int unit(int round) const {
        return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    __device__ __forceinline__ bool has(int round) const { return unit(round) < total; }
    __device__ __forceinline__ Item item(int round) const {  // the last one where there is none
        return load_item(a.items + kv_heads.quotient(min(unit(round), total - 1)));
    }
};

// A block's share of one tile and KV head.
template <int D>
struct Tile {
    Item item;
    int kv_head, row0;  // row0: the tile's first (token, head) pair of the row
    int before;         // keys that every query of the row sees
    int full;           // keys that the tile's first query sees
    int b0, b1;         // blocks of keys, at least one
    __device__ __forceinline__ Tile(const Work& work, const Item& i, int round) : item(i) {
        constexpr int ROWS = TileShape<D>::ROWS, KEYS = TileShape<D>::KEYS;
        kv_head = work.kv_heads.rest(work.unit(round)), row0 = item.tile * ROWS;
        before = item.context - item.end;
        full = before + work.group.quotient(row0) + 1;
        const int keys = before + min(item.end - 1, work.group.quotient(row0 + ROWS - 1)) + 1;
        const int blocks = (keys + KEYS - 1) / KEYS;
        b0 = 0, b1 = blocks;
        if (item.parts() > 1)
            b0 = blocks * item.part() / item.parts(), b1 = blocks * (item.part() + 1) / item.parts();
    }
};

// Where in shared memory tiles and barriers are. `stage`: of the queries, too.
template <int D>
struct Places {
    using Shape = TileShape<D>;
    uint32_t base;
    __device__ __forceinline__ uint32_t query(int stage) const { return base + stage * Shape::QUERY; }
    __device__ __forceinline__ uint32_t tile(int values, int stage) const {
        return base + Shape::QUERIES * Shape::QUERY + (values * Shape::STAGES + stage) * Shape::TILE;
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
    // The queries of a block's tiles take turns in their places.
    static __device__ __forceinline__ int query_stage(int round) { return round % Shape::QUERIES; }
    static __device__ __forceinline__ int query_phase(int round) { return round / Shape::QUERIES & 1; }
};

// One warp: keys (or values) of all tiles, block by block; a lane a page. What the next block needs of the
// work list and the block table is requested a block ahead.
template <int D>
__device__ __forceinline__ void load_pages(const Work& work, const void* map, const Places<D>& places,
                                           int values) {
    using Shape = TileShape<D>;
    constexpr int PAGES = Shape::KEYS / Shape::BOX, BYTES = Shape::BOX * D * 2;
    const Args& a = work.a;
    const int lane = threadIdx.x & 31;
    const int heads = static_cast<int>(a.page_stride / (a.block_size * D));  // of a block, all layers
    auto token_of = [&](int block) { return block * Shape::KEYS + lane * Shape::BOX; };
    auto entry_of = [&](const Tile<D>& tile, int block) {
        const int* table = a.block_table + static_cast<int64_t>(tile.item.row) * a.table_width;
        return lane < PAGES ? table[min(token_of(block), tile.item.context - 1) / a.block_size] : 0;
    };
    if (!work.has(0)) return;
    Tile<D> tile(work, work.item(0), 0);
    Item ahead = work.item(1);
    int block = tile.b1 - 1, entry = entry_of(tile, block), round = 0;
    pdl_wait();
    pdl_launch();
    for (int taken = 0; work.has(round); taken++) {
        const int stage = taken % Shape::STAGES, token = token_of(block);
        const int from = entry * heads + values * a.g + tile.kv_head;
        const int pages = min(PAGES, (tile.item.context - block * Shape::KEYS + Shape::BOX - 1) / Shape::BOX);
        if (--block < tile.b0) {
            tile = Tile<D>(work, ahead, ++round);
            ahead = work.item(round + 1);
            block = tile.b1 - 1;
        }
        entry = entry_of(tile, block);
        mbarrier_wait(places.empty(values, stage), (taken / Shape::STAGES & 1) ^ 1);
        if (lane == 0) mbarrier_arrive_expect(places.full(values, stage), pages * BYTES);
        __syncwarp();
        if (lane < pages)
            tma_load5(places.tile(values, stage) + lane * BYTES, map, 0, 0, 0, token % a.block_size / 8, from,
                      places.full(values, stage));
    }
}

// Two warps: the tiles' queries.
template <typename T, int D>
__device__ __forceinline__ void load_queries(const Work& work, const Places<D>& places) {
    using Shape = TileShape<D>;
    constexpr int PIECES = D / 8, STEP = 64 / PIECES;  // rows at a time
    const Args& a = work.a;
    const int row = (threadIdx.x & 63) / PIECES, c = threadIdx.x % PIECES, group = work.group.by;
    const int step_tokens = work.group.quotient(STEP), step_heads = work.group.rest(STEP);
    pdl_wait();
    pdl_launch();
    for (int round = 0; work.has(round); round++) {
        const Tile<D> tile(work, work.item(round), round);
        const int stage = places.query_stage(round);
        int token = work.group.quotient(tile.row0 + row), head = work.group.rest(tile.row0 + row);
        const int64_t first = static_cast<int64_t>(tile.item.start) * a.h + tile.kv_head * group;
        const T* q = static_cast<const T*>(a.q) + first * D + c * 8;
        mbarrier_wait(places.query_empty(stage), places.query_phase(round) ^ 1);
        for (int r = row; r < Shape::ROWS; r += STEP) {
            const bool valid = token < tile.item.end;
            cp_async16(places.query(stage) + Shape::piece(r, c), valid ? q + (token * a.h + head) * D : q,
                       valid);
            token += step_tokens, head += step_heads;
            if (head >= group) head -= group, token++;
        }
        cp_async_commit();
        cp_async_wait<0>();
        async_proxy_fence();
        mbarrier_arrive(places.query_full(stage));
    }
}

// Named barriers: a warpgroup's permission to issue its GEMMs; a warpgroup's own.
constexpr int GEMM_ORDER = 1, OWN = 3;

// A thread's two rows (of its warp's 16, eight apart) on their way through the blocks of a tile.
template <int D>
struct Rows {
    static constexpr int KEYS = TileShape<D>::KEYS;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // maximum, in powers of two; sum over this lane's keys
    float scale[2];                                  // of what was summed before the last block
    int sees[2];                                     // keys, less this lane's first of a block
    __device__ __forceinline__ Rows(const Work& work, const Tile<D>& tile, int r0) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            sees[i] = tile.before + work.group.quotient(tile.row0 + r0 + 8 * i) + 1 - 2 * (threadIdx.x & 3);
    }
    // Scores of a block become weights. HIDES: some rows do not see all of its keys.
    template <bool HIDES>
    __device__ __forceinline__ void weigh(float (&s)[KEYS / 2], int block, float scale_log2) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int limit = sees[i] - block * KEYS;
            float top = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float& x = s[4 * j + 2 * i + e];
                    if (HIDES && 8 * j + e >= limit) x = -INFINITY;
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
__device__ __forceinline__ void store_rows(const Work& work, const Tile<D>& tile, Rows<D>& rows,
                                           float (&o)[D / 2], int r0) {
    constexpr int ROWS = TileShape<D>::ROWS;
    const Args& a = work.a;
    const int t = threadIdx.x & 3, group = work.group.by, count = tile.item.end * group - tile.row0;
    const int64_t at = (static_cast<int64_t>(tile.item.slot + tile.item.part()) * a.g + tile.kv_head) * ROWS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 1);
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 2);
        const int r = r0 + 8 * i;
        if (tile.item.slot < 0) {
            const float inverse = 1.f / rows.l[i];
            const int pair = tile.row0 + r, token = tile.item.start + work.group.quotient(pair);
            T* out = static_cast<T*>(a.out) +
                     (static_cast<int64_t>(token) * a.h + tile.kv_head * group + work.group.rest(pair)) * D;
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
    const Work& work;
    const Places<D>& places;
    const int warpgroup = (threadIdx.x >> 7) - 1, lane = threadIdx.x & 31;
    const int r0 = warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;  // of the tile; and r0 + 8
    int taken = 0;                                                           // blocks of keys
    float o[D / 2], s[KEYS / 2];
    uint32_t p[KEYS / 4];

    __device__ __forceinline__ void ask_scores(int n, int round) {  // n: of all blocks taken
        const uint64_t keys = wgmma_operand(places.tile(0, n % STAGES), EIGHT);
        const uint64_t query =
            wgmma_operand(places.query(places.query_stage(round)) + warpgroup * 8 * EIGHT, EIGHT);
        mbarrier_wait(places.full(0, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; k++)
            Wgmma<T, KEYS>::ss(s, query + (Shape::column(k) >> 4), keys + (Shape::column(k) >> 4), k > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_outputs(int n) {
        const uint64_t values = wgmma_operand(places.tile(1, n % STAGES), EIGHT, 1024);
        mbarrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            Wgmma<T, D>::rs(o, p + 4 * k, values + (k * 2 * EIGHT >> 4), true);
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_both(int round) {  // the next block's scores, the last one's values
        named_wait<256>(GEMM_ORDER + warpgroup);
        ask_scores(taken + 1, round);
        ask_outputs(taken);
        named_arrive<256>(GEMM_ORDER + (warpgroup ^ 1));
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
        if (lane == 0) mbarrier_arrive(barrier);
    }
    __device__ __forceinline__ void keep_weights() {
#pragma unroll
        for (int k = 0; k < KEYS / 4; k++) p[k] = pack2<T>(s[2 * k], s[2 * k + 1]);
    }
    __device__ __forceinline__ void clear_outputs() {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0;
    }
    // Block n of all is a row's last: what lies behind its `held` tokens is not ours and may be NaN.
    __device__ __forceinline__ void clear_values(int n, int held) const {
        if (held >= KEYS) return;
        mbarrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        for (int i = threadIdx.x & 127; i < (KEYS - held) * (D / 8); i += 128)
            store_shared16(places.tile(1, n % STAGES) + Shape::piece(held + i / (D / 8), i % (D / 8)),
                           make_uint4(0, 0, 0, 0));
        async_proxy_fence();
        named_wait<128>(OWN + warpgroup);
    }
    // A tile's first block, the last of its keys: its scores have been requested.
    template <int PENDING>
    __device__ __forceinline__ void begin(Rows<D>& rows, const Tile<D>& tile, int n, int round) {
        await_scores<PENDING>(n);
        if (tile.b1 - 1 == tile.b0) release(places.query_empty(places.query_stage(round)));
        rows.template weigh<true>(s, tile.b1 - 1, work.a.scale_log2);
    }
    // A later one.
    template <bool HIDES>
    __device__ __forceinline__ void step(Rows<D>& rows, const Tile<D>& tile, int block, int round) {
        ask_both(round);
        await_scores<1>(taken + 1);
        if (block == tile.b0) release(places.query_empty(places.query_stage(round)));
        rows.template weigh<HIDES>(s, block, work.a.scale_log2);
        await_outputs();
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= rows.scale[i >> 1 & 1];
        keep_weights();
    }

    __device__ __forceinline__ void run() {
        if (!work.has(0)) return;
        if (warpgroup == 1) named_arrive<256>(GEMM_ORDER);
        Tile<D> tile(work, work.item(0), 0);
        Rows<D> rows(work, tile, r0);
        pdl_wait();
        pdl_launch();
        mbarrier_wait(places.query_full(0), 0);
        ask_scores(taken, 0);
        begin<0>(rows, tile, taken, 0);
        clear_values(taken, tile.item.context - (tile.b1 - 1) * KEYS);
        clear_outputs();
        keep_weights();
        for (int round = 0;; round++) {
            const Item ahead = work.item(round + 1);
            const int shown = tile.full / KEYS;  // blocks that hide no key from any row
            int block = tile.b1 - 2;
            for (; block >= max(tile.b0, shown); block--) step<true>(rows, tile, block, round);
            for (; block >= tile.b0; block--) step<false>(rows, tile, block, round);
            if (!work.has(round + 1)) break;
            const Tile<D> next(work, ahead, round + 1);
            Rows<D> fresh(work, next, r0);
            mbarrier_wait(places.query_full(places.query_stage(round + 1)), places.query_phase(round + 1));
            ask_both(round + 1);
            begin<1>(fresh, next, taken + 1, round + 1);
            await_outputs();
            store_rows<T, D>(work, tile, rows, o, r0);
            clear_values(taken, next.item.context - (next.b1 - 1) * KEYS);
            clear_outputs();
            keep_weights();
            tile = next, rows = fresh;
        }
        ask_outputs(taken);
        await_outputs();
        store_rows<T, D>(work, tile, rows, o, r0);
        if (warpgroup == 0) named_wait<256>(GEMM_ORDER);  // the other one's last arrival
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
            mbarrier_init(places.full(0, i), 1);
            mbarrier_init(places.empty(0, i), 8);  // the computing warps
        }
        for (int i = 0; i < Shape::QUERIES; i++) {
            mbarrier_init(places.query_full(i), 64);
            mbarrier_init(places.query_empty(i), 8);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const Work work(a);
    if (threadIdx.x < 128) {
        registers_drop<Shape::LOAD_REGISTERS>();
        const int warp = threadIdx.x >> 5;
        if (warp < 2)
            load_pages<D>(work, map, places, warp);
        else
            load_queries<T, D>(work, places);
    } else {
        registers_raise<Shape::COMPUTE_REGISTERS>();
        Pipeline<T, D>{work, places}.run();
    }
}

}  // namespace attention

#define PREFILL_TILES_KERNEL(TYPE, T, D, BYTES)                                                             \
    static_assert(attention::TileShape<D>::SHARED == BYTES);                                                \
    extern "C" __global__ void __launch_bounds__(attention::TileShape<D>::THREADS, 1)                       \
        attention_prefill_tiles_##TYPE##_d##D(const __grid_constant__ CUtensorMap map, attention::Args a) { \
        attention::prefill_tiles<T, D>(&map, a);                                                            \
    }
