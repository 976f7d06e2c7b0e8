// Products of activation rows with one tile of a weight: x[nt, k] · tileᵀ -> acc[nt, 16].
//
// Each output element is one chain of additions down the columns: f32 activations element by element, 8-bit
// ones block by block. Neither the number of rows in flight nor the split of columns between calls changes
// it, since a chain that is stored to `acc` and loaded again goes on exactly.
#pragma once

namespace pega::PEGA_ISA {

static inline F load_element(const float* p) {
    return load(p);
}

struct F16Bits {
    uint16_t bits;
};
static inline F load_element(const F16Bits* p) {
    return load_f16(&p->bits);
}

// Bytes of weights asked for ahead of their use: what memory delivers within its latency of about 100 ns.
constexpr int64_t kAhead = 3072;

// acc[t] += x[t] · w over `columns` columns. STREAM: w comes from memory, not from the decoder's scratch.
template <int MR, bool STREAM, class E>
static void fma_rows(const E* w, int64_t columns, const float* x, int64_t ldx, float* acc) {
    F s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = load(acc + 16 * t);
    for (int64_t k = 0; k < columns; k++) {
        if constexpr (STREAM) __builtin_prefetch(reinterpret_cast<const char*>(w + 16 * k) + kAhead, 0, 3);
        const F v = load_element(w + 16 * k);
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) s[t] = fma(v, set1(x[t * ldx + k]), s[t]);
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

template <int MR, bool STREAM, class E>
static void fma_rest(const E* w, int64_t columns, const float* x, int64_t ldx, int64_t nt, float* acc) {
    if (nt == MR) return fma_rows<MR, STREAM>(w, columns, x, ldx, acc);
    if constexpr (MR > 1) fma_rest<MR - 1, STREAM>(w, columns, x, ldx, nt, acc);
}

#ifndef PEGA_NATIVE_PAIRS
// Two columns of bf16.
static inline void load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    float a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = bf16_to_float(p[2 * i]), b[i] = bf16_to_float(p[2 * i + 1]);
    first = load(a);
    second = load(b);
}
#endif

// Registers hold the sums of many rows and both columns of a pair; or the sums and one column, which is then
// loaded when it is needed. Where vectors are arrays, neither is better than the compiler's own choice.
constexpr bool kHoldsPairs = kMaxRows > 6, kLoadsTwice = kMaxRows == 6;

// The same for bf16, of which a tile holds two columns side by side; acc[t] = x[t] · w.
template <int MR>
static void fma_pair_rows(const uint16_t* w, int64_t columns, const float* x, int64_t ldx, float* acc) {
    F s[MR], a, b;
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t k = 0; k < columns; k += 2, w += 32) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead, 0, 3);
        load_bf16_pairs(w, a, b);
        if (kHoldsPairs && k + 1 < columns) {
            PEGA_UNROLL
            for (int t = 0; t < MR; t++) {
                s[t] = fma(a, set1(x[t * ldx + k]), s[t]);
                s[t] = fma(b, set1(x[t * ldx + k + 1]), s[t]);
            }
            continue;
        }
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) s[t] = fma(a, set1(x[t * ldx + k]), s[t]);
        if (k + 1 == columns) break;
        if constexpr (kLoadsTwice && MR > 1) {
            const uint16_t* again = w;
            asm volatile("" : "+r"(again));  // else the compiler keeps what it loaded before
            load_bf16_pairs(again, a, b);
        }
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) s[t] = fma(b, set1(x[t * ldx + k + 1]), s[t]);
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

template <int MR>
static void fma_pair_rest(const uint16_t* w, int64_t columns, const float* x, int64_t ldx, int64_t nt,
                          float* acc) {
    if (nt == MR) return fma_pair_rows<MR>(w, columns, x, ldx, acc);
    if constexpr (MR > 1) fma_pair_rest<MR - 1>(w, columns, x, ldx, nt, acc);
}

