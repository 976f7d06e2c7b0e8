// The gated delta rule of rows of several tokens by chunks of 64 tokens, with bf16 tensor cores.
//
// For a chunk that starts from state S, let G_i be the sum of g up to token i, and k̂, q̂ the normalised keys
// and queries (q̂ scaled by K^-1/2):
//   (I + A) D = β (V - e^G K̂ S)          A_ij = β_i e^(G_i - G_j) k̂_i·k̂_j for j < i
//   O = e^G Q̂ S + P D                    P_ij = e^(G_i - G_j) q̂_i·k̂_j for j ≤ i
//   S ← e^G_last S + Σ_j e^(G_last - G_j) k̂_j d_j
// delta_chunk_prepare computes (I + A)^-1 and P of all chunks side by side. delta_chunk_scan then carries the
// state from chunk to chunk. The state and all sums stay in float32; factors of a GEMM are rounded to bf16.
#pragma once
#include "delta.cuh"

constexpr int kChunk = 64;            // tokens
constexpr int kSlice = 32;            // columns of the state that a block of the scan carries
constexpr int kScanThreads = 64;      // 16 columns a warp
constexpr int kPrepareThreads = 128;  // 16 tokens a warp
constexpr int kHeadsAtOnce = 2;       // value heads whose matrices a block inverts side by side
constexpr int kPitch = kChunk + 4;    // floats from a row of A to the next; keeps rows on 16 bytes

// Address of 16 bytes, number `unit` of a row of UNITS times 16 bytes, in a tile whose rows are permuted so
// that ldmatrix reads eight rows without bank conflicts.
template <int UNITS>
__device__ __forceinline__ uint32_t tile_at(uint32_t tile, int row, int unit) {
    constexpr int kRowsPerLine = UNITS < 8 ? 8 / UNITS : 1;  // a line is 128 bytes: all banks once
    return tile + (row * UNITS + (unit ^ (row / kRowsPerLine % min(UNITS, 8)))) * 16;
}

// 64 tokens of a key head: 16 units of 16 bytes a token; zeros from `count` on.
template <int THREADS>
__device__ __forceinline__ void load_keys(uint32_t tile, const bf16* from, int64_t stride, int count) {
#pragma unroll 4
    for (int i = threadIdx.x; i < kChunk * 16; i += THREADS) {
        const int token = i / 16, unit = i % 16;
        const bool valid = token < count;
        cp_async16(tile_at<16>(tile, token, unit), from + (valid ? token * stride : 0) + unit * 8, valid);
    }
}

// Shared memory of the prepare kernel: K and Q, whose room the matrices A take over; then G and β of the
// value heads at work, and the reciprocal lengths.
constexpr int kPrepareTiles = kHeadsAtOnce * kChunk * kPitch * 4;
constexpr int kPrepareShared = kPrepareTiles + (2 * kHeadsAtOnce + 2) * kChunk * 4;
static_assert(kPrepareTiles >= 2 * kChunk * kKeys * 2);

// (I + A)^-1 by columns: thread j solves (I + A) x = e_j by forward substitution in float32.
__device__ __forceinline__ void invert_column(float (&x)[kChunk], const float* matrix, int column) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
        float4 sum{};
#pragma unroll
        for (int j = 0; j < i; j += 4) {  // x[i] and what follows are still zero
            const float4 a = *reinterpret_cast<const float4*>(matrix + i * kPitch + j);
            sum.x = fmaf(a.x, x[j], sum.x);
            sum.y = fmaf(a.y, x[j + 1], sum.y);
            sum.z = fmaf(a.z, x[j + 2], sum.z);
            sum.w = fmaf(a.w, x[j + 3], sum.w);
        }
        x[i] = (i == column ? 1.f : 0.f) - ((sum.x + sum.y) + (sum.z + sum.w));
    }
}

