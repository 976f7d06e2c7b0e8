// The whole forward pass of one decoded row in one launch (Hopper): token id to logits, one block an SM.
//
// A step of one row takes as long as reading the weights and the cache, if memory is never idle. Therefore a
// producer warp of each block issues the copies of that block's share of everything the pass reads, in the
// order of the pass and without waiting for any result, into one ring that takes nearly all of shared memory
// (ring.cuh). The ring holds what memory delivers in about 8 µs. The work between two GEMMs takes less: the
// sums over warps, the exchange of results between blocks, and loading the next input.
//
// Two measures keep it below that. At most a window of the ring is in flight at a time: memory answers a
// block in order, so a load behind 200 KB of copies waits for 8 µs, and one behind 40 KB for less than 2. And
// a result is one word with its own tag (words.cuh) instead of data and a flag: it takes one trip to L2 and
// one back, without a fence or a barrier.
//
// Eight warps multiply. A thread keeps its columns of the input in registers; each warp's sums of a row meet
// in shared memory. A GEMM's rows are shared out to blocks evenly. Elements of the residual stream stay
// with the thread that adds to them.
//
// Attention: a block takes a part of one unit's keys (a KV head and its query heads), of which the newest is
// as the projection left it, and then a slice of the unit's channels, for which it adds up what all parts
// have.
#pragma once
#include <cuda.h>

#include <type_traits>

#include "../attention/page.cuh"
#include "e4m3.cuh"
#include "reduce.cuh"
#include "ring.cuh"
#include "words.cuh"

namespace pass {

using attention::NewestPair;
using attention::PageSums;
using attention::piece;

// Sums of N values over the warp; lane l gets that of value l / (32 / N).
template <int N>
__device__ __forceinline__ float sum_values(const float (&v)[N]) {
    if constexpr (N == 1) {
        return warp_sum(v[0]);
    } else {
        float sums[N];
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = v[i];
        int shift = 16;
#pragma unroll
        for (int n = N / 2; n; n /= 2, shift /= 2) {
            const bool upper = threadIdx.x & shift;
#pragma unroll
            for (int i = 0; i < n; i++) {
                const float keep = upper ? sums[n + i] : sums[i], give = upper ? sums[i] : sums[n + i];
                sums[i] = keep + __shfl_xor_sync(~0u, give, shift);
            }
        }
#pragma unroll
        for (; shift; shift /= 2) sums[0] += __shfl_xor_sync(~0u, sums[0], shift);
        return sums[0];
    }
}

// The columns of an input that a thread multiplies: 8 of every 8 · CONSUMERS.
//
// Tensor cores multiply, in a way of their own: a warp's 256 columns of two rows of the weight are the rows
// of one operand, 32 columns (four lanes) each, and the input's columns, cut alike, are the columns of the
// other. Of their GEMM only the diagonal means something. So a lane needs the same columns of weight and
// input, and 8 columns of a row are two instructions of its warp.
//
// W: the weight's elements, T or e4m3. E4M3 codes become f16, which is exact, and so does the input: it is
// scaled by a power of two for the columns of each four lanes, so that none of it overflows.
template <typename T, typename W, int CHUNKS>
struct Columns {
    static constexpr bool FP8 = std::is_same_v<W, e4m3>;
    using Product = std::conditional_t<FP8, f16, T>;
    uint4 x[CHUNKS];
    float scale = 1;  // of this lane's columns and those of its three neighbours