// How many of `nt` rows to take at once: at most `most`, and the last two passes share evenly, since a pass
// over a tile costs much the same for one row as for several.
static inline int64_t rows_at_once(int64_t nt, int64_t most) {
    return nt >= 2 * most || nt <= most ? (nt < most ? nt : most) : (nt + 1) / 2;
}

template <bool STREAM, class E>
static void fma_all(const E* w, int64_t columns, const float* x, int64_t ldx, int64_t nt, float* acc) {
    while (nt > 0) {
        const int64_t rows = rows_at_once(nt, kMaxRows);
        fma_rest<kMaxRows, STREAM>(w, columns, x, ldx, rows, acc);
        nt -= rows;
        x += rows * ldx;
        acc += rows * 16;
    }
}

static void fma_pairs(const uint16_t* w, int64_t columns, const float* x, int64_t ldx, int64_t nt,
                      float* acc) {
    while (nt > 0) {
        const int64_t rows = rows_at_once(nt, kMaxRows);
        fma_pair_rest<kMaxRows>(w, columns, x, ldx, rows, acc);
        nt -= rows;
        x += rows * ldx;
        acc += rows * 16;
    }
}

// Hardware prefetchers stop at every page of 4 KiB, tiles do not.
template <int FORMAT>
static inline void prefetch(const uint8_t* quants) {
    constexpr int kLines = FORMAT == kQ8_0 ? 9 : FORMAT == kQ5_0 || FORMAT == kQ5_1 ? 6 : 5;
    for (int i = 0; i < kLines; i++) __builtin_prefetch(quants + kAhead + 64 * i, 0, 3);
}

// The same for superblocks: an eighth of one for each block.
template <int FORMAT>
static inline void prefetch_super(const uint8_t* tile, int64_t b) {
    constexpr int64_t kEach = super_bytes(FORMAT) / 8;
    for (int i = 0; i < (kEach + 63) / 64; i++) __builtin_prefetch(tile + b * kEach + kAhead + 64 * i, 0, 3);
}

#ifndef PEGA_NATIVE_K
// Sixteen bytes as numbers.
static inline F widen_u8(const uint8_t* p) {
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = p[i];
    return load(v);
}
static inline F widen_i8(const int8_t* p) {
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = p[i];
    return load(v);
}
#endif

// Columns 4 g … of a q6_k block as bytes 0 … 63, [16][4].
static inline void six_bits(const uint8_t* low, const uint8_t* high, int g, uint8_t* out) {
    const uint8_t *nibbles = low + 64 * (g % 4), *pairs = high + 64 * (g / 4);
    const int side = g < 4 ? 0 : 4, shift = 2 * (g % 4);
    for (int l = 0; l < 64; l++)
        out[l] = static_cast<uint8_t>((nibbles[l] >> side & 15) | (pairs[l] >> shift & 3) << 4);
}

// Columns 4 g … of a block with fifth bits as bytes 0 … 31, [16][4].
static inline void five_bits(const uint8_t* low, const uint8_t* high, int g, uint8_t* out) {
    const uint8_t* nibbles = low + 64 * (g % 4);
    const int side = g < 4 ? 0 : 4;
    for (int l = 0; l < 64; l++)
        out[l] = static_cast<uint8_t>((nibbles[l] >> side & 15) | (high[l] >> g & 1) << 4);
}

#ifndef PEGA_NATIVE_K
// out[t] lane r = sum over a block of q[r] · x[t]; q is 0 … 31 and x[t] at x + t · stride.
template <int MR>
static inline void dot_q5(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&out)[MR]) {
    alignas(64) uint8_t q[512];
    for (int g = 0; g < 8; g++) five_bits(low, high, g, q + 64 * g);
    dot_q8<MR>(q, x, stride, out);
}

// first[t] lane r = sum over a block's first sixteen columns of q[r] · x[t], second[t] over the others; q is
// 0 … 63 and x[t] at x + t · stride.
template <int MR>
static inline void dot_q6(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&first)[MR], F (&second)[MR]) {
    alignas(64) uint8_t q[768] = {};  // zeros on both sides of either half
    for (int g = 0; g < 4; g++) six_bits(low, high, g, q + 256 + 64 * g);
    dot_q8<MR>(q + 256, x, stride, first);
    for (int g = 4; g < 8; g++) six_bits(low, high, g, q + 256 + 64 * (g - 4));
    dot_q8<MR>(q, x, stride, second);
}
#endif

