// The second half of the chunked gated delta rule (chunk.cuh): the state from chunk to chunk.
//
// A block carries kSlice columns of one value head's state. All of its warps work on one chunk at a time, in
// three phases between barriers:
//   1. R = β V - β e^G K̂ S       a warp has 16 tokens and half of the columns
//   2. D = (I + A)^-1 R, and e^G Q̂ S, which does not depend on it
//   3. O = e^G Q̂ S + P D, and S ← e^G_last S + Σ_j e^(G_last - G_j) k̂_j d_j, of which a warp has 16 channels
// S stays in float32 registers; a copy in bf16 is the operand of the next chunk's products.
#pragma once
#include "chunk.cuh"

constexpr int kSlice = 32;  // columns
constexpr int kScanThreads = 256;

// What is loaded of a chunk. With several stages in shared memory, chunks are loaded ahead.
constexpr int kKeyTile = kChunk * kKeys * 2, kValueTile = kChunk * kSlice * 2;
constexpr int kBlock = 16 * 16 * 2, kSquareTile = 10 * kBlock;  // the blocks on and below the diagonal
constexpr int kStage = 2 * kKeyTile + 2 * kSquareTile + kValueTile + kChunk * 16;
// Behind the stages: S, R, D, and D times the weights of the update.
constexpr int kStateTile = kKeys * kSlice * 2, kWorkTiles = kStateTile + 3 * kValueTile;

struct Stage {
    uint32_t keys, queries, inverse, products, values;
    const float4* factors;
};
__device__ __forceinline__ Stage stage_at(char* base) {
    Stage s;
    s.keys = shared_address(base);
    s.queries = s.keys + kKeyTile;
    s.inverse = s.queries + kKeyTile;
    s.products = s.inverse + kSquareTile;
    s.values = s.products + kSquareTile;
    s.factors = reinterpret_cast<const float4*>(base + 2 * kKeyTile + 2 * kSquareTile + kValueTile);
    return s;
}

// Block (i, j) of a lower triangular matrix in blocks of 16x16.
__device__ __forceinline__ uint32_t block_at(uint32_t square, int i, int j) {
    return square + (i * (i + 1) / 2 + j) * kBlock;
}

__device__ __forceinline__ void load_stage(const Stage& s, const DeltaArgs<bf16>& a,
                                           const ChunkArgs<bf16>& chunks, int64_t first, int count,
                                           int head) {
    const bf16* query = query_at(a, first, head);
    load_keys<kScanThreads>(s.keys, query + a.key_heads * kKeys, a.channels, count);
    load_keys<kScanThreads>(s.queries, query, a.channels, count);
    {
        const int token = threadIdx.x / 4, unit = threadIdx.x % 4;
        const bool valid = token < count;
        const bf16* value = value_at(a, first + (valid ? token : 0), head) + blockIdx.x * kSlice;
        cp_async16(tile_at<4>(s.values, token, unit), value + unit * 8, valid);
    }
    const int64_t square = (first * a.heads + head) * kChunk, stride = static_cast<int64_t>(a.heads) * kChunk;
#pragma unroll
    for (int i = threadIdx.x; i < kChunk * 8; i += kScanThreads) {
        const int token = i / 8, unit = i % 8;
        if (unit / 2 > token / 16) continue;
        const bool valid = token < count;
        const int64_t at = square + (valid ? token * stride : 0) + unit * 8;
        const uint32_t to = tile_at<2>(block_at(0, token / 16, unit / 2), token % 16, unit % 2);
        cp_async16(s.inverse + to, chunks.inverse + at, valid);
        cp_async16(s.products + to, chunks.products + at, valid);
    }
    if (threadIdx.x < kChunk) {
        const bool valid = threadIdx.x < count;
        cp_async16(shared_address(s.factors + threadIdx.x),
                   chunks.factors + (first + (valid ? threadIdx.x : 0)) * a.heads + head, valid);
    }
}

using Fragment = uint32_t[4];  // a 16x16 operand of mma, or two operands of 16x8

