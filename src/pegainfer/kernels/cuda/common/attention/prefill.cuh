// Causal attention of rows with several query tokens over their pages, those of an earlier chunk included.
//
// A block takes a tile of 16 WARPS (token, head) pairs of one KV head's group: consecutive query heads of a
// token are consecutive rows, so that short chunks still fill the tile and share their keys. Each warp owns
// 16 rows; keys and values pass through two stages of shared memory while the tensor cores work on the other.
#pragma once
#include "attention.cuh"

namespace attention {

template <int D, int BYTES = 2>  // bytes an element of the cache
struct PrefillShape {
    static constexpr int WARPS = D == 256 ? 4 : 8;
    static constexpr int KEYS = D == 256 ? 32 : 64;  // a stage
    static constexpr int ROWS = WARPS * 16, THREADS = WARPS * 32;
    static constexpr int QUERY = ROWS * D * 2, TILE = KEYS * D * BYTES;  // bytes
    static constexpr int SHARED = QUERY + 4 * TILE;
    static constexpr bool HOLD_Q = D <= 128;  // in registers for the whole tile
};

// How 16-bit queries, keys and values become operands, and which channels outputs stand for.
template <typename T, typename C, int D>
struct Tiles {
    using Product = T;
    // Piece c (of 8 channels) of a query, to its row of the tile at `query`.
    static __device__ __forceinline__ void load_query(uint32_t query, int r, int c, const T* from,
                                                      bool valid) {
        cp_async16(query + piece<D>(r, c), from + c * 8, valid);
    }
    // Keys 16 n and on: the operands of 16 channels from 16 k on, for the first and the last eight keys.
    static __device__ __forceinline__ void load_keys(uint32_t (&r)[4], uint32_t keys, int n, int k) {
        const int lane = threadIdx.x & 31;
        ldmatrix4(r, keys + piece<D>(n * 16 + (lane >> 4) * 8 + (lane & 7), 2 * k + ((lane >> 3) & 1)));
    }
    // Values of tokens 16 n and on: likewise of two eights of the channels from 16 d on.
    static __device__ __forceinline__ void load_values(uint32_t (&r)[4], uint32_t values, int n, int d) {
        const int lane = threadIdx.x & 31;
        ldmatrix4_trans(r,
                        values + piece<D>(n * 16 + ((lane >> 3) & 1) * 8 + (lane & 7), 2 * d + (lane >> 4)));
    }
    // Of outputs x (first eight) and y (last eight) of such 16 channels, which of them a lane has: to shared
    // memory in T, or to sums.
    static __device__ __forceinline__ void store_shared(uint32_t row, int r, int d, float2 x, float2 y) {
        const int t = threadIdx.x & 3;
        store_shared4(row + piece<D>(r, 2 * d) + t * 4, pack2<T>(x.x, x.y));
        store_shared4(row + piece<D>(r, 2 * d + 1) + t * 4, pack2<T>(y.x, y.y));
    }
    static __device__ __forceinline__ void store_sums(float* sums, int d, float2 x, float2 y) {
        float* to = sums + 16 * d + 2 * (threadIdx.x & 3);
        *reinterpret_cast<float2*>(to) = x, *reinterpret_cast<float2*>(to + 8) = y;
    }
};

template <typename T, typename C, int D>
__device__ __forceinline__ void prefill(const Args& a) {
    using Shape = PrefillShape<D, sizeof(C)>;
    using Operands = Tiles<T, C, D>;
    using P = typename Operands::Product;
    constexpr int KEYS = Shape::KEYS, ROWS = Shape::ROWS, TILE = Shape::TILE, PIECES = D / 8;
    constexpr int ROW = D * sizeof(C), CACHE_PIECES = ROW / 16, PIECE = 16 / sizeof(C);
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t query = shared_address(shared), stages = query + Shape::QUERY;
    pdl_wait();
    pdl_launch();

    const int group = a.h / a.g, total = a.plan->prefill * a.g;
    for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
        const Item item = load_item(a.items + unit / a.g);
        const int kv_head = unit % a.g;
        const int context = item.context, len = item.end, start = item.start, row0 = item.tile * ROWS;
        const int last_token = min(len - 1, (row0 + ROWS - 1) / group);
        const int before = context - len;            // keys that every query of the row sees
        const int keys = before + last_token + 1;    // that the tile's last query sees
        const int full = before + row0 / group + 1;  // that its first query sees
        const int blocks = (keys + KEYS - 1) / KEYS;
        const int b0 = blocks * item.part() / item.parts(), b1 = blocks * (item.part() + 1) / item.parts();
        const int* table = a.block_table + static_cast<int64_t>(item.row) * a.table_width;
        const C* kv = static_cast<const C*>(a.kv) + static_cast<int64_t>(kv_head) * a.block_size * D;
        const int64_t values = static_cast<int64_t>(a.g) * a.block_size * D;

        auto fetch = [&](int block) {
            if (block < b1) {
                const uint32_t to = stages + (block & 1) * 2 * TILE;
#pragma unroll
                for (int i = threadIdx.x; i < KEYS * CACHE_PIECES; i += Shape::THREADS) {
                    const int r = i / CACHE_PIECES, c = i % CACHE_PIECES, key = block * KEYS + r;
                    const bool valid = key < keys;  // what lies behind is not ours and may be NaN
                    const C* from = kv;
                    if (valid)
                        from += table[key / a.block_size] * a.page_stride +
                                static_cast<int64_t>(key % a.block_size) * D + c * PIECE;
                    cp_async16(to + piece_of<ROW>(r, c), from, valid);
                    cp_async16(to + TILE + piece_of<ROW>(r, c), from + values, valid);
                }
            }
            cp_async_commit();
        };
        for (int i = threadIdx.x; i < ROWS * PIECES; i += Shape::THREADS) {
            const int r = i / PIECES, c = i % PIECES, token = (row0 + r) / group, head = (row0 + r) % group;
            const bool valid = token < len;
            const T* from = static_cast<const T*>(a.q);
            if (valid) from += ((static_cast<int64_t>(start) + token) * a.h + kv_head * group + head) * D;
            Operands::load_query(query, r, c, from, valid);
        }
        fetch(b0);
        const uint32_t q_rows = query + warp * 16 * D * 2;
        uint32_t qf[Shape::HOLD_Q ? D / 16 : 1][4];
        if constexpr (Shape::HOLD_Q) {
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll
            for (int k = 0; k < D / 16; k++)
                ldmatrix4(qf[k], q_rows + piece<D>(lane & 15, 2 * k + (lane >> 4)));
        }

        float o[D / 8][4] = {};
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // of rows g and g + 8; l of this lane's keys
        int sees[2];                                     // keys that these rows see
#pragma unroll
        for (int i = 0; i < 2; i++) sees[i] = before + (row0 + warp * 16 + g + 8 * i) / group + 1;
        for (int block = b0; block < b1; block++) {
            cp_async_wait<0>();
            __syncthreads();  // the stage is there, and the other one has been read by all
            fetch(block + 1);
            const uint32_t keys_at = stages + (block & 1) * 2 * TILE, values_at = keys_at + TILE;
            float s[KEYS / 8][4] = {};
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                uint32_t q[4];
                if constexpr (!Shape::HOLD_Q) ldmatrix4(q, q_rows + piece<D>(lane & 15, 2 * k + (lane >> 4)));
                uint32_t (&qk)[4] = Shape::HOLD_Q ? qf[Shape::HOLD_Q ? k : 0] : q;
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    uint32_t r[4];
                    Operands::load_keys(r, keys_at, n, k);
                    mma<P>(s[2 * n], qk[0], qk[1], qk[2], qk[3], r[0], r[1]);
                    mma<P>(s[2 * n + 1], qk[0], qk[1], qk[2], qk[3], r[2], r[3]);
                }
            }
            if (block * KEYS + KEYS > full) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (block * KEYS + n * 8 + 2 * t + (i & 1) >= sees[i >> 1]) s[n][i] = -INFINITY;
            }
            float scale[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float top = -INFINITY;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                top = fmaxf(m[i], top * a.scale_log2);
                const float base = top == -INFINITY ? 0.f : top;  // a row that has seen no key yet
                scale[i] = exp2_fast(m[i] - base);
                m[i] = top;
                float sum = 0;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int j = 2 * i; j < 2 * i + 2; j++) {
                        s[n][j] = exp2_fast(fmaf(s[n][j], a.scale_log2, -base));
                        sum += s[n][j];
                    }
                l[i] = l[i] * scale[i] + sum;
            }