// A superblock's scales for one of its blocks: of either half, and what is taken off.
struct SubScales {
    F first, second, min;
};

template <int FORMAT>
static inline SubScales sub_scales(const SubBlock& b) {
    const F d = load_f16(b.scale);
    if constexpr (FORMAT != kQ6_K) {
        const F scale = mul(d, widen_u8(b.scales));
        return {scale, scale, mul(load_f16(b.min), widen_u8(b.mins))};
    } else {
        const auto* scales = reinterpret_cast<const int8_t*>(b.scales);
        return {mul(d, widen_i8(scales)), mul(d, widen_i8(scales + 16)), set1(32)};
    }
}

// `expand` for superblocks: x = q d - m, or (q - 32) d.
template <int FORMAT, class Use>
static inline void expand_super(const uint8_t* tile, int64_t b, Use use) {
    const SubBlock block = sub_block_at(FORMAT, tile, b);
    const SubScales s = sub_scales<FORMAT>(block);
    for (int g = 0; g < 8; g++) {
        F q[4];
        if constexpr (FORMAT == kQ6_K) {
            alignas(64) uint8_t bytes[64];
            six_bits(block.quant, block.high, g, bytes);
            unpack_bytes(bytes, q);
        } else if constexpr (FORMAT == kQ5_K) {
            alignas(64) uint8_t bytes[64];
            five_bits(block.quant, block.high, g, bytes);
            unpack_bytes(bytes, q);
        } else if (g < 4) {
            unpack_low(block.quant + 64 * g, q);
        } else {
            unpack_high(block.quant + 64 * (g - 4), q);
        }
        for (int i = 0; i < 4; i++) {
            if constexpr (FORMAT == kQ6_K) {
                q[i] = mul(sub(q[i], s.min), g < 4 ? s.first : s.second);
            } else {
                q[i] = sub(mul(q[i], s.first), s.min);
            }
            use(4 * g + i, q[i]);
        }
    }
}

// Formats whose blocks have minima of their own.
template <int FORMAT>
constexpr bool kMins = FORMAT == kQ4_1 || FORMAT == kQ5_1;

// What is taken off the levels of a format without minima.
template <int FORMAT>
constexpr float kZeroLevel = FORMAT == kQ4_0   ? 8
                             : FORMAT == kQ5_0 ? 16
                                               : 0;

// Calls use(column, weights) for the 32 columns of a block in order, expanded with GGUF's roundings: x = q d
// + m, or (q - kZeroLevel) d.
template <int FORMAT, class Use>
static inline void expand(const uint8_t* tile, int64_t b, Use use) {
    const Block block = block_at(FORMAT, tile, b);
    const F d = load_f16(block.scale);
    F m;
    if constexpr (FORMAT != kQ8_0) m = kMins<FORMAT> ? load_f16(block.min) : set1(kZeroLevel<FORMAT>);
    for (int g = 0; g < 8; g++) {
        F q[4];
        if constexpr (FORMAT == kQ8_0) {
            unpack_bytes(block.quant + 64 * g, q);
        } else if constexpr (FORMAT == kQ5_0 || FORMAT == kQ5_1) {
            alignas(64) uint8_t bytes[64];
            five_bits(block.quant, block.high, g, bytes);
            unpack_bytes(bytes, q);
        } else if (g < 4) {
            unpack_low(block.quant + 64 * g, q);
        } else {
            unpack_high(block.quant + 64 * (g - 4), q);
        }
        for (int i = 0; i < 4; i++) {
            if constexpr (kMins<FORMAT>) {
                q[i] = add(mul(q[i], d), m);
            } else if constexpr (FORMAT == kQ8_0) {
                q[i] = mul(q[i], d);
            } else {
                q[i] = mul(sub(q[i], m), d);
            }
            use(4 * g + i, q[i]);
        }
    }
}

}  // namespace pega::PEGA_ISA