// sums[16x16] += a[16x16] · b[16x16]; b as ldmatrix4_trans reads it from rows.
__device__ __forceinline__ void mma_two(float (&left)[4], float (&right)[4], const Fragment& a,
                                        const Fragment& b) {
    mma<bf16>(left, a[0], a[1], a[2], a[3], b[0], b[1]);
    mma<bf16>(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

// sums[16 tokens x 16 columns] += tokens[16 x 128 channels] · state. A tile of tokens has 64 rows.
__device__ __forceinline__ void times_state(float (&sums)[2][4], uint32_t tokens, int first,
                                            const Fragment (&state)[8]) {
    const int lane = threadIdx.x & 31;
    float odd[2][4] = {};  // two chains of sums are done sooner than one of twice the length
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
        Fragment even_tokens, odd_tokens;
        ldmatrix4(even_tokens, tile_at<16>(tokens, first + lane % 16, 2 * c + lane / 16));
        ldmatrix4(odd_tokens, tile_at<16>(tokens, first + lane % 16, 2 * c + 2 + lane / 16));
        mma_two(sums[0], sums[1], even_tokens, state[c]);
        mma_two(odd[0], odd[1], odd_tokens, state[c + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[n][e] += odd[n][e];
}

// sums[16 tokens of block row i x 16 columns] += square[i, j ≤ i] · x[64 tokens x columns from 16 `half` on].
__device__ __forceinline__ void times_square(float (&sums)[2][4], uint32_t square, int i, uint32_t x,
                                             int half) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (j > i) continue;
        Fragment factors, b;
        ldmatrix4(factors, tile_at<2>(block_at(square, i, j), lane % 16, lane / 16));
        ldmatrix4_trans(b, tile_at<4>(x, 16 * j + lane % 16, 2 * half + lane / 16));
        mma_two(sums[0], sums[1], factors, b);
    }
}

// The sums of 16 tokens and 16 columns, each token's times a factor, into a tile of 64 tokens.
__device__ __forceinline__ void store_tokens(char* tile, const float (&sums)[2][4], int first, int half,
                                             float top, float bottom) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float (&v)[4] = sums[n];
        const uint32_t unit = 2 * half + n;
        *reinterpret_cast<uint32_t*>(tile + tile_at<4>(0, first + g, unit) + 4 * t) =
            pack2<bf16>(v[0] * top, v[1] * top);
        *reinterpret_cast<uint32_t*>(tile + tile_at<4>(0, first + g + 8, unit) + 4 * t) =
            pack2<bf16>(v[2] * bottom, v[3] * bottom);
    }
}

// Sums of 16 channels from 16 `warp` on and kSlice columns: tile n has columns 8 n + 2 t, as mma lays them
// out.
using StateSums = float[kSlice / 8][4];

// s ← decay s + keysᵀ · x, where x[64 tokens x kSlice] has the tokens' weights in it.
__device__ __forceinline__ void update(StateSums& s, float decay, uint32_t keys, uint32_t x, int warp) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < kSlice / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] *= decay;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        Fragment channels;
        ldmatrix4_trans(channels,
                        tile_at<16>(keys, 16 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
        for (int n = 0; n < kSlice / 16; n++) {
            Fragment b;
            ldmatrix4_trans(b, tile_at<4>(x, 16 * j + lane % 16, 2 * n + lane / 16));
            mma_two(s[2 * n], s[2 * n + 1], channels, b);
        }
    }
}