#pragma unroll
            for (int d = 0; d < D / 8; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[d][i] *= scale[i >> 1];
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                const uint32_t p0 = pack2<P>(s[2 * n][0], s[2 * n][1]),
                               p1 = pack2<P>(s[2 * n][2], s[2 * n][3]);
                const uint32_t p2 = pack2<P>(s[2 * n + 1][0], s[2 * n + 1][1]);
                const uint32_t p3 = pack2<P>(s[2 * n + 1][2], s[2 * n + 1][3]);
#pragma unroll
                for (int d = 0; d < D / 16; d++) {
                    uint32_t r[4];
                    Operands::load_values(r, values_at, n, d);
                    mma<P>(o[2 * d], p0, p1, p2, p3, r[0], r[1]);
                    mma<P>(o[2 * d + 1], p0, p1, p2, p3, r[2], r[3]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            l[i] += __shfl_xor_sync(~0u, l[i], 1);
            l[i] += __shfl_xor_sync(~0u, l[i], 2);
        }

        cp_async_wait<0>();
        __syncthreads();
        auto row_out = [&](int r) {  // of the tile
            const int token = (row0 + r) / group;
            return static_cast<T*>(a.out) +
                   ((static_cast<int64_t>(start) + token) * a.h + kv_head * group + (row0 + r) % group) * D;
        };
        const int rows = min(ROWS, len * group - row0);
        if constexpr (sizeof(C) == 1)
#pragma unroll
            for (int d = 0; d < D / 8; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[d][i] *= a.v_scale;
        auto pair = [&](int d, int i, float by) {
            return make_float2(o[d][2 * i] * by, o[d][2 * i + 1] * by);
        };
        if (item.slot < 0) {
            // Through shared memory, where the queries were, so that rows leave in whole lines.
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float inverse = 1.f / l[i];
#pragma unroll
                for (int d = 0; d < D / 16; d++)
                    Operands::store_shared(q_rows, g + 8 * i, d, pair(2 * d, i, inverse),
                                           pair(2 * d + 1, i, inverse));
            }
            __syncwarp();
            for (int i = lane; i < 16 * PIECES; i += 32) {
                const int r = i / PIECES, c = i % PIECES;
                if (warp * 16 + r < rows)
                    *reinterpret_cast<uint4*>(row_out(warp * 16 + r) + c * 8) =
                        load_shared16(q_rows + piece<D>(r, c));
            }
        } else {
            const int64_t at = (static_cast<int64_t>(item.slot + item.part()) * a.g + kv_head) * ROWS;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = warp * 16 + g + 8 * i;
                if (r >= rows) continue;
                if (t == 0) a.heads[at + r] = make_float2(m[i], l[i]);
#pragma unroll
                for (int d = 0; d < D / 16; d++)
                    Operands::store_sums(a.sums + (at + r) * D, d, pair(2 * d, i, 1.f),
                                         pair(2 * d + 1, i, 1.f));
            }
        }
        __syncthreads();
    }
}

}  // namespace attention

#define PREFILL_KERNEL(TYPE, T, C, D)                                                    \
    extern "C" __global__ void __launch_bounds__(attention::PrefillShape<D>::THREADS, 1) \
        attention_prefill_##TYPE##_d##D(attention::Args a) {                             \
        attention::prefill<T, C, D>(a);                                                  \
    }