    // The input is `row` of a table, or words once they are there.
    __device__ __forceinline__ void take(const T* row, const uint32_t* words, uint32_t tag, int k) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int i = 8 * (threadIdx.x + c * CONSUMERS);
            x[c] = make_uint4(0, 0, 0, 0);
            if (row && i < k) x[c] = *reinterpret_cast<const uint4*>(row + i);
        }
        constexpr int AT_ONCE = CHUNKS < 3 ? CHUNKS : 3;
#pragma unroll
        for (int c0 = 0; c0 < CHUNKS; c0 += AT_ONCE) {
            for (bool there = row != nullptr; !there;) {
                there = true;
                uint4 low[AT_ONCE], high[AT_ONCE];
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    const int i = 8 * (threadIdx.x + (c0 + c) * CONSUMERS);
                    if (c0 + c < CHUNKS && i < k) low[c] = poll(words + i), high[c] = poll(words + i + 4);
                }
#pragma unroll
                for (int c = 0; c < AT_ONCE; c++) {
                    if (c0 + c >= CHUNKS || 8 * (threadIdx.x + (c0 + c) * CONSUMERS) >= k) continue;
                    there &= tagged(low[c], tag) & tagged(high[c], tag);
                    x[c0 + c] = make_uint4(values(low[c].x, low[c].y), values(low[c].z, low[c].w),
                                           values(high[c].x, high[c].y), values(high[c].z, high[c].w));
                }
            }
        }
    }

    // Multiplies by the weight of the norm that the input goes through; its scale 1 / rms is left to the
    // sums. Returns the sum of this warp's squares.
    __device__ __forceinline__ float weigh(const float* norm, int k) {
        float square = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int i = 8 * (threadIdx.x + c * CONSUMERS);
            if (i >= k) continue;
            uint32_t* pairs = &x[c].x;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 w = *reinterpret_cast<const float2*>(norm + i + 2 * j), f = unpack2<T>(pairs[j]);
                square = fmaf(f.x, f.x, square), square = fmaf(f.y, f.y, square);
                pairs[j] = pack2<T>(f.x * w.x, f.y * w.y);
            }
        }
        return warp_sum(square);
    }

    // Scales the input of E4M3 weights to f16: the greatest magnitude of four lanes is in [2^14, 2^15).
    __device__ __forceinline__ void narrow() {
        // Magnitudes in bf16 are ordered as whole numbers are, NaN above all.
        static_assert(std::is_same_v<T, bf16>);
        uint32_t peaks = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) peaks = __vmaxu2(peaks, (&x[c].x)[j] & 0x7fff7fff);
        peaks = __vmaxu2(peaks, __shfl_xor_sync(~0u, peaks, 1));
        peaks = __vmaxu2(peaks, __shfl_xor_sync(~0u, peaks, 2));
        // Exponents as float32 has them.
        const uint32_t exponent = max(max(peaks & 0xffff, peaks >> 16) >> 7, 15u);
        const float inverse = __uint_as_float((268 - exponent) << 23);
        scale = __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 14) << 23);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t& pair = (&x[c].x)[j];
                const float2 v = unpack2<T>(pair);
                pair = pack2<f16>(v.x * inverse, v.y * inverse);
            }
    }

    // 8 columns of a row of the weight, and these as the tensor cores take them.
    using Raw = std::conditional_t<FP8, uint2, uint4>;
    static __device__ __forceinline__ Raw load_raw(uint32_t from) {
        if constexpr (FP8)
            return load_shared8(from);
        else
            return load_shared16(from);
    }
    static __device__ __forceinline__ uint4 widen(const Raw& v) {
        if constexpr (FP8)
            return make_uint4(e4m3x2_to_f16(v.x), e4m3x2_to_f16(v.x >> 16), e4m3x2_to_f16(v.y),
                              e4m3x2_to_f16(v.y >> 16));
        else
            return v;
    }

    // Sums of `count` rows from stages that each hold `in_stage` of them, into this warp's row of `sums`.
    template <int ROWS, int D>
    __device__ __forceinline__ void sum_rows(Places<D>& at, int k, int count, int in_stage,
                                             float* sums) const {
        constexpr int EIGHT = 8 * sizeof(W);  // bytes of 8 columns
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row_bytes = sizeof(W) * k;
        const bool busy = warp * 256 < k;  // this warp has columns
        const bool diagonal = (lane & 3) == lane >> 3, odd = lane >> 2 & 1;
        float* to = sums + warp * ROUND + lane / (32 / ROWS);
#pragma unroll 1
        for (int first = 0; first < count; first += in_stage, at.advance()) {
            mbarrier_wait(at.full(), at.parity);
            const int end = min(in_stage, count - first);
            uint32_t from = at.here() + threadIdx.x * EIGHT;
#pragma unroll 1
            for (int row = 0; busy && row < end; row += ROWS, from += ROWS * row_bytes) {
                // Many chunks of codes are all loaded first, and added up in two independent sums.
                constexpr bool MANY = FP8 && CHUNKS > FEW_CHUNKS;
                constexpr int SUMS = MANY ? 2 : 1;
                float parts[SUMS][(ROWS + 1) / 2][4] = {};
                Raw w[MANY ? CHUNKS : 1][ROWS];
                auto load = [&](int c, Raw(&to)[ROWS]) {
                    const bool mine = 8 * (threadIdx.x + c * CONSUMERS) < k;
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        to[r] = Raw{};
                        if (mine) to[r] = load_raw(from + r * row_bytes + c * CONSUMERS * EIGHT);
                    }
                };
#pragma unroll
                for (int c = 0; MANY && c < CHUNKS; c++) load(c, w[MANY ? c : 0]);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    if (8 * (warp * 32 + c * CONSUMERS) >= k) break;
                    if (!MANY) load(c, w[0]);
                    auto& d = parts[c % SUMS];
                    const Raw(&rows)[ROWS] = w[MANY ? c : 0];
#pragma unroll
                    for (int r = 0; r < ROWS; r += 2) {
                        const uint4 low = widen(rows[r]), high = widen(rows[min(r + 1, ROWS - 1)]);
                        mma<Product>(d[r / 2], low.x, high.x, low.y, high.y, x[c].x, x[c].y);
                        mma<Product>(d[r / 2], low.z, high.z, low.w, high.w, x[c].z, x[c].w);
                    }
                }
                float sum[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float* of = parts[0][r / 2] + r % 2 * 2;
                    float even_sum = of[0], odd_sum = of[1];
                    if constexpr (SUMS > 1)
                        even_sum += parts[1][r / 2][r % 2 * 2], odd_sum += parts[1][r / 2][r % 2 * 2 + 1];
                    sum[r] = diagonal ? (odd ? odd_sum : even_sum) * scale : 0.f;
                }
                const float all = sum_values<ROWS>(sum);
                if (lane % (32 / ROWS) == 0 && row + lane / (32 / ROWS) < end) to[first + row] = all;
            }
            mbarrier_arrive(at.empty());
        }
    }
};

