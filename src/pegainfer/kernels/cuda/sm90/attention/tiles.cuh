// Tiles of causal attention by warpgroups (Hopper): what sm90/attention/prefill.cuh and sm90/mla/attend.cuh
// share. Two warpgroups compute 64 rows each from tiles of queries, keys and values that a third one brings.
// While the tensor cores work on a block's weighted values and on the next block's scores, the other
// warpgroup raises its scores to weights; the two issue their GEMMs alternately.
#pragma once
#include <cuda.h>

#include "../../common/attention/attention.cuh"
#include "hopper.cuh"

namespace attention {

// Sizes of a tile, and how it lies in shared memory: 16-byte piece c of row r at piece(r, c).
//
// D, V: channels of queries and keys, and of values. COLUMN: bytes from 64 channels of eight rows to the next
// 64; GROUP: from eight rows to the next eight. QUERY_WRITERS: arrivals that complete a tile of queries.
// ROUNDS: an item names its blocks of keys, and several launches may follow each other over the same tile.
template <int D_, int V_, int COLUMN_, int GROUP_, int QUERY_WRITERS_, bool ROUNDS_>
struct TileShape {
    static constexpr int D = D_, V = V_, COLUMN = COLUMN_, GROUP = GROUP_, QUERY_WRITERS = QUERY_WRITERS_;
    static constexpr bool ROUNDS = ROUNDS_;
    static constexpr int ROWS = 128, KEYS = V > 128 ? 64 : 128, STAGES = 2;
    static constexpr int QUERIES = D > 128 ? 1 : 2;  // tiles of queries that there is room for
    static constexpr int THREADS = 384;              // a warpgroup that loads, two that compute
    static constexpr int QUERY = ROWS * D * 2, KEY_TILE = KEYS * D * 2, VALUE_TILE = KEYS * V * 2;
    static constexpr int VALUES = QUERIES * QUERY + STAGES * KEY_TILE;  // where they lie
    static constexpr int BARRIERS = VALUES + STAGES * VALUE_TILE;
    static constexpr int SHARED = BARRIERS + 128;
    static constexpr int LOAD_REGISTERS = 40, COMPUTE_REGISTERS = 232;
    static __device__ __forceinline__ uint32_t piece(int r, int c) {
        return r / 8 * GROUP + c / 8 * COLUMN + (r & 7) * 128 + ((c & 7) ^ (r & 7)) * 16;
    }
    // Where channel 16k of the rows lies, for wgmma.
    static constexpr __device__ __forceinline__ int channel(int k) { return k / 4 * COLUMN + k % 4 * 32; }
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
    // The order of blocks is reversed in every other round: the longest units come first, and no block gets
    // the longer one in each round.
    __device__ __forceinline__ int unit(int round) const {
        return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    __device__ __forceinline__ bool has(int round) const { return unit(round) < total; }
    __device__ __forceinline__ Item item(int round) const {  // the last one where there is none
        return load_item(a.items + kv_heads.quotient(min(unit(round), total - 1)));
    }
};

// A block's share of one tile and KV head. S: a TileShape.
template <typename S>
struct Tile {
    Item item;
    int kv_head, row0;  // row0: the tile's first (token, head) pair of the row
    int before;         // keys that every query of the row sees
    int full;           // keys that the tile's first query sees
    int b0, b1;         // blocks of keys, at least one
    bool resumes;       // from the sums that an earlier launch kept
    bool keeps;         // its sums, for a later launch
    __device__ __forceinline__ Tile(const Work& work, const Item& i, int round) : item(i) {
        kv_head = work.kv_heads.rest(work.unit(round)), row0 = item.tile * S::ROWS;
        before = item.context - item.end;
        full = before + work.group.quotient(row0) + 1;
        const int keys = before + min(item.end - 1, work.group.quotient(row0 + S::ROWS - 1)) + 1;
        const int blocks = (keys + S::KEYS - 1) / S::KEYS;
        if constexpr (S::ROUNDS) {
            b0 = item.begin & 0xffff, b1 = item.begin >> 16;
            const bool one = item.parts() == 1;
            resumes = one && b0 > 0, keeps = !one || b1 < blocks;
        } else {
            b0 = 0, b1 = blocks, resumes = false, keeps = item.slot >= 0;
            if (item.parts() > 1)
                b0 = blocks * item.part() / item.parts(), b1 = blocks * (item.part() + 1) / item.parts();
        }
    }
    // Of its first row among those whose sums are kept.
    __device__ __forceinline__ int64_t place(const Work& work) const {
        return (static_cast<int64_t>(item.slot + item.part()) * work.a.g + kv_head) * S::ROWS;
    }
};

// Where in shared memory tiles and barriers are. `stage`: of the queries, too.
template <typename Shape>
struct Places {
    uint32_t base;
    __device__ __forceinline__ uint32_t query(int stage) const { return base + stage * Shape::QUERY; }
    __device__ __forceinline__ uint32_t tile(int values, int stage) const {
        return base + (values ? Shape::VALUES + stage * Shape::VALUE_TILE
                              : Shape::QUERIES * Shape::QUERY + stage * Shape::KEY_TILE);
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

// Named barriers: a warpgroup's permission to issue its GEMMs; a warpgroup's own.
constexpr int GEMM_ORDER = 1, OWN = 3;

// A thread's two rows (of its warp's 16, eight apart) on their way through the blocks of a tile.
template <typename S>
struct Rows {
    static constexpr int KEYS = S::KEYS;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // maximum, in powers of two; sum over this lane's keys
    float scale[2];                                  // of what was summed before the last block
    int sees[2];                                     // keys, less this lane's first of a block
    __device__ __forceinline__ Rows(const Work& work, const Tile<S>& tile, int r0) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            sees[i] = tile.before + work.group.quotient(tile.row0 + r0 + 8 * i) + 1 - 2 * (threadIdx.x & 3);
    }
    // Goes on from what an earlier launch kept.
    __device__ __forceinline__ void resume(const Work& work, const Tile<S>& tile, int r0) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float2 kept = work.a.heads[tile.place(work) + r0 + 8 * i];
            m[i] = kept.x, l[i] = (threadIdx.x & 3) ? 0.f : kept.y;
        }
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

template <typename T, typename S>
__device__ __forceinline__ void store_rows(const Work& work, const Tile<S>& tile, Rows<S>& rows,
                                           float (&o)[S::V / 2], int r0) {
    constexpr int V = S::V;
    const Args& a = work.a;
    const int t = threadIdx.x & 3, group = work.group.by, count = tile.item.end * group - tile.row0;
    const int64_t at = tile.place(work);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 1);
        rows.l[i] += __shfl_xor_sync(~0u, rows.l[i], 2);
        const int r = r0 + 8 * i;
        if (!tile.keeps) {
            const float inverse = 1.f / rows.l[i];
            const int pair = tile.row0 + r, token = tile.item.start + work.group.quotient(pair);
            T* out = static_cast<T*>(a.out) +
                     (static_cast<int64_t>(token) * a.h + tile.kv_head * group + work.group.rest(pair)) * V;
#pragma unroll
            for (int j = 0; j < V / 32; j++) {
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
            for (int j = 0; j < V / 8; j++)
                *reinterpret_cast<float2*>(a.sums + (at + r) * V + j * 8 + 2 * t) =
                    make_float2(o[4 * j + 2 * i], o[4 * j + 2 * i + 1]);
        }
    }
}

// A warpgroup's way through the tiles: one pipeline over the blocks of all of them. While a block's weighted
// values are added, the scores of the next one, maybe of the next tile, are made and weighed.
template <typename T, typename S>
struct Pipeline {
    static constexpr int KEYS = S::KEYS, STAGES = S::STAGES, GROUP = S::GROUP, V = S::V;
    const Work& work;
    const Places<S>& places;
    const int warpgroup = (threadIdx.x >> 7) - 1, lane = threadIdx.x & 31;
    const int r0 = warpgroup * 64 + (threadIdx.x >> 5 & 3) * 16 + lane / 4;  // of the tile; and r0 + 8
    int taken = 0;                                                           // blocks of keys
    float o[V / 2], s[KEYS / 2];
    uint32_t p[KEYS / 4];