// Where a warp's part of a head's state lies in the pool.
struct StatePlace {
    int64_t at, row;  // of channel 16 warp + g and column 2 t, and elements from a channel to the next
};
__device__ __forceinline__ float2 load_two(const float* p) {
    return *reinterpret_cast<const float2*>(p);
}
__device__ __forceinline__ float2 load_two(const bf16* p) {
    return unpack2<bf16>(*reinterpret_cast<const uint32_t*>(p));
}
__device__ __forceinline__ void store_two(float* p, float x, float y) {
    *reinterpret_cast<float2*>(p) = make_float2(x, y);
}
__device__ __forceinline__ void store_two(bf16* p, float x, float y) {
    *reinterpret_cast<uint32_t*>(p) = pack2<bf16>(x, y);
}
template <typename S>
__device__ __forceinline__ void load_state(StateSums& s, const S* entry, const StatePlace& place) {
#pragma unroll
    for (int n = 0; n < kSlice / 8; n++) {
        const float2 top = load_two(entry + place.at + 8 * n);
        const float2 bottom = load_two(entry + place.at + 8 * place.row + 8 * n);
        s[n][0] = top.x;
        s[n][1] = top.y;
        s[n][2] = bottom.x;
        s[n][3] = bottom.y;
    }
}
template <typename S>
__device__ __forceinline__ void store_state(S* entry, const StatePlace& place, const StateSums& s) {
#pragma unroll
    for (int n = 0; n < kSlice / 8; n++) {
        store_two(entry + place.at + 8 * n, s[n][0], s[n][1]);
        store_two(entry + place.at + 8 * place.row + 8 * n, s[n][2], s[n][3]);
    }
}
// The state as the operand of products: rows are channels.
__device__ __forceinline__ void store_operand(char* tile, const StateSums& s, int warp) {
    const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kSlice / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            *reinterpret_cast<uint32_t*>(tile + tile_at<4>(0, 16 * warp + 8 * half + g, n) + 4 * t) =
                pack2<bf16>(s[n][2 * half], s[n][2 * half + 1]);
}

// One row of the step, by all warps of the block.
template <typename S>
__device__ __forceinline__ void scan_row(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks,
                                         const Row& row) {
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4, head = blockIdx.y;
    // Warps w and 7 - w share a scheduler's tensor core: blocks of the triangles are as many for each.
    const int quarter = warp < 4 ? warp : 7 - warp, half = warp / 4, first_token = 16 * quarter;
    const int64_t out_stride = static_cast<int64_t>(a.heads) * a.value_dim;
    bf16* out = a.out + row.first * out_stride + head * a.value_dim + blockIdx.x * kSlice;
    if (row.id < 0) {
        for (int i = threadIdx.x; i < row.count * 4; i += kScanThreads)
            store(out + i / 4 * out_stride + i % 4 * 8, Vec<bf16, 8>{});
        return;
    }
    char* const state_tile = shared + chunks.stages * kStage;
    char *const rest_tile = state_tile + kStateTile, *const d_tile = rest_tile + kValueTile;
    char* const weighted_tile = d_tile + kValueTile;
    const StatePlace place = {
        (static_cast<int64_t>(head) * kKeys + 16 * warp + g) * a.value_dim + blockIdx.x * kSlice + 2 * t,
        a.value_dim};
    S* const pool = states_of<S>(a);
    StateSums s = {};
    if (!row.fresh) load_state(s, pool + row.id * a.entry, place);

    const int num_chunks = (row.count + kChunk - 1) / kChunk, ahead = chunks.stages - 1;
    const auto load_chunk = [&](int chunk) {
        if (chunk < num_chunks)
            load_stage(stage_at(shared + chunk % chunks.stages * kStage), a, chunks,
                       row.first + chunk * kChunk, min(kChunk, row.count - chunk * kChunk), head);
        cp_async_commit();
    };
    __syncthreads();  // all have done with the row before
    for (int chunk = 0; chunk < ahead; chunk++) load_chunk(chunk);
    store_operand(state_tile, s, warp);

#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; chunk++) {
        const Stage stage = stage_at(shared + chunk % chunks.stages * kStage);
        const int64_t first = row.first + chunk * kChunk;
        const int count = min(kChunk, row.count - chunk * kChunk);
        if (ahead == 0) {
            __syncthreads();  // the only stage is free
            load_chunk(chunk);
        }
        if (ahead == 2)
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        __syncthreads();  // the chunk and the state are there, and the chunk before is done with
        if (ahead > 0) load_chunk(chunk + ahead);

        // Phase 1. This thread's tokens are first_token + g and first_token + g + 8.
        Fragment state[8];
#pragma unroll
        for (int c = 0; c < 8; c++)
            ldmatrix4_trans(state[c],
                            tile_at<4>(shared_address(state_tile), 16 * c + lane % 16, 2 * half + lane / 16));
        float x[2][4] = {};
        times_state(x, stage.keys, first_token, state);
        const float4 f[2] = {stage.factors[first_token + g], stage.factors[first_token + g + 8]};
        const float decays[2] = {expf(f[0].x), expf(f[1].x)};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 v = unpack2<bf16>(*reinterpret_cast<const uint32_t*>(
                    shared +
                    (tile_at<4>(stage.values, first_token + g + 8 * r, 2 * half + n) -
                     shared_address(shared)) +
                    4 * t));
                const float by = decays[r] * f[r].z;
                x[n][2 * r] = f[r].y * (v.x - by * x[n][2 * r]);
                x[n][2 * r + 1] = f[r].y * (v.y - by * x[n][2 * r + 1]);
            }
        store_tokens(rest_tile, x, first_token, half, 1.f, 1.f);
        __syncthreads();

        // Phase 2.
        float d[2][4] = {}, o[2][4] = {};
        times_square(d, stage.inverse, quarter, shared_address(rest_tile), half);
        store_tokens(d_tile, d, first_token, half, 1.f, 1.f);
        times_state(o, stage.queries, first_token, state);

        // Phase 3, up to each token whose state is kept and then up to the last one.
        const auto weigh = [&](int token) {
            const float sum = stage.factors[token].x;
            const auto weight = [&](int i, const float4& by) {
                return i <= token ? expf(sum - by.x) * by.z : 0.f;
            };
            store_tokens(weighted_tile, d, first_token, half, weight(first_token + g, f[0]),
                         weight(first_token + g + 8, f[1]));
            __syncthreads();
            return expf(sum);
        };