// The epilogues of the GEMMs.
template <typename T, int D>
struct Epilogue {
    const Args& a;
    const Places<D>& at;
    const Words words;

    __device__ __forceinline__ float total(int row, int k) const {
        const float* sums = at.sums() + row;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (w * 256 < k) sum += sums[w * ROUND];
        return sum;
    }
    __device__ __forceinline__ float scale() const {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += at.squares()[w];
        return rsqrtf(sum / a.m + a.eps);
    }
    // Rows first … first + count. `last`: of the layers. scales: of the rows that this thread finishes.
    __device__ __forceinline__ void operator()(int kind, int k, int first, int count, float2 scales,
                                               uint32_t tag, bool last) const {
        const int i = threadIdx.x, row = first + i;
        if (kind == GATE_UP) {
            if (i >= count / 2) return;
            const float s = scale();
            const float gate = total(2 * i, k) * scales.x * s, up = total(2 * i + 1, k) * scales.y * s;
            // The two projections are rounded first, as they are where they are stored.
            const float2 p = unpack2<T>(pack2<T>(gate, up));
            store_tagged(words.act() + first / 2 + i, from_f32<T>(__fdividef(p.x, 1.f + __expf(-p.x)) * p.y),
                         tag);
            return;
        }
        if (i >= count) return;
        const float sum = total(i, k) * scales.x;
        if (kind == QKV) {
            store_tagged(words.qkv() + row, from_f32<T>(sum * scale()), tag);
        } else if (kind == HEAD) {
            a.logits[row] = sum * scale();
        } else {
            const T x = from_f32<T>(at.residual()[i] + sum);
            at.residual()[i] = to_f32(x);
            store_tagged(words.x() + row, x, tag);
            if (last && kind == DOWN) static_cast<T*>(a.x)[row] = x;
        }
    }
};

// Scales of an FP8 weight's rows that this thread finishes, of first … first + count; 1 for other weights.
__device__ __forceinline__ float2 scales_of(const Gemm& p, int kind, int first, int count) {
    const int i = threadIdx.x;
    float2 scales = make_float2(1, 1);
    if (p.scales == nullptr) return scales;
    if (kind == GATE_UP) {
        if (i < count / 2) scales = __ldg(reinterpret_cast<const float2*>(p.scales + first) + i);
    } else if (i < count) {
        scales.x = __ldg(p.scales + first + i);
    }
    return scales;
}