    __device__ __forceinline__ void ask_scores(int n, int round) {  // n: of all blocks taken
        const uint64_t keys = wgmma_operand(places.tile(0, n % STAGES), GROUP);
        const uint64_t query =
            wgmma_operand(places.query(places.query_stage(round)) + warpgroup * 8 * GROUP, GROUP);
        mbarrier_wait(places.full(0, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < S::D / 16; k++)
            Wgmma<T, KEYS>::ss(s, query + (S::channel(k) >> 4), keys + (S::channel(k) >> 4), k > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void ask_outputs(int n) {
        const uint64_t values = wgmma_operand(places.tile(1, n % STAGES), GROUP, S::COLUMN);
        mbarrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
            Wgmma<T, V>::rs(o, p + 4 * k, values + (k * 2 * GROUP >> 4), true);
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
    // What a tile's outputs are before its first block: zeros, or what an earlier launch kept.
    __device__ __forceinline__ void start_outputs(const Tile<S>& tile, const Rows<S>& rows) {
#pragma unroll
        for (int i = 0; i < V / 2; i++) o[i] = 0;
        if (!S::ROUNDS || !tile.resumes) return;
        const float* kept = work.a.sums + (tile.place(work) + r0) * V + 2 * (lane & 3);
#pragma unroll
        for (int i = 0; i < V / 2; i++)
            o[i] = kept[(i >> 1 & 1) * 8 * V + (i >> 2) * 8 + (i & 1)] * rows.scale[i >> 1 & 1];
    }
    // Block n of all is a row's last: what lies behind its `held` tokens is not ours and may be NaN.
    __device__ __forceinline__ void clear_values(int n, int held) const {
        if (S::ROUNDS || held >= KEYS) return;  // expanded keys are followed by zeros
        mbarrier_wait(places.full(1, n % STAGES), n / STAGES & 1);
        for (int i = threadIdx.x & 127; i < (KEYS - held) * (V / 8); i += 128)
            store_shared16(places.tile(1, n % STAGES) + S::piece(held + i / (V / 8), i % (V / 8)),
                           make_uint4(0, 0, 0, 0));
        async_proxy_fence();
        named_wait<128>(OWN + warpgroup);
    }
    // A tile's first block, the last of its keys: its scores have been requested.
    template <int PENDING>
    __device__ __forceinline__ void begin(Rows<S>& rows, const Tile<S>& tile, int n, int round) {
        await_scores<PENDING>(n);
        if (tile.b1 - 1 == tile.b0) release(places.query_empty(places.query_stage(round)));
        rows.template weigh<true>(s, tile.b1 - 1, work.a.scale_log2);
    }
    // A later one.
    template <bool HIDES>
    __device__ __forceinline__ void step(Rows<S>& rows, const Tile<S>& tile, int block, int round) {
        ask_both(round);
        await_scores<1>(taken + 1);
        if (block == tile.b0) release(places.query_empty(places.query_stage(round)));
        rows.template weigh<HIDES>(s, block, work.a.scale_log2);
        await_outputs();
#pragma unroll
        for (int i = 0; i < V / 2; i++) o[i] *= rows.scale[i >> 1 & 1];
        keep_weights();
    }

    __device__ __forceinline__ void run() {
        if (!work.has(0)) return;
        if (warpgroup == 1) named_arrive<256>(GEMM_ORDER);
        Tile<S> tile(work, work.item(0), 0);
        Rows<S> rows(work, tile, r0);
        pdl_wait();
        pdl_launch();
        if (S::ROUNDS && tile.resumes) rows.resume(work, tile, r0);
        mbarrier_wait(places.query_full(0), 0);
        ask_scores(taken, 0);
        begin<0>(rows, tile, taken, 0);
        clear_values(taken, tile.item.context - (tile.b1 - 1) * KEYS);
        start_outputs(tile, rows);
        keep_weights();
        for (int round = 0;; round++) {
            const Item ahead = work.item(round + 1);
            const int shown = tile.full / KEYS;  // blocks that hide no key from any row
            int block = tile.b1 - 2;
            for (; block >= max(tile.b0, shown); block--) step<true>(rows, tile, block, round);
            for (; block >= tile.b0; block--) step<false>(rows, tile, block, round);
            if (!work.has(round + 1)) break;
            const Tile<S> next(work, ahead, round + 1);
            Rows<S> fresh(work, next, r0);
            if (S::ROUNDS && next.resumes) fresh.resume(work, next, r0);
            mbarrier_wait(places.query_full(places.query_stage(round + 1)), places.query_phase(round + 1));
            ask_both(round + 1);
            begin<1>(fresh, next, taken + 1, round + 1);
            await_outputs();
            store_rows<T, S>(work, tile, rows, o, r0);
            clear_values(taken, next.item.context - (next.b1 - 1) * KEYS);
            start_outputs(next, fresh);
            keep_weights();
            tile = next, rows = fresh;
        }
        ask_outputs(taken);
        await_outputs();
        store_rows<T, S>(work, tile, rows, o, r0);
        if (warpgroup == 0) named_wait<256>(GEMM_ORDER);  // the other one's last arrival
    }
};

// Makes the barriers, by one thread.
template <typename S>
__device__ __forceinline__ void make_barriers(const Places<S>& places) {
    for (int i = 0; i < 2 * S::STAGES; i++) {
        mbarrier_init(places.full(0, i), 1);
        mbarrier_init(places.empty(0, i), 8);  // the computing warps
    }
    for (int i = 0; i < S::QUERIES; i++) {
        mbarrier_init(places.query_full(i), S::QUERY_WRITERS);
        mbarrier_init(places.query_empty(i), 8);
    }
    mbarrier_init_fence();
}

}  // namespace attention
