// Products with weights whose nibbles number the entries of a table (iq4, fp4, q2_k, q3_k), with int4 and
// int8 in groups that have zero points, and with fp8. gemm.h calls these as it calls its own for the other
// formats.
#pragma once

namespace pega::PEGA_ISA {

#ifndef PEGA_NATIVE_TABLE
constexpr int kTableBias = 0;

// first[t] lane r = sum over a block's first sixteen columns of table[q[r]] · x[t], second[t] over the
// others; x[t] at x + t · stride. An instruction set may multiply table entries plus kTableBias instead.
template <int MR>
static inline void dot_table(const uint8_t* w, const int8_t* table, const int8_t* x, int64_t stride,
                             F (&first)[MR], F (&second)[MR]) {
    alignas(64) uint8_t q[768] = {};  // zeros on both sides of either half
    for (int i = 0; i < 256; i++) q[256 + i] = static_cast<uint8_t>(table[w[i] & 15]);
    dot_q8<MR>(q + 256, x, stride, first);
    for (int i = 0; i < 256; i++) q[256 + i] = static_cast<uint8_t>(table[w[i] >> 4]);
    dot_q8<MR>(q, x, stride, second);
}

// Sixteen words of int4 and int8: float32 scales, whose low bytes are zero points.
static inline void split_words(const uint8_t* p, F& scale, F& zero) {
    float s[16], z[16];
    for (int i = 0; i < 16; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, p + 4 * i, 4);
        s[i] = bits_to_float(bits & ~255u);
        z[i] = static_cast<float>(bits & 255u);
    }
    scale = load(s);
    zero = load(z);
}
#endif

template <int FORMAT>
constexpr bool kInts = FORMAT == kInt4 || FORMAT == kInt8;

// Formats that the functions of this file serve.
template <int FORMAT>
constexpr bool kTables = FORMAT >= kIQ4_NL && FORMAT <= kFp4_32;

template <int FORMAT>
constexpr const int8_t* kTableOf = FORMAT == kIQ4_NL || FORMAT == kIQ4_XS ? kIQ4Table
                                   : FORMAT == kQ2_K                      ? kQ2Table
                                   : FORMAT == kQ3_K                      ? kQ3Table
                                                                          : kFp4Table;

// Formats with a scale for either half of a block.
template <int FORMAT>
constexpr bool kHalves = FORMAT == kQ2_K || FORMAT == kQ3_K || FORMAT == kFp4_16;

// A block and what its levels are multiplied with. first, second: scales of its halves, equal where kHalves
// does not hold. min, min2: what is taken off: of ints the zero point, before scaling; of q2_k the minima.
struct TableBlock {
    const uint8_t* quant;
    F first, second, min, min2;
};

template <int FORMAT>
static inline TableBlock table_block(const Packed& w, const uint8_t* tile, int64_t b) {
    TableBlock to;
    if constexpr (FORMAT == kIQ4_NL) {
        const Block block = block_at(FORMAT, tile, b);
        to.quant = block.quant;
        to.first = to.second = load_f16(block.scale);
    } else if constexpr (FORMAT >= kInt4) {
        const GroupBlock block = group_block_at(FORMAT, kInts<FORMAT> ? w.shift : 0, tile, b);
        const auto* scales = reinterpret_cast<const float*>(block.words);
        to.quant = block.quant;
        if constexpr (kInts<FORMAT>) {
            split_words(block.words, to.first, to.min);
        } else {
            to.first = to.second = load(scales);
            if constexpr (FORMAT == kFp4_16) to.second = load(scales + 16);
        }
    } else {
        const SubBlock block = sub_block_at(FORMAT, tile, b);
        const F d = load_f16(block.scale);
        to.quant = block.quant;
        if constexpr (FORMAT == kQ2_K) {
            uint8_t low[32], high[32];
            for (int i = 0; i < 32; i++) low[i] = block.scales[i] & 15, high[i] = block.scales[i] >> 4;
            const F dmin = load_f16(block.min);
            to.first = mul(d, widen_u8(low));
            to.second = mul(d, widen_u8(low + 16));
            to.min = mul(dmin, widen_u8(high));
            to.min2 = mul(dmin, widen_u8(high + 16));
        } else {
            const auto* scales = reinterpret_cast<const int8_t*>(block.scales);
            to.first = to.second = mul(d, widen_i8(scales));
            if constexpr (kHalves<FORMAT>) to.second = mul(d, widen_i8(scales + 16));
        }
    }
    return to;
}