// Sums of `count` rows of a GEMM. CHUNKS: of 8 columns a thread; ROWS: that a warp sums together.
template <typename T, typename W, int D, int CHUNKS, int ROWS>
__device__ __forceinline__ void multiply_as(const Args& a, const Gemm& p, const T* row, const uint32_t* words,
                                            uint32_t tag, const float* norm, int count, Places<D>& at) {
    Columns<T, W, CHUNKS> columns;
    columns.take(row, words, tag, p.k);
    const float square = norm ? columns.weigh(norm, p.k) : 0.f;
    if constexpr (columns.FP8) columns.narrow();
    named_wait<CONSUMERS>(MEET);  // sums and squares before these have been read
    if (norm && (threadIdx.x & 31) == 0) at.squares()[threadIdx.x >> 5] = square;
    columns.template sum_rows<ROWS>(at, p.k, count, p.in_stage(a), at.sums());
}
template <typename T, typename W, int D>
__device__ __forceinline__ void multiply(const Args& a, const Gemm& p, const T* row, const uint32_t* words,
                                         uint32_t tag, const float* norm, int count, Places<D>& at) {
    const bool long_rows = p.k > FEW_CHUNKS * 8 * CONSUMERS;
    if constexpr (std::is_same_v<W, e4m3>) {  // a stage has two rows at least, and four of FEW_CHUNKS
        if (long_rows)
            multiply_as<T, W, D, MAX_CHUNKS, 2>(a, p, row, words, tag, norm, count, at);
        else if (p.in_stage(a) >= 8)
            multiply_as<T, W, D, FEW_CHUNKS, 8>(a, p, row, words, tag, norm, count, at);
        else
            multiply_as<T, W, D, FEW_CHUNKS, 4>(a, p, row, words, tag, norm, count, at);
    } else if (long_rows || p.in_stage(a) == 1) {
        multiply_as<T, W, D, MAX_CHUNKS, 1>(a, p, row, words, tag, norm, count, at);
    } else if (p.in_stage(a) == 2) {
        multiply_as<T, W, D, FEW_CHUNKS, 2>(a, p, row, words, tag, norm, count, at);
    } else {
        multiply_as<T, W, D, FEW_CHUNKS, 4>(a, p, row, words, tag, norm, count, at);
    }
}

// Norm and RoPE of the unit's heads as the projection leaves them. Each query head has a warp, which writes
// it to shared memory. The newest key belongs to the warp that reads its page, which also writes key and
// value to the cache and keeps them in registers.
template <typename T, int D>
struct Heads {
    bool has_query, holds;
    HeadPart<float, D> q_weight, k_weight;

    // What does not depend on the projection.
    __device__ __forceinline__ Heads(const Args& a, const Layer& l, const Share& s) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        has_query = warp < a.h / a.g;
        holds = s.part + 1 == s.parts && max(s.end - s.first - 1, 0) % WARPS == warp;
        if (has_query) q_weight = load_weight<D>(l.q_norm, lane);
        if (holds) k_weight = load_weight<D>(l.k_norm, lane);
    }
    __device__ __forceinline__ void finish(const Args& a, const Layer& l, const Share& s, int layer,
                                           const Places<D>& at, const uint32_t* qkv, uint32_t tag,
                                           NewestPair<T, D>& newest) const {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, heads = a.h / a.g;
        if (has_query) {
            HeadPart<T, D> x = await_head<T, D>(qkv + (s.unit * heads + warp) * D, tag);
            norm_and_rope(x, l.q_norm, q_weight, a, at);
            attention::place_head(x, at.queries(), [&](int c) { return piece<D>(warp, c); });
        }
        if (!holds) return;
        const uint32_t* key = qkv + (a.h + s.unit) * D;
        newest.key = await_head<T, D>(key, tag), newest.value = await_head<T, D>(key + a.g * D, tag);
        norm_and_rope(newest.key, l.k_norm, k_weight, a, at);
        const int slot = a.slots[0];
        if (slot < 0) return;
        const int64_t block =
            (static_cast<int64_t>(slot / a.block_size) * a.layers + layer) * 2 * a.g + s.unit;
        T* to = static_cast<T*>(a.kv) + (block * a.block_size + slot % a.block_size) * D;
        newest.key.store_to(to, lane);
        newest.value.store_to(to + static_cast<int64_t>(a.g) * a.block_size * D, lane);
    }

  private:
    static __device__ __forceinline__ void norm_and_rope(HeadPart<T, D>& x, const float* norm,
                                                         const HeadPart<float, D>& weight, const Args& a,
                                                         const Places<D>& at) {
        HeadPart<float, D> cos_sin;
        cos_sin.load_from(at.cos_sin(), threadIdx.x & 31);
        apply_rope(x, norm ? head_scale(x, a.eps) : 1.f, weight, cos_sin);
    }
};