// Blocks of (chunks, key heads). All threads of the block work on one chunk at a time.
__device__ __forceinline__ void delta_chunk_prepare(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks) {
    extern __shared__ __align__(128) char shared[];
    float* matrices = reinterpret_cast<float*>(shared);
    float* sums = reinterpret_cast<float*>(shared + kPrepareTiles);  // G
    float* betas = sums + kHeadsAtOnce * kChunk;
    float* key_scale = betas + kHeadsAtOnce * kChunk;
    float* query_scale = key_scale + kChunk;
    const uint32_t keys = shared_address(shared), queries = keys + kChunk * kKeys * 2;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4;
    const int key_head = blockIdx.y, group = a.heads / a.key_heads;
    pdl_wait();
    pdl_launch();
    for (int index = blockIdx.x;; index += gridDim.x) {
        const Tile at = find_tile(a.rows.lens, chunks.num_rows, index, kChunk, 2);
        if (at.row < 0) return;
        const Row row = row_at(a.rows, at.row);
        if (row.id < 0) continue;
        const int64_t first = row.first + at.tile * kChunk;
        const int count = min(kChunk, row.count - at.tile * kChunk);
        __syncthreads();  // all have done with the chunk before
        const bf16* query = a.qkv + first * a.channels + key_head * kKeys;
        load_keys<kPrepareThreads>(queries, query, a.channels, count);
        load_keys<kPrepareThreads>(keys, query + a.key_heads * kKeys, a.channels, count);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();

        // Two threads a token sum its squares.
        {
            const int token = threadIdx.x / 2;
            float kk = 0, qq = 0;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int unit = i * 2 + threadIdx.x % 2;
                const uint4 k = load_shared16(tile_at<16>(keys, token, unit));
                const uint4 q = load_shared16(tile_at<16>(queries, token, unit));
                const uint32_t ks[4] = {k.x, k.y, k.z, k.w}, qs[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 kv = unpack2<bf16>(ks[j]), qv = unpack2<bf16>(qs[j]);
                    kk = fmaf(kv.x, kv.x, fmaf(kv.y, kv.y, kk));
                    qq = fmaf(qv.x, qv.x, fmaf(qv.y, qv.y, qq));
                }
            }
            kk += __shfl_xor_sync(~0u, kk, 1);
            qq += __shfl_xor_sync(~0u, qq, 1);
            if (threadIdx.x % 2 == 0) {
                key_scale[token] = token < count ? 1.f / sqrtf(kk + a.eps) : 0.f;
                query_scale[token] = token < count ? a.scale / sqrtf(qq + a.eps) : 0.f;
            }
        }
        // K Kᵀ and Q Kᵀ of this warp's 16 tokens with those up to the last of them.
        float kk[8][4] = {}, qk[8][4] = {};
        const int own = warp * 16;
#pragma unroll
        for (int c = 0; c < kKeys / 16; c++) {
            uint32_t ka[4], qa[4];
            ldmatrix4(ka, tile_at<16>(keys, own + lane % 16, 2 * c + lane / 16));
            ldmatrix4(qa, tile_at<16>(queries, own + lane % 16, 2 * c + lane / 16));
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n > warp) continue;
                uint32_t b[4];
                ldmatrix4(b, tile_at<16>(keys, n * 16 + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    mma<bf16>(kk[2 * n + half], ka[0], ka[1], ka[2], ka[3], b[2 * half], b[2 * half + 1]);
                    mma<bf16>(qk[2 * n + half], qa[0], qa[1], qa[2], qa[3], b[2 * half], b[2 * half + 1]);
                }
            }
        }

        for (int begin = 0; begin < group; begin += kHeadsAtOnce) {
            __syncthreads();  // K and Q, or the matrices before, are read
            const int heads = min(kHeadsAtOnce, group - begin), head = key_head * group + begin;
            if (warp < heads) {  // gates: two tokens a lane, and their sums over the chunk
                const int token = 2 * lane;
                float step[2], beta[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const bool valid = token + i < count;
                    const LogGates gates =
                        valid ? log_gates_of(a, first + token + i, head + warp) : LogGates{};
                    step[i] = gates.log_decay;
                    beta[i] = gates.beta;
                }
                float sum = step[0] + step[1];
#pragma unroll
                for (int o = 1; o < 32; o <<= 1) {
                    const float below = __shfl_up_sync(~0u, sum, o);
                    if (lane >= o) sum += below;
                }
                float before = __shfl_up_sync(~0u, sum, 1);
                if (lane == 0) before = 0.f;
                sums[warp * kChunk + token] = before + step[0];
                sums[warp * kChunk + token + 1] = sum;
                betas[warp * kChunk + token] = beta[0];
                betas[warp * kChunk + token + 1] = beta[1];
            }
            __syncthreads();
            for (int h = 0; h < heads; h++) {
                float* matrix = matrices + h * kChunk * kPitch;
                const float *sum = sums + h * kChunk, *beta = betas + h * kChunk;
#pragma unroll
                for (int half = 0; half < 2; half++) {  // rows g and g + 8 of the warp's 16
                    const int i = own + g + 8 * half;
                    const float factor = beta[i] * key_scale[i];
                    bf16* products = chunks.products + ((first + i) * a.heads + head + h) * kChunk + 2 * t;
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        if (n / 2 > warp) continue;
                        float lower[2], product[2];
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int j = 8 * n + 2 * t + e;
                            // Behind the diagonal G_i - G_j is positive and its exponential may overflow.
                            const float decay = j <= i ? expf(sum[i] - sum[j]) * key_scale[j] : 0.f;
                            lower[e] = j < i ? kk[n][2 * half + e] * decay * factor : 0.f;
                            product[e] = j <= i ? qk[n][2 * half + e] * decay * query_scale[i] : 0.f;
                        }
                        *reinterpret_cast<float2*>(matrix + i * kPitch + 8 * n + 2 * t) =
                            make_float2(lower[0], lower[1]);
                        if (i < count)
                            *reinterpret_cast<uint32_t*>(products + 8 * n) =
                                pack2<bf16>(product[0], product[1]);
                    }
                }
            }
            if (threadIdx.x < heads * kChunk) {
                const int h = threadIdx.x / kChunk, token = threadIdx.x % kChunk;
                if (token < count)
                    chunks.factors[(first + token) * a.heads + head + h] =
                        make_float4(sums[h * kChunk + token], betas[h * kChunk + token], key_scale[token],
                                    query_scale[token]);
            }
            __syncthreads();
            const int h = threadIdx.x / kChunk, column = threadIdx.x % kChunk;
            float x[kChunk];
            if (h < heads) invert_column(x, matrices + h * kChunk * kPitch, column);
            __syncthreads();  // the inverse takes the matrix's room
            bf16* inverse = reinterpret_cast<bf16*>(matrices + h * kChunk * kPitch);
            if (h < heads)