// `expand` (gemm.h) for these formats.
template <int FORMAT, class Use>
static inline void expand_table(const Packed& w, const uint8_t* tile, int64_t b, Use use) {
    const TableBlock block = table_block<FORMAT>(w, tile, b);
    for (int g = 0; g < 8; g++) {
        alignas(64) uint8_t bytes[64];
        F q[4];
        if constexpr (FORMAT == kInt8) {
            unpack_bytes(block.quant + 64 * g, q);
        } else if constexpr (FORMAT == kInt4) {
            if (g < 4) {
                unpack_low(block.quant + 64 * g, q);
            } else {
                unpack_high(block.quant + 64 * (g - 4), q);
            }
        } else {
            const uint8_t* nibbles = block.quant + 64 * (g % 4);
            for (int i = 0; i < 64; i++)
                bytes[i] = static_cast<uint8_t>(kTableOf<FORMAT>[nibbles[i] >> (g < 4 ? 0 : 4) & 15]);
            unpack_bytes(bytes, q);
        }
        const F scale = g < 4 || kInts<FORMAT> ? block.first : block.second;
        for (int i = 0; i < 4; i++) {
            if constexpr (FORMAT == kInt8) q[i] = add(q[i], set1(128));  // exact: whole numbers
            if constexpr (kInts<FORMAT>) q[i] = sub(q[i], block.min);
            q[i] = mul(q[i], scale);
            if constexpr (FORMAT == kQ2_K) q[i] = sub(q[i], g < 4 ? block.min : block.min2);
            use(4 * g + i, q[i]);
        }
    }
}

// `expand` for fp8. The scale takes the factor that e4m3_to_half leaves, so that a product is rounded once.
template <class Use>
static inline void expand_fp8(const Packed& w, const uint8_t* tile, int64_t b, Use use) {
    const GroupBlock block = group_block_at(kFp8, w.shift, tile, b);
    const F scale = mul(load(reinterpret_cast<const float*>(block.words)), set1(kHalfOfE4M3));
    for (int i = 0; i < 9; i++) __builtin_prefetch(block.quant + kAhead + 64 * i, 0, 3);
    for (int k = 0; k < kBlock; k++) {
        alignas(32) uint16_t halves[kTile];
        for (int r = 0; r < kTile; r++) halves[r] = e4m3_to_half(block.quant[kTile * k + r]);
        use(k, mul(load_f16(halves), scale));
    }
}

template <int FORMAT>
static inline void prefetch_table(const uint8_t* quant) {
    constexpr int kLines = FORMAT == kInt8 ? 9 : FORMAT == kFp4_16 ? 6 : 5;
    for (int i = 0; i < kLines; i++) __builtin_prefetch(quant + kAhead + 64 * i, 0, 3);
}

// `dot_rows` (gemm.h) for these formats. Sums of a block are whole numbers below 2^24, exact in float32.
template <int MR, int FORMAT>
static void dot_table_rows(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first,
                           float* acc) {
    const int64_t blocks = w.k / kBlock;
    const int8_t* xq = x.q + first * w.k;
    const float* xs = x.scale + first * blocks;
    const float *xsum = x.sum + first * blocks, *xhalf = x.half + first * blocks;
    F s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t b = 0; b < blocks; b++) {
        F dot[MR], second[MR];
        const TableBlock block = table_block<FORMAT>(w, tile, b);
        prefetch_table<FORMAT>(block.quant);
        if constexpr (FORMAT == kInt4) {
            dot_q4<MR>(block.quant, xq + kBlock * b, w.k, dot);
        } else if constexpr (FORMAT == kInt8) {
            dot_q8<MR>(block.quant, xq + kBlock * b, w.k, dot);
        } else {
            dot_table<MR>(block.quant, kTableOf<FORMAT>, xq + kBlock * b, w.k, dot, second);
        }
        F zero_point{};
        if constexpr (kInts<FORMAT>) zero_point = FORMAT == kInt8 ? sub(block.min, set1(128)) : block.min;
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            const int64_t at = t * blocks + b;
            const float sum = xsum[at], half = xhalf[at], rest = sum - half;
            F v;
            if constexpr (kInts<FORMAT>) {
                v = mul(block.first, sub(dot[t], mul(zero_point, set1(sum))));
            } else if constexpr (kHalves<FORMAT>) {
                v = mul(block.first, sub(dot[t], set1(kTableBias * half)));
                v = fma(block.second, sub(second[t], set1(kTableBias * rest)), v);
                if constexpr (FORMAT == kQ2_K)
                    v = sub(v, fma(block.min, set1(half), mul(block.min2, set1(rest))));
            } else {
                v = mul(block.first, sub(add(dot[t], second[t]), set1(kTableBias * sum)));
            }
            s[t] = fma(set1(xs[at]), v, s[t]);
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

}  // namespace pega::PEGA_ISA