// This block's slice of its unit's channels: the weighted mean of all parts', a thread for each part of a
// channel.
template <typename T, int D>
__device__ __forceinline__ void merge_parts(const Args& a, const Share& s, int heads, uint32_t* attn,
                                            uint32_t tag, uint32_t number) {
    const int channels = heads * D / s.parts;
#pragma unroll 2
    for (int i = threadIdx.x; i < channels * s.parts; i += CONSUMERS) {  // whole warps
        const int part = i % s.parts, channel = s.part * channels + i / s.parts;
        const int head = s.unit * heads + channel / D;
        const uint2* from = a.parts + (part * a.h + head) * (D + 1);
        const float v = await_float(from + channel % D, number), weight = await_float(from + D, number);
        float top = weight;
        for (int shift = s.parts / 2; shift; shift >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, shift));
        float share = exp2_fast(weight - top), sum = share * v;
        for (int shift = s.parts / 2; shift; shift >>= 1)
            sum += __shfl_xor_sync(~0u, sum, shift), share += __shfl_xor_sync(~0u, share, shift);
        if (part == 0) store_tagged(attn + s.unit * heads * D + channel, from_f32<T>(sum / share), tag);
    }
}

// This block's part of attention. Parts exchange their means and the logarithm of their weights; their
// tag is `number`, for a part that is not needed leaves words behind that may be as old as one pleases.
template <typename T, int D>
__device__ __forceinline__ void attend(const Args& a, const Layer& l, const Share& s, int layer,
                                       Places<D>& at, const Words& words, uint32_t tag, uint32_t number) {
    constexpr int QUADS = D / 4;
    const int warp = threadIdx.x >> 5, heads = a.h / a.g;
    const int count = s.end - s.first, step = a.stage / at.PAGE;
    const Heads<T, D> mine(a, l, s);
    NewestPair<T, D> newest;
    mine.finish(a, l, s, layer, at, words.qkv(), tag, newest);
    named_wait<CONSUMERS>(MEET);
    uint32_t qf[D / 16][2];
    PageSums<T, D, attention::boxed<D>> sums;
    attention::load_queries<D>(at.queries(), heads, qf);
#pragma unroll 1
    for (int first = 0; first < count; first += step, at.advance()) {
        mbarrier_wait(at.full(), at.parity);
        const int end = min(first + step, count);
#pragma unroll 1
        for (int i = first + (warp - first % WARPS + WARPS) % WARPS; i < end; i += WARPS) {
            uint8_t* page = at.base + at.slot * a.stage + (i - first) * at.PAGE;
            const int valid = s.context - (s.first + i) * 16;
            if (valid <= 16) {
                attention::complete_page<T, D, true>(page, newest, valid);
                async_proxy_fence();  // TMA writes here next
            }
            sums.add(shared_address(page), qf, valid, a.scale_log2);
        }
        mbarrier_arrive(at.empty());
    }
    sums.close();
    sums.leave(at.sums(), at.ends(), warp, heads);
    named_wait<CONSUMERS>(MEET);
    const int quad = threadIdx.x;
    if (quad < heads * QUADS) {
        const int head = s.unit * heads + quad / QUADS, channel = quad % QUADS * 4;
        float top, weight;
        float4 v = attention::add_warps<D, WARPS>(at.sums(), at.ends(), heads, quad / QUADS, quad % QUADS,
                                                  top, weight);
        const float inverse = s.context > 0 ? 1.f / weight : 0.f;  // a step of nothing but padding: zeros
        v.x *= inverse, v.y *= inverse, v.z *= inverse, v.w *= inverse;
        const float of[4] = {v.x, v.y, v.z, v.w};
        uint2* to = a.parts + (s.part * a.h + head) * (D + 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (s.parts == 1)
                store_tagged(words.attn() + head * D + channel + i, from_f32<T>(of[i]), tag);
            else
                store_tagged(to + channel + i, of[i], number);
        }
        if (s.parts > 1 && channel == 0) store_tagged(to + D, top + __log2f(weight), number);
    }
    if (s.parts > 1) merge_parts<T, D>(a, s, heads, words.attn(), tag, number);
}