#pragma unroll
                for (int i = 0; i < kChunk; i++) inverse[i * kChunk + column] = from_f32<bf16>(x[i]);
            __syncthreads();
            if (h < heads)
                for (int i = column; i < count * 8; i += kChunk) {
                    const int token = i / 8, unit = i % 8;
                    if (unit / 2 <= token / 16)
                        store(chunks.inverse + ((first + token) * a.heads + head + h) * kChunk + unit * 8,
                              load<bf16, 8>(inverse + token * kChunk + unit * 8));
                }
        }
    }
}

// What a block of the scan has of a chunk in shared memory.
constexpr int kKeyTile = kChunk * kKeys * 2, kValueTile = kChunk * kSlice * 2;
constexpr int kBlock = 16 * 16 * 2, kSquareTile = 10 * kBlock;  // the blocks on and below the diagonal
constexpr int kStage = 2 * kKeyTile + 2 * kSquareTile + kValueTile + kChunk * 16;
constexpr int kStages = 2;
constexpr int kScanShared = kStages * kStage + kScanThreads / 32 * kChunk * 16;

struct Stage {
    uint32_t keys, queries, inverse, products, values, factors;
};
__device__ __forceinline__ Stage stage_at(uint32_t base) {
    Stage s;
    s.keys = base;
    s.queries = s.keys + kKeyTile;
    s.inverse = s.queries + kKeyTile;
    s.products = s.inverse + kSquareTile;
    s.values = s.products + kSquareTile;
    s.factors = s.values + kValueTile;
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
    const bf16* value = value_at(a, first, head) + blockIdx.x * kSlice;
#pragma unroll
    for (int i = threadIdx.x; i < kChunk * 4; i += kScanThreads) {
        const int token = i / 4, unit = i % 4;
        const bool valid = token < count;
        cp_async16(tile_at<4>(s.values, token, unit),
                   value + (valid ? static_cast<int64_t>(token) * a.channels : 0) + unit * 8, valid);
    }
    const int64_t square = (first * a.heads + head) * kChunk, stride = static_cast<int64_t>(a.heads) * kChunk;
#pragma unroll
    for (int row = 0; row < 4; row++)
        for (int i = threadIdx.x; i < 16 * 2 * (row + 1); i += kScanThreads) {
            const int token = i / (2 * (row + 1)), unit = i % (2 * (row + 1));
            const bool valid = row * 16 + token < count;
            const int64_t at = square + (valid ? (row * 16 + token) * stride : 0) + unit * 8;
            const uint32_t to = tile_at<2>(block_at(0, row, unit / 2), token, unit % 2);
            cp_async16(s.inverse + to, chunks.inverse + at, valid);
            cp_async16(s.products + to, chunks.products + at, valid);
        }
    for (int i = threadIdx.x; i < kChunk; i += kScanThreads) {
        const bool valid = i < count;
        cp_async16(s.factors + i * 16, chunks.factors + (first + (valid ? i : 0)) * a.heads + head, valid);
    }
}

