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

// Where a thread's part of a row's first chunk lies, and how it is copied. Chunks follow each other at even
// distances, so a copy takes an addition and an instruction.
struct ChunkLoader {
    const bf16 *keys, *values, *inverse, *products;
    const float4* factors;
    int64_t token_stride, square_stride, factor_stride;  // elements from a token to the next
    int64_t to_queries;                                  // from a key head's keys to its queries
    uint32_t key_at, value_at, square_at[2];             // in a stage's tiles
    bool takes_square[2];

    __device__ __forceinline__ ChunkLoader(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks,
                                           int64_t first, int head) {
        const int thread = threadIdx.x;
        token_stride = a.channels, factor_stride = a.heads, square_stride = factor_stride * kChunk;
        to_queries = -static_cast<int64_t>(a.key_heads) * kKeys;
        keys = ::query_at(a, first + thread / 16, head) - to_queries + thread % 16 * 8;
        values = ::value_at(a, first + thread / 4, head) + blockIdx.x * kSlice + thread % 4 * 8;
        const int64_t square = ((first + thread / 8) * a.heads + head) * kChunk + thread % 8 * 8;
        inverse = chunks.inverse + square;
        products = chunks.products + square;
        factors = chunks.factors + (first + thread) * a.heads + head;
        key_at = tile_at<16>(0, thread / 16, thread % 16);
        value_at = tile_at<4>(0, thread / 4, thread % 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = thread / 8 + 32 * i, unit = thread % 8;
            takes_square[i] = unit / 2 <= token / 16;
            square_at[i] = tile_at<2>(block_at(0, token / 16, unit / 2), token % 16, unit % 2);
        }
    }

    // Issues the copies of the chunk that the pointers are at, of `count` tokens, and goes on to the next.
    __device__ __forceinline__ void load(const Stage& s, int count) {
        if (count == kChunk)
            load_tokens<true>(s, count);
        else
            load_tokens<false>(s, count);
        keys += kChunk * token_stride;
        values += kChunk * token_stride;
        inverse += kChunk * square_stride;
        products += kChunk * square_stride;
        factors += kChunk * factor_stride;
    }

    // WHOLE: there are 64. Else tokens from `count` on become zeros.
    template <bool WHOLE>
    __device__ __forceinline__ void load_tokens(const Stage& s, int count) const {
        const int thread = threadIdx.x;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool valid = WHOLE || thread / 16 + 16 * i < count;
            const bf16* const key = keys + (valid ? 16 * i * token_stride : -(thread / 16) * token_stride);
            const uint32_t to = key_at + 16 * 16 * 16 * i;  // 16 tokens on, with the same swizzle
            cp_async16(s.keys + to, key, valid);
            cp_async16(s.queries + to, key + to_queries, valid);
        }
        {
            const bool valid = WHOLE || thread / 4 < count;
            cp_async16(s.values + value_at, valid ? values : values - thread / 4 * token_stride, valid);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!takes_square[i]) continue;
            const bool valid = WHOLE || thread / 8 + 32 * i < count;
            const int64_t at = valid ? 32 * i * square_stride : -(thread / 8) * square_stride;
            cp_async16(s.inverse + square_at[i], inverse + at, valid);
            cp_async16(s.products + square_at[i], products + at, valid);
        }
        if (thread < kChunk) {
            const bool valid = WHOLE || thread < count;
            const float4* const factor = valid ? factors : factors - thread * factor_stride;
            cp_async16(shared_address(s.factors + thread), factor, valid);
        }
    }
};

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
    ChunkLoader loader(a, chunks, row.first, head);
    int loaded = 0, free_stage = 0,
        used_stage = 0;  // chunks; the stages of the next chunk to load and to use
    const auto load_chunk = [&] {
        if (loaded < num_chunks)
            loader.load(stage_at(shared + free_stage * kStage), min(kChunk, row.count - loaded * kChunk));
        cp_async_commit();
        loaded++;
        free_stage = free_stage + 1 == chunks.stages ? 0 : free_stage + 1;
    };
    __syncthreads();  // all have done with the row before
    for (int chunk = 0; chunk < ahead; chunk++) load_chunk();
    store_operand(state_tile, s, warp);

#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; chunk++) {
        const Stage stage = stage_at(shared + used_stage * kStage);
        used_stage = used_stage + 1 == chunks.stages ? 0 : used_stage + 1;
        const int64_t first = row.first + chunk * kChunk;
        const int count = min(kChunk, row.count - chunk * kChunk);
        if (ahead == 0) {
            __syncthreads();  // the only stage is free
            load_chunk();
        }
        if (ahead == 2)
            cp_async_wait<1>();
        else
            cp_async_wait<0>();
        __syncthreads();  // the chunk and the state are there, and the chunk before is done with
        // Requested before it is wanted: for each token, where the state after it is to be saved.
        int saves[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            saves[i] = 32 * i + lane < count ? a.rows.saves[first + 32 * i + lane] : -1;

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
        if (ahead > 0) load_chunk();  // here nothing waits for it

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
        const int last_save = __shfl_sync(~0u, count > 32 ? saves[1] : saves[0], (count - 1) % 32);
        const int before_last[2] = {lane < count - 1 ? saves[0] : -1, 32 + lane < count - 1 ? saves[1] : -1};
#pragma unroll 1
        for (int part = 0; part < 2; part++) {
            const int mine = part == 0 ? before_last[0] : before_last[1];
            for (unsigned wanted = __ballot_sync(~0u, mine >= 0); wanted != 0; wanted &= wanted - 1) {
                const int bit = __ffs(wanted) - 1;
                const float decay = weigh(32 * part + bit);
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
        if (last_save >= 0) store_state(pool + last_save * a.entry, place, s);

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