#pragma unroll 1
        for (int part = 0; part < kChunk; part += 32) {
            const int mine = part + lane < count - 1 ? a.rows.saves[first + part + lane] : -1;
            for (unsigned wanted = __ballot_sync(~0u, mine >= 0); wanted != 0; wanted &= wanted - 1) {
                const int bit = __ffs(wanted) - 1;
                const float decay = weigh(part + bit);
                StateSums kept;
#pragma unroll
                for (int n = 0; n < kSlice / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) kept[n][e] = s[n][e];
                update(kept, decay, stage.keys, shared_address(weighted_tile), warp);
                store_state(pool + __shfl_sync(~0u, mine, bit) * a.entry, place, kept);
                __syncthreads();  // the weighted tile is free
            }
        }
        const float decay = weigh(count - 1);
        update(s, decay, stage.keys, shared_address(weighted_tile), warp);
        store_operand(state_tile, s, warp);
        if (const int save = a.rows.saves[first + count - 1]; save >= 0)
            store_state(pool + save * a.entry, place, s);

#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[n][e] *= decays[e / 2] * f[e / 2].w;
        times_square(o, stage.products, quarter, shared_address(d_tile), half);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (first_token + g + 8 * r < count)
                    *reinterpret_cast<uint32_t*>(
                        out + (chunk * kChunk + first_token + g + 8 * r) * out_stride + 16 * half + 8 * n +
                        2 * t) = pack2<bf16>(o[n][2 * r], o[n][2 * r + 1]);
    }
    store_state(pool + row.id * a.entry, place, s);
}

// Blocks of (slices of columns, value heads, some rows): rows of several tokens are dealt out in turn.
template <typename S>
__device__ __forceinline__ void delta_chunk_scan(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks) {
    const int lane = threadIdx.x & 31;
    pdl_wait();
    pdl_launch();
    unsigned number = 0;
    for (int base = 0; base < chunks.num_rows; base += 32) {
        const bool several = base + lane < chunks.num_rows && a.rows.lens[base + lane] >= 2;
        for (unsigned mask = __ballot_sync(~0u, several); mask != 0; mask &= mask - 1)
            if (number++ % gridDim.z == blockIdx.z)
                scan_row<S>(a, chunks, row_at(a.rows, base + __ffs(mask) - 1));
    }
}