// W: elements of the layers' weights.
template <typename T, typename W, int D>
__device__ __forceinline__ void consume(const Args& a, const Layers& layers, Places<D> at) {
    const Share share(a);
    const int id = a.token_ids[0];  // an invalid id reads row 0, inside the table
    const bool known = id >= 0 && id < a.v;
    const T* in = static_cast<const T*>(a.embedding) + static_cast<int64_t>(known ? id : 0) * a.m;
    const Words words = {a, D};
    const uint32_t launch = *a.launches;
    if (threadIdx.x < D)
        at.cos_sin()[threadIdx.x] = a.cos_sin[static_cast<int64_t>(a.positions[0]) * D + threadIdx.x];
    const Gemm output(a, layers, 0, O, D, sizeof(W));
    const int row = output.first(blockIdx.x) + threadIdx.x;
    if (row < output.first(blockIdx.x + 1)) at.residual()[threadIdx.x] = to_f32(in[row]);
    named_wait<CONSUMERS>(MEET);
    const Epilogue<T, D> epilogue = {a, at, words};
    const int gemms = 4 * a.layers + 1;
#pragma unroll 1
    for (int i = 0; i < gemms; i++) {
        const int layer = i / 4, kind = i + 1 < gemms ? i % 4 : HEAD;
        const Layer& l = layers.layer[kind == HEAD ? 0 : layer];
        const uint32_t number = launch * gemms + i;
        // Of its results and of its input; never 0, which fresh words have.
        const uint32_t tag = number % 65535 + 1, before = (number - 1) % 65535 + 1;
        if (kind == O && share.mine) attend<T, D>(a, l, share, layer, at, words, before, number);
        const uint32_t* from = kind == O ? words.attn() : kind == DOWN ? words.act() : words.x();
        const float* norm = kind == QKV       ? l.attn_norm
                            : kind == GATE_UP ? l.mlp_norm
                            : kind == HEAD    ? a.norm
                                              : nullptr;
        const Gemm p(a, layers, layer, kind, D, sizeof(W));
        const int first = p.first(blockIdx.x), rows = p.first(blockIdx.x + 1) - first;
        const int most = ROUND / p.in_stage(a) * p.in_stage(a);
#pragma unroll 1
        for (int done = 0; done < rows; done += most) {
            const int count = min(most, rows - done);
            float2 scales = make_float2(1, 1);
            if constexpr (sizeof(W) == 1) scales = scales_of(p, kind, first + done, count);
            if (sizeof(W) > 1 || kind == HEAD)
                multiply<T, T, D>(a, p, i == 0 ? in : nullptr, from, before, norm, count, at);
            else
                multiply<T, W, D>(a, p, i == 0 ? in : nullptr, from, before, norm, count, at);
            named_wait<CONSUMERS>(MEET);
            epilogue(kind, p.k, first + done, count, scales, tag, i + 2 == gemms);
        }
    }
    // The last block to come here counts the launch.
    if (threadIdx.x == 0 && atomicAdd(a.launches + 1, 1) == gridDim.x - 1)
        a.launches[0] = launch + 1, a.launches[1] = 0;
}

template <typename T, typename W, int D>
__device__ __forceinline__ void run(const void* map, const Args& a, const Layers& layers) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const int warp = threadIdx.x >> 5;
    if (warp == WARPS) {
        Places<D> at(a, shared, 1);
        if ((threadIdx.x & 31) == 0) {
            tma_prefetch(map);
            for (; at.parity; at.advance()) mbarrier_init(at.full(), 1), mbarrier_init(at.empty(), CONSUMERS);
            mbarrier_init_fence();
        }
        __syncwarp();
        named_arrive<THREADS>(MADE);
        issue_tma<D>(a, layers, map, sizeof(W), Filling<D>(a, shared));
    } else {
        named_wait<THREADS>(MADE);
        consume<T, W, D>(a, layers, Places<D>(a, shared, 0));
    }
}

}  // namespace pass

#define ROW_PASS_KERNEL(NAME, T, W, D)                                                      \
    extern "C" __global__ void __launch_bounds__(pass::THREADS, 1)                          \
        NAME(const __grid_constant__ CUtensorMap map, const __grid_constant__ pass::Args a, \
             const __grid_constant__ pass::Layers layers) {                                 \
        pass::run<T, W, D>(&map, a, layers);                                                \
    }
