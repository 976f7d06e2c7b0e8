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
struct BF16Bits {
    uint16_t bits;
};
static inline F load_element(const F16Bits* p) {
    return load_f16(&p->bits);
}
static inline F load_element(const BF16Bits* p) {
    return load_bf16(&p->bits);
}

// acc[t] += x[t] · w over `columns` columns.
template <int MR, class E>
static void fma_rows(const E* w, int64_t columns, const float* x, int64_t ldx, float* acc) {
    F s[MR];
    for (int t = 0; t < MR; t++) s[t] = load(acc + 16 * t);
    for (int64_t k = 0; k < columns; k++) {
        const F v = load_element(w + 16 * k);
        for (int t = 0; t < MR; t++) s[t] = fma(v, set1(x[t * ldx + k]), s[t]);
    }
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

template <int MR, class E>
static void fma_rest(const E* w, int64_t columns, const float* x, int64_t ldx, int64_t nt, float* acc) {
    if (nt == MR) return fma_rows<MR>(w, columns, x, ldx, acc);
    if constexpr (MR > 1) fma_rest<MR - 1>(w, columns, x, ldx, nt, acc);
}

template <class E>
static void fma_all(const E* w, int64_t columns, const float* x, int64_t ldx, int64_t nt, float* acc) {
    for (; nt > kMaxRows; nt -= kMaxRows, x += kMaxRows * ldx, acc += kMaxRows * 16)
        fma_rows<kMaxRows>(w, columns, x, ldx, acc);
    fma_rest<kMaxRows>(w, columns, x, ldx, nt, acc);
}

// Columns k0 … k0 + columns of a quantised tile as float32 [columns, 16], with GGUF's roundings.
static void decode(const Packed& w, const uint8_t* tile, int64_t k0, int64_t columns, float* out) {
    const auto* scales = reinterpret_cast<const uint16_t*>(tile + w.scales_at);
    const auto* mins = reinterpret_cast<const uint16_t*>(tile + w.mins_at);
    for (int64_t b = k0 / kBlock; b < (k0 + columns) / kBlock; b++) {
        const F d = load_f16(scales + 16 * b);
        if (w.format == kQ8_0) {
            const uint8_t* q = tile + w.data_at + 512 * b;
            for (int g = 0; g < 8; g++, q += 64)
                for (int i = 0; i < 4; i++, out += 16) store(out, mul(signed_byte(q, i), d));
            continue;
        }
        const uint8_t* q = tile + w.data_at + 256 * b;
        const bool has_min = w.format == kQ4_1;
        const F m = has_min ? load_f16(mins + 16 * b) : zero();
        const F eight = set1(8);
        for (int j = 0; j < 4; j++, q += 64)
            for (int i = 0; i < 4; i++, out += 16) {
                const F low = low_nibble(q, i), high = high_nibble(q, i);
                store(out, has_min ? add(mul(low, d), m) : mul(sub(low, eight), d));
                store(out + 256, has_min ? add(mul(high, d), m) : mul(sub(high, eight), d));
            }
        out += 256;
    }
}

static void gemm_f32(const Packed& w, int64_t tile, const float* x, int64_t ldx, int64_t nt, float* acc,
                     float* scratch) {
    for (int64_t t = 0; t < nt; t++) store(acc + 16 * t, zero());
    const uint8_t* p = w.tile(tile);
    switch (w.format) {
        case kF32:
            return fma_all(reinterpret_cast<const float*>(p), w.k, x, ldx, nt, acc);
        case kF16:
            return fma_all(reinterpret_cast<const F16Bits*>(p), w.k, x, ldx, nt, acc);
        case kBF16:
            return fma_all(reinterpret_cast<const BF16Bits*>(p), w.k, x, ldx, nt, acc);
        default:
            for (int64_t k = 0; k < w.k; k += kDecodeColumns) {
                const int64_t columns = w.k - k < kDecodeColumns ? w.k - k : kDecodeColumns;
                decode(w, p, k, columns, scratch);
                fma_all(scratch, columns, x + k, ldx, nt, acc);
            }
    }
}

// Rows first … first + MR. Of a block, with d, m of the weight and s = scale of x:
//   sum (d q + m) · s x = s · (d · sum(q x) + m · sum(x)),   Q4_0: m = -8 d.
template <int MR, int FORMAT>
static void dot_rows(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, float* acc) {
    const int64_t blocks = w.k / kBlock;
    const auto* scales = reinterpret_cast<const uint16_t*>(tile + w.scales_at);
    const auto* mins = reinterpret_cast<const uint16_t*>(tile + w.mins_at);
    const uint8_t* q = tile + w.data_at;
    const int8_t* xq = x.q + first * w.k;
    const float* xs = x.scale + first * blocks;
    const float* xsum = x.sum + first * blocks;
    F s[MR];
    for (int t = 0; t < MR; t++) s[t] = zero();
    for (int64_t b = 0; b < blocks; b++) {
        F dot[MR];
        if constexpr (FORMAT == kQ8_0) {
            dot_q8<MR>(q + 512 * b, xq + kBlock * b, w.k, dot);
        } else {
            dot_q4<MR>(q + 256 * b, xq + kBlock * b, w.k, dot);
        }
        const F d = load_f16(scales + 16 * b);
        F m;
        if constexpr (FORMAT == kQ4_1) m = load_f16(mins + 16 * b);
        for (int t = 0; t < MR; t++) {
            F v;
            if constexpr (FORMAT == kQ4_1) {
                v = fma(d, dot[t], mul(m, set1(xsum[t * blocks + b])));
            } else if constexpr (FORMAT == kQ4_0) {
                v = mul(d, sub(dot[t], set1(8 * xsum[t * blocks + b])));
            } else {
                v = mul(d, dot[t]);
            }
            s[t] = fma(set1(xs[t * blocks + b]), v, s[t]);
        }
    }
    for (int t = 0; t < MR; t++) store(acc + 16 * t, s[t]);
}

constexpr int kDotRows = kMaxRows > 8 ? 8 : 4;  // tokens that share an unpacked block of nibbles

template <int MR, int FORMAT>
static void dot_rest(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, int64_t nt,
                     float* acc) {
    if (nt == MR) return dot_rows<MR, FORMAT>(w, tile, x, first, acc);
    if constexpr (MR > 1) dot_rest<MR - 1, FORMAT>(w, tile, x, first, nt, acc);
}

template <int FORMAT>
static void dot_all(const Packed& w, const uint8_t* tile, const QuantRows& x, int64_t first, int64_t nt,
                    float* acc) {
    for (; nt > kDotRows; nt -= kDotRows, first += kDotRows, acc += kDotRows * 16)
        dot_rows<kDotRows, FORMAT>(w, tile, x, first, acc);
    dot_rest<kDotRows, FORMAT>(w, tile, x, first, nt, acc);
}

static void gemm_i8(const Packed& w, int64_t tile, const QuantRows& x, int64_t first, int64_t nt,
                    float* acc) {
    const uint8_t* p = w.tile(tile);
    switch (w.format) {
        case kQ8_0:
            return dot_all<kQ8_0>(w, p, x, first, nt, acc);
        case kQ4_1:
            return dot_all<kQ4_1>(w, p, x, first, nt, acc);
        default:
            return dot_all<kQ4_0>(w, p, x, first, nt, acc);
    }
}

}  // namespace pega::PEGA_ISA