#include "groups.h"

namespace pega::PEGA_ISA {

template <int FORMAT>
constexpr bool kSupers = FORMAT == kQ4_K || FORMAT == kQ5_K || FORMAT == kQ6_K;

template <int FORMAT, class Use>
static inline void expand_any(const Packed& w, const uint8_t* tile, int64_t b, Use use) {
    if constexpr (FORMAT == kFp8) {
        expand_fp8(w, tile, b, use);
    } else if constexpr (kTables<FORMAT>) {
        expand_table<FORMAT>(w, tile, b, use);
    } else if constexpr (kSupers<FORMAT>) {
        expand_super<FORMAT>(tile, b, use);
    } else {
        expand<FORMAT>(tile, b, use);
    }
}

template <int MR, int FORMAT>
static void expand_rows(const Packed& w, const uint8_t* tile, const float* x, int64_t ldx, float* acc) {
    F s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t b = 0; b < w.k / kBlock; b++, x += kBlock) {
        if constexpr (kSupers<FORMAT>) {
            prefetch_super<FORMAT>(tile, b);
        } else if constexpr (!kTables<FORMAT> && FORMAT != kFp8) {
            prefetch<FORMAT>(block_at(FORMAT, tile, b).quant);
        }
        expand_any<FORMAT>(w, tile, b, [&](int k, F v) {
            PEGA_UNROLL
            for (int t = 0; t < MR; t++) s[t] = fma(v, set1(x[t * ldx + k]), s[t]);
        });
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

// A quantised tile meets few rows as it is expanded; for many it is expanded once, into scratch.
template <int FORMAT>
static void expand_and_fma(const Packed& w, const uint8_t* tile, const float* x, int64_t ldx, int64_t nt,
                           float* acc, float* scratch) {
    if (nt == 1) return expand_rows<1, FORMAT>(w, tile, x, ldx, acc);
    if (nt == 2) return expand_rows<2, FORMAT>(w, tile, x, ldx, acc);
    if (nt == 3) return expand_rows<3, FORMAT>(w, tile, x, ldx, acc);
    for (int64_t k = 0; k < w.k; k += kDecodeColumns) {
        const int64_t columns = w.k - k < kDecodeColumns ? w.k - k : kDecodeColumns;
        for (int64_t b = 0; b < columns / kBlock; b++) {
            float* to = scratch + 16 * kBlock * b;
            expand_any<FORMAT>(w, tile, k / kBlock + b, [to](int i, F v) { store(to + 16 * i, v); });
        }
        fma_all<false>(scratch, columns, x + k, ldx, nt, acc);
    }
}

static void gemm_f32(const Packed& w, int64_t tile, const float* x, int64_t ldx, int64_t nt, float* acc,
                     float* scratch) {
    for (int64_t t = 0; t < nt; t++) store(acc + 16 * t, zero());
    const uint8_t* p = w.tile(tile);
    switch (w.format) {
        case kF32:
            return fma_all<true>(reinterpret_cast<const float*>(p), w.k, x, ldx, nt, acc);
        case kF16:
            return fma_all<true>(reinterpret_cast<const F16Bits*>(p), w.k, x, ldx, nt, acc);
        case kBF16:
            return fma_pairs(reinterpret_cast<const uint16_t*>(p), w.k, x, ldx, nt, acc);
        case kQ8_0:
            return expand_and_fma<kQ8_0>(w, p, x, ldx, nt, acc, scratch);
        case kQ4_1:
            return expand_and_fma<kQ4_1>(w, p, x, ldx, nt, acc, scratch);
        case kQ4_K:
            return expand_and_fma<kQ4_K>(w, p, x, ldx, nt, acc, scratch);
        case kQ6_K:
            return expand_and_fma<kQ6_K>(w, p, x, ldx, nt, acc, scratch);
        case kQ5_0:
            return expand_and_fma<kQ5_0>(w, p, x, ldx, nt, acc, scratch);
        case kQ5_1:
            return expand_and_fma<kQ5_1>(w, p, x, ldx, nt, acc, scratch);
        case kQ5_K:
            return expand_and_fma<kQ5_K>(w, p, x, ldx, nt, acc, scratch);
        case kIQ4_NL:
            return expand_and_fma<kIQ4_NL>(w, p, x, ldx, nt, acc, scratch);
        case kIQ4_XS:
            return expand_and_fma<kIQ4_XS>(w, p, x, ldx, nt, acc, scratch);
        case kQ2_K:
            return expand_and_fma<kQ2_K>(w, p, x, ldx, nt, acc, scratch);
        case kQ3_K:
            return expand_and_fma<kQ3_K>(w, p, x, ldx, nt, acc, scratch);
        case kInt4:
            return expand_and_fma<kInt4>(w, p, x, ldx, nt, acc, scratch);
        case kInt8:
            return expand_and_fma<kInt8>(w, p, x, ldx, nt, acc, scratch);
        case kFp4_16:
            return expand_and_fma<kFp4_16>(w, p, x, ldx, nt, acc, scratch);
        case kFp4_32:
        case kMXFP4:
            return expand_and_fma<kFp4_32>(w, p, x, ldx, nt, acc, scratch);
        case kFp8:
            return expand_and_fma<kFp8>(w, p, x, ldx, nt, acc, scratch);
        default:
            return expand_and_fma<kQ4_0>(w, p, x, ldx, nt, acc, scratch);
    }
}

// Rows first … first + MR. Of a block, with d, m of the weight and s = scale of x:
//   sum (d q + m) · s x = s · (d · sum(q x) + m · sum(x)),   Q4_0: m = -8 d, Q5_0: m = -16 d.
template <int MR, int FORMAT>
static void dot_rows(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, float* acc) {
    const int64_t blocks = w.k / kBlock;
    const int8_t* xq = x.q + first * w.k;
    const float* xs = x.scale + first * blocks;
    const float* xsum = x.sum + first * blocks;
    F s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t b = 0; b < blocks; b++) {
        const Block block = block_at(FORMAT, tile, b);
        prefetch<FORMAT>(block.quant);
        F dot[MR];
        if constexpr (FORMAT == kQ8_0) {
            dot_q8<MR>(block.quant, xq + kBlock * b, w.k, dot);
        } else if constexpr (FORMAT == kQ5_0 || FORMAT == kQ5_1) {
            dot_q5<MR>(block.quant, block.high, xq + kBlock * b, w.k, dot);
        } else {
            dot_q4<MR>(block.quant, xq + kBlock * b, w.k, dot);
        }
        const F d = load_f16(block.scale);
        F m;
        if constexpr (kMins<FORMAT>) m = load_f16(block.min);
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            F v;
            if constexpr (kMins<FORMAT>) {
                v = fma(d, dot[t], mul(m, set1(xsum[t * blocks + b])));
            } else if constexpr (FORMAT == kQ8_0) {
                v = mul(d, dot[t]);
            } else {
                v = mul(d, sub(dot[t], set1(kZeroLevel<FORMAT> * xsum[t * blocks + b])));
            }
            s[t] = fma(set1(xs[t * blocks + b]), v, s[t]);
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

// The same for superblocks; q4_k and q5_k: d (sum q x) - m sum(x), q6_k: a scale for each half.
template <int MR, int FORMAT>
static void dot_super_rows(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first,
                           float* acc) {
    const int64_t blocks = w.k / kBlock;
    const int8_t* xq = x.q + first * w.k;
    const float* xs = x.scale + first * blocks;
    const float *xsum = x.sum + first * blocks, *xhalf = x.half + first * blocks;
    F s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t b = 0; b < blocks; b++) {
        const SubBlock block = sub_block_at(FORMAT, tile, b);
        prefetch_super<FORMAT>(tile, b);
        F dot[MR], second[MR];
        if constexpr (FORMAT == kQ4_K) {
            dot_q4<MR>(block.quant, xq + kBlock * b, w.k, dot);
        } else if constexpr (FORMAT == kQ5_K) {
            dot_q5<MR>(block.quant, block.high, xq + kBlock * b, w.k, dot);
        } else {
            dot_q6<MR>(block.quant, block.high, xq + kBlock * b, w.k, dot, second);
        }
        const SubScales d = sub_scales<FORMAT>(block);
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            const int64_t at = t * blocks + b;
            F v;
            if constexpr (FORMAT == kQ6_K) {
                v = mul(d.first, sub(dot[t], set1(32 * xhalf[at])));
                v = fma(d.second, sub(second[t], set1(32 * (xsum[at] - xhalf[at]))), v);
            } else {
                v = sub(mul(d.first, dot[t]), mul(d.min, set1(xsum[at])));
            }
            s[t] = fma(set1(xs[at]), v, s[t]);
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

constexpr int kDotRows = kMaxRows > 8 ? 8 : 4;  // tokens that share an unpacked block of nibbles

template <int MR, int FORMAT>
static void dot_rest(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, int64_t nt,
                     float* acc) {
    if (nt == MR) {
        if constexpr (kTables<FORMAT>) {
            return dot_table_rows<MR, FORMAT>(w, tile, x, first, acc);
        } else if constexpr (kSupers<FORMAT>) {
            return dot_super_rows<MR, FORMAT>(w, tile, x, first, acc);
        } else {
            return dot_rows<MR, FORMAT>(w, tile, x, first, acc);
        }
    }
    if constexpr (MR > 1) dot_rest<MR - 1, FORMAT>(w, tile, x, first, nt, acc);
}

template <int FORMAT>
static void dot_all(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, int64_t nt,
                    float* acc) {
    while (nt > 0) {
        const int64_t rows = rows_at_once(nt, kDotRows);
        dot_rest<kDotRows, FORMAT>(w, tile, x, first, rows, acc);
        nt -= rows;
        first += rows;
        acc += rows * 16;
    }
}

static void gemm_i8(const Packed& w, int64_t tile, const QuantRows& x, int64_t first, int64_t nt,
                    float* acc) {
    const uint8_t* p = w.tile(tile);
    switch (w.format) {
        case kQ8_0:
            return dot_all<kQ8_0>(w, p, x, first, nt, acc);
        case kQ4_1:
            return dot_all<kQ4_1>(w, p, x, first, nt, acc);
        case kQ4_K:
            return dot_all<kQ4_K>(w, p, x, first, nt, acc);
        case kQ6_K:
            return dot_all<kQ6_K>(w, p, x, first, nt, acc);
        case kQ5_0:
            return dot_all<kQ5_0>(w, p, x, first, nt, acc);
        case kQ5_1:
            return dot_all<kQ5_1>(w, p, x, first, nt, acc);
        case kQ5_K:
            return dot_all<kQ5_K>(w, p, x, first, nt, acc);
        case kIQ4_NL:
            return dot_all<kIQ4_NL>(w, p, x, first, nt, acc);
        case kIQ4_XS:
            return dot_all<kIQ4_XS>(w, p, x, first, nt, acc);
        case kQ2_K:
            return dot_all<kQ2_K>(w, p, x, first, nt, acc);
        case kQ3_K:
            return dot_all<kQ3_K>(w, p, x, first, nt, acc);
        case kInt4:
            return dot_all<kInt4>(w, p, x, first, nt, acc);
        case kInt8:
            return dot_all<kInt8>(w, p, x, first, nt, acc);
        case kFp4_16:
            return dot_all<kFp4_16>(w, p, x, first, nt, acc);
        case kFp4_32:
        case kMXFP4:
            return dot_all<kFp4_32>(w, p, x, first, nt, acc);
        default:
            return dot_all<kQ4_0>(w, p, x, first, nt, acc);
    }
}

}  // namespace pega::PEGA_ISA