using Fragment = uint32_t[4];  // a 16x16 operand of mma

// What accumulators of 16 rows and 16 columns, tiles n and n + 1, are as an operand.
__device__ __forceinline__ void as_operand(Fragment& to, const float (&left)[4], const float (&right)[4]) {
    to[0] = pack2<bf16>(left[0], left[1]);
    to[1] = pack2<bf16>(left[2], left[3]);
    to[2] = pack2<bf16>(right[0], right[1]);
    to[3] = pack2<bf16>(right[2], right[3]);
}

// sums[16 columns x 64 tokens] += state[16 x 128 channels] · tokensᵀ
__device__ __forceinline__ void times_tokens(float (&sums)[8][4], const Fragment (&state)[8],
                                             uint32_t tokens) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int c = 0; c < kKeys / 16; c++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t b[4];
            ldmatrix4(b, tile_at<16>(tokens, n * 16 + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
            mma<bf16>(sums[2 * n], state[c][0], state[c][1], state[c][2], state[c][3], b[0], b[1]);
            mma<bf16>(sums[2 * n + 1], state[c][0], state[c][1], state[c][2], state[c][3], b[2], b[3]);
        }
}

// sums[16 columns x 64 tokens i] += x[16 x 64 tokens j] · squareᵀ, where square[i, j] is zero for blocks j >
// i.
__device__ __forceinline__ void times_square(float (&sums)[8][4], const Fragment (&x)[4], uint32_t square) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int n = j; n < 4; n++) {
            uint32_t b[4];
            ldmatrix4(b, tile_at<2>(block_at(square, n, j), lane / 16 * 8 + lane % 8, lane / 8 % 2));
            mma<bf16>(sums[2 * n], x[j][0], x[j][1], x[j][2], x[j][3], b[0], b[1]);
            mma<bf16>(sums[2 * n + 1], x[j][0], x[j][1], x[j][2], x[j][3], b[2], b[3]);
        }
}

// Two tiles of the state, 16 columns x 16 channels from 16 c on, += x[16 columns x 64 tokens] · keys.
__device__ __forceinline__ void add_keys(float (&left)[4], float (&right)[4], const Fragment (&x)[4],
                                         uint32_t keys, int c) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t b[4];
        ldmatrix4_trans(b, tile_at<16>(keys, j * 16 + lane % 16, 2 * c + lane / 16));
        mma<bf16>(left, x[j][0], x[j][1], x[j][2], x[j][3], b[0], b[1]);
        mma<bf16>(right, x[j][0], x[j][1], x[j][2], x[j][3], b[2], b[3]);
    }
}

