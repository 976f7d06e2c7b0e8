// The gated delta rule of rows of several tokens by chunks of 64 tokens, with bf16 tensor cores.
//
// For a chunk that starts from state S, let G_i be the sum of g up to token i, and k̂, q̂ the normalised keys
// and queries (q̂ scaled by K^-1/2):
//   (I + A) D = β (V - e^G K̂ S)          A_ij = β_i e^(G_i - G_j) k̂_i·k̂_j for j < i
//   O = e^G Q̂ S + P D                    P_ij = e^(G_i - G_j) q̂_i·k̂_j for j ≤ i
//   S ← e^G_last S + Σ_j e^(G_last - G_j) k̂_j d_j
// delta_chunk_prepare computes (I + A)^-1 and P of all chunks side by side. delta_chunk_scan (scan.cuh) then
// carries the state from chunk to chunk. The state and all sums stay in float32; factors of a GEMM are
// rounded to bf16.
#pragma once
#include "delta.cuh"

constexpr int kChunk = 64;            // tokens
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

// (I + A)^-1 in place, by columns: 64 threads each solve (I + A) x = e_column by forward substitution in
// float32, 16 rows at a time. The x of rows that are done stand where A's rows were. All indices of
// registers fall within 16 rows, so the code is short: a launch fetches it anew.
__device__ __forceinline__ void invert_column(float* matrix, int column, int barrier) {
#pragma unroll 1
    for (int first = 0; first < kChunk; first += 16) {
        const float* const rows = matrix + first * kPitch;
        float x[16];
#pragma unroll
        for (int r = 0; r < 16; r++) x[r] = first + r == column ? 1.f : 0.f;
#pragma unroll 1
        for (int j = 0; j < first; j += 4) {
            float known[4];
#pragma unroll
            for (int c = 0; c < 4; c++) known[c] = matrix[(j + c) * kPitch + column];
#pragma unroll
            for (int r = 0; r < 16; r++) {
                const float4 a = *reinterpret_cast<const float4*>(rows + r * kPitch + j);
                x[r] = fmaf(-a.x, known[0], fmaf(-a.y, known[1], x[r]));
                x[r] = fmaf(-a.z, known[2], fmaf(-a.w, known[3], x[r]));
            }
        }
#pragma unroll
        for (int r = 1; r < 16; r++)
#pragma unroll
            for (int c = 0; c < r; c++) x[r] = fmaf(-rows[r * kPitch + first + c], x[c], x[r]);
        named_wait<kChunk>(barrier);  // all have read these rows of A
#pragma unroll
        for (int r = 0; r < 16; r++) matrix[(first + r) * kPitch + column] = x[r];
        named_wait<kChunk>(barrier);
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
    const int apart = a.tiled ? a.key_heads : 1;  // value heads of one key head
    pdl_wait();
    pdl_launch();
    for (int index = blockIdx.x;; index += gridDim.x) {
        const Tile at = find_tile(a.rows.lens, chunks.num_rows, index, kChunk, 2);
        if (at.row < 0) return;
        const Row row = row_at(a.rows, at.row);
        if (row.id < 0) continue;
        const int64_t first = row.first + at.tile * kChunk;
        const int count = min(kChunk, row.count - at.tile * kChunk);
        // The gates of value heads from `begin` on, two tokens a lane, and their sums over the chunk.
        const auto sum_gates = [&](int begin) {
            if (warp >= min(kHeadsAtOnce, group - begin)) return;
            const int head = (a.tiled ? key_head : key_head * group) + (begin + warp) * apart;
            const int token = 2 * lane;
            float step[2], beta[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool valid = token + i < count;
                const LogGates gates = valid ? log_gates_of(a, first + token + i, head) : LogGates{};
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
        };
        __syncthreads();  // all have done with the chunk before
        const bf16* query = a.qkv + first * a.channels + key_head * kKeys;
        load_keys<kPrepareThreads>(queries, query, a.channels, count);
        load_keys<kPrepareThreads>(keys, query + a.key_heads * kKeys, a.channels, count);
        cp_async_commit();
        sum_gates(0);  // while keys and queries come
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
            const int heads = min(kHeadsAtOnce, group - begin);
            const int head = (a.tiled ? key_head : key_head * group) + begin * apart;
            if (begin > 0) sum_gates(begin);
            __syncthreads();
            for (int h = 0; h < heads; h++) {
                float* matrix = matrices + h * kChunk * kPitch;
                const float *sum = sums + h * kChunk, *beta = betas + h * kChunk;
#pragma unroll
                for (int half = 0; half < 2; half++) {  // rows g and g + 8 of the warp's 16
                    const int i = own + g + 8 * half;
                    const float factor = beta[i] * key_scale[i];
                    bf16* products =
                        chunks.products + ((first + i) * a.heads + head + h * apart) * kChunk + 2 * t;
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
                    chunks.factors[(first + token) * a.heads + head + h * apart] =
                        make_float4(sums[h * kChunk + token], betas[h * kChunk + token], key_scale[token],
                                    query_scale[token]);
            }
            __syncthreads();
            const int h = threadIdx.x / kChunk, column = threadIdx.x % kChunk;
            if (h >= heads) continue;
            const float* const inverse = matrices + h * kChunk * kPitch;
            invert_column(matrices + h * kChunk * kPitch, column, 1 + h);
            for (int i = column; i < count * 8; i += kChunk) {
                const int token = i / 8, unit = i % 8;
                if (unit / 2 > token / 16) continue;
                const float4* const row =
                    reinterpret_cast<const float4*>(inverse + token * kPitch + unit * 8);
                const float4 low = row[0], high = row[1];
                const uint4 packed = {pack2<bf16>(low.x, low.y), pack2<bf16>(low.z, low.w),
                                      pack2<bf16>(high.x, high.y), pack2<bf16>(high.z, high.w)};
                const int64_t at = ((first + token) * a.heads + head + h * apart) * kChunk + unit * 8;
                *reinterpret_cast<uint4*>(chunks.inverse + at) = packed;
            }
        }
    }
}