// d weighted by token, as an operand. weight(token) is asked for the tokens of this lane's accumulators.
template <typename Weight>
__device__ __forceinline__ void weighted(Fragment (&to)[4], const float (&d)[8][4], Weight weight) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float tiles[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int token = 16 * j + 8 * half + 2 * t;
            const float w0 = weight(token), w1 = weight(token + 1);
            const float (&from)[4] = d[2 * j + half];
            tiles[half][0] = from[0] * w0;
            tiles[half][1] = from[1] * w1;
            tiles[half][2] = from[2] * w0;
            tiles[half][3] = from[3] * w1;
        }
        as_operand(to[j], tiles[0], tiles[1]);
    }
}

// One row of the step. A warp carries 16 columns of the state, transposed: element (column, channel) of tile
// n is at channels 8 n + 2 t and columns g, g + 8, as mma lays out its sums. So it is an operand of the next
// GEMM without a way through shared memory, and warps do not wait for each other but for loads.
__device__ __forceinline__ void scan_row(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks,
                                         const Row& row) {
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane / 4, t = lane % 4, head = blockIdx.y;
    const int column = blockIdx.x * kSlice + warp * 16;
    const int64_t out_stride = static_cast<int64_t>(a.heads) * a.value_dim;
    bf16* out = a.out + row.first * out_stride + head * a.value_dim + column;
    if (row.id < 0) {
        for (int i = lane; i < row.count * 2; i += 32)
            store(out + i / 2 * out_stride + i % 2 * 8, Vec<bf16, 8>{});
        return;
    }
    const uint32_t base = shared_address(shared);
    // Per token: β e^G / |k|, β, e^G K^-1/2 / |q|, e^(G_last - G) / |k|; each warp has its own copy.
    float4* const factors = reinterpret_cast<float4*>(shared + kStages * kStage) + warp * kChunk;
    const int64_t at = (static_cast<int64_t>(head) * kKeys + 2 * t) * a.value_dim + column + g;
    const auto place = [&](int n, int e) -> int64_t {  // element e of tile n in a state
        return at + static_cast<int64_t>(8 * n + e % 2) * a.value_dim + e / 2 * 8;
    };
    float s[16][4];
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = row.fresh ? 0.f : a.pool[row.id * a.entry + place(n, e)];

    const int num_chunks = (row.count + kChunk - 1) / kChunk;
    load_stage(stage_at(base), a, chunks, row.first, min(kChunk, row.count), head);
    cp_async_commit();
    for (int chunk = 0; chunk < num_chunks; chunk++) {
        const Stage stage = stage_at(base + chunk % kStages * kStage);
        const int64_t first = row.first + chunk * kChunk;
        const int count = min(kChunk, row.count - chunk * kChunk);
        if (chunk + 1 < num_chunks)
            load_stage(stage_at(base + (chunk + 1) % kStages * kStage), a, chunks, first + kChunk,
                       min(kChunk, row.count - (chunk + 1) * kChunk), head);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const float4* given =
            reinterpret_cast<const float4*>(shared + chunk % kStages * kStage + (stage.factors - stage.keys));
        const float last = given[count - 1].x;
#pragma unroll
        for (int i = lane; i < kChunk; i += 32) {
            const float4 f = given[i];  // zeros from `count` on
            const float decay = expf(f.x);
            factors[i] =
                make_float4(f.y * decay * f.z, f.y, decay * f.w, i < count ? expf(last - f.x) * f.z : 0.f);
        }
        __syncwarp();

        Fragment state[8];
#pragma unroll
        for (int c = 0; c < 8; c++) as_operand(state[c], s[2 * c], s[2 * c + 1]);
        float d[8][4] = {};
        Fragment x[4];
        {
            float seen[8][4] = {};
            times_tokens(seen, state, stage.keys);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t v[4];  // columns g and g + 8 of tokens 2 t, 2 t + 1; then of the eight tokens behind
                ldmatrix4_trans(
                    v, tile_at<4>(stage.values, 16 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int token = 16 * j + 8 * half + 2 * t;
                    const float4 f0 = factors[token], f1 = factors[token + 1];
                    const float2 v0 = unpack2<bf16>(v[2 * half]), v1 = unpack2<bf16>(v[2 * half + 1]);
                    float (&e)[4] = seen[2 * j + half];
                    e[0] = f0.y * v0.x - f0.x * e[0];
                    e[1] = f1.y * v0.y - f1.x * e[1];
                    e[2] = f0.y * v1.x - f0.x * e[2];
                    e[3] = f1.y * v1.y - f1.x * e[3];
                }
                as_operand(x[j], seen[2 * j], seen[2 * j + 1]);
            }
        }
        times_square(d, x, stage.inverse);

        float o[8][4] = {};
        times_tokens(o, state, stage.queries);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float f0 = factors[8 * n + 2 * t].z, f1 = factors[8 * n + 2 * t + 1].z;
            o[n][0] *= f0;
            o[n][1] *= f1;
            o[n][2] *= f0;
            o[n][3] *= f1;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) as_operand(x[j], d[2 * j], d[2 * j + 1]);
        times_square(o, x, stage.products);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const uint32_t low =
                movmatrix(pack2<bf16>(o[n][0], o[n][1]));  // token g, columns 2 t and 2 t + 1
            const uint32_t high = movmatrix(pack2<bf16>(o[n][2], o[n][3]));
            if (8 * n + g < count) {
                bf16* to = out + (chunk * kChunk + 8 * n + g) * out_stride + 2 * t;
                *reinterpret_cast<uint32_t*>(to) = low;
                *reinterpret_cast<uint32_t*>(to + 8) = high;
            }
        }

        // States that are kept inside the chunk: the update up to that token.
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const int mine = half * 32 + lane < count ? a.rows.saves[first + half * 32 + lane] : -1;
            for (unsigned wanted = __ballot_sync(~0u, mine >= 0); wanted != 0; wanted &= wanted - 1) {
                const int bit = __ffs(wanted) - 1, token = half * 32 + bit;
                float* to = a.pool + __shfl_sync(~0u, mine, bit) * a.entry;
                const float sum = given[token].x, decay = expf(sum);
                weighted(x, d, [&](int j) { return j <= token ? expf(sum - given[j].x) * given[j].z : 0.f; });
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    float left[4], right[4];
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        left[e] = s[2 * c][e] * decay;
                        right[e] = s[2 * c + 1][e] * decay;
                    }
                    add_keys(left, right, x, stage.keys, c);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        to[place(2 * c, e)] = left[e];
                        to[place(2 * c + 1, e)] = right[e];
                    }
                }
            }
        }

        weighted(x, d, [&](int j) { return factors[j].w; });
        const float decay = expf(last);
#pragma unroll
        for (int c = 0; c < 8; c++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[2 * c][e] *= decay;
                s[2 * c + 1][e] *= decay;
            }
            add_keys(s[2 * c], s[2 * c + 1], x, stage.keys, c);
        }
        __syncthreads();  // the stage is free
    }
#pragma unroll
    for (int n = 0; n < 16; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) a.pool[row.id * a.entry + place(n, e)] = s[n][e];
}

// Blocks of (slices of columns, value heads, some rows): rows of several tokens are dealt out in turn.
__device__ __forceinline__ void delta_chunk_scan(const DeltaArgs<bf16>& a, const ChunkArgs<bf16>& chunks) {
    const int lane = threadIdx.x & 31;
    pdl_wait();
    pdl_launch();
    unsigned number = 0;
    for (int base = 0; base < chunks.num_rows; base += 32) {
        const bool several = base + lane < chunks.num_rows && a.rows.lens[base + lane] >= 2;
        for (unsigned mask = __ballot_sync(~0u, several); mask != 0; mask &= mask - 1)
            if (number++ % gridDim.z == blockIdx.z)
                scan_row(a, chunks, row_at(a.rows, base + __ffs(mask) - 1));
    }
}
