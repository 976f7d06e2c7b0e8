// Sixteen float lanes as two AVX registers (AVX2, FMA, F16C).
#pragma once

#include <immintrin.h>

#include "../kernels.h"

namespace pega::PEGA_ISA {

constexpr int kMaxRows = 6;  // 6 × 2 accumulators, 2 weights and a broadcast: 15 of 16 registers

struct F {
    __m256 a, b;
};

static inline F zero() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
static inline F set1(float x) {
    const __m256 v = _mm256_set1_ps(x);
    return {v, v};
}
static inline F load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
static inline __m128i load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
static inline __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static inline F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))};
}
// See e4m3_to_float.
static inline F load_e4m3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi16(load128(p)), ones = _mm256_set1_epi16(0x7f);
    const __m256i magnitude = _mm256_and_si256(x, ones);
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, ones), _mm256_set1_epi16(0x7c00));
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(ones, x), 8);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
    const __m256 by = _mm256_set1_ps(256);
    return {_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), by),
            _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), by)};
}
#define PEGA_NATIVE_PAIRS

// Two columns of bf16, [16][2].
static inline void load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const __m256i a = load256(p), b = load256(p + 16),
                  high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
static inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline F add(F x, F y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
static inline F sub(F x, F y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
static inline F mul(F x, F y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
static inline F div(F x, F y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
static inline F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F max(F x, F y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
static inline F min(F x, F y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
static inline F abs(F x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
static inline F round(F x) {
    constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, kMode), _mm256_round_ps(x.b, kMode)};
}
// 2^n for whole n in -126 … 127.
static inline __m256 pow2(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F pow2(F n) {
    return {pow2(n.a), pow2(n.b)};
}
// Lanes from `count` on become `other`.
static inline F keep_first(F x, int64_t count, float other) {
    const __m256i c = _mm256_set1_epi32(static_cast<int>(count)),
                  o = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 ma = _mm256_castsi256_ps(_mm256_cmpgt_epi32(c, o));
    const __m256 mb = _mm256_castsi256_ps(_mm256_cmpgt_epi32(c, _mm256_add_epi32(o, _mm256_set1_epi32(8))));
    const __m256 v = _mm256_set1_ps(other);
    return {_mm256_blendv_ps(v, x.a, ma), _mm256_blendv_ps(v, x.b, mb)};
}
// Lanes 8 apart, then 4, 2, 1.
static inline float reduce_add(F x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
static inline float reduce_max(F x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
static inline bool any_nan(F x) {
    const __m256 a = _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), b = _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}
// 2^-f for f in [0, 1) in fixed point, from the last coefficient to the first (ops/draw.py).
constexpr uint64_t kExp2[] = {234126, 2737501, 20571132, 119165494, 515877902, 1488521986, 2147483648};

// 2^40 · 2^-y, cut to whole numbers; y in 0 … 63.
static inline void store_weights(uint64_t* p, F y) {
    for (int half = 0; half < 2; half++) {
        const __m256 v = half == 0 ? y.a : y.b;
        const __m256i whole = _mm256_cvttps_epi32(v);
        const __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(whole));
        const __m256i fraction = _mm256_cvttps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(2147483648.0f)));
        for (int q = 0; q < 2; q++, p += 4) {
            const __m256i f = _mm256_cvtepu32_epi64(q == 0 ? _mm256_castsi256_si128(fraction)
                                                           : _mm256_extracti128_si256(fraction, 1));
            const __m256i shift = _mm256_cvtepu32_epi64(q == 0 ? _mm256_castsi256_si128(whole)
                                                               : _mm256_extracti128_si256(whole, 1));
            __m256i m = _mm256_set1_epi64x(kExp2[0]);
            for (int c = 1; c < 7; c++)
                m = _mm256_sub_epi64(_mm256_set1_epi64x(kExp2[c]),
                                     _mm256_srli_epi64(_mm256_mul_epu32(m, f), 31));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                                _mm256_srlv_epi64(_mm256_slli_epi64(m, 9), shift));
        }
    }
}
// One bit for each lane where x ≥ y.
static inline uint32_t at_least(F x, F y) {
    const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ));
    const int b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ));
    return static_cast<uint32_t>(a | b << 8);
}
// Whole-number lanes to 16 int8.
static inline void store_i8(int8_t* p, F x) {
    const __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    const __m256i ordered = _mm256_permute4x64_epi64(w, 0xd8);
    const __m128i b = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), b);
}

static inline __m256 to_float(__m256i x) {
    return _mm256_cvtepi32_ps(x);
}

// Element i of each lane's four bytes as a number, for i in 0 … 3: low nibbles, high nibbles, signed bytes.
static inline void unpack_half(__m256i q, __m256 (&out)[4]) {
    const __m256i m = _mm256_set1_epi32(15);
    out[0] = to_float(_mm256_and_si256(q, m));
    out[1] = to_float(_mm256_and_si256(_mm256_srli_epi32(q, 8), m));
    out[2] = to_float(_mm256_and_si256(_mm256_srli_epi32(q, 16), m));
    out[3] = to_float(_mm256_and_si256(_mm256_srli_epi32(q, 24), m));
}
static inline void unpack_both(__m256i q, __m256i r, F (&out)[4]) {
    __m256 a[4], b[4];
    unpack_half(q, a);
    unpack_half(r, b);
    for (int i = 0; i < 4; i++) out[i] = {a[i], b[i]};
}
static inline void unpack_low(const uint8_t* p, F (&out)[4]) {
    unpack_both(load256(p), load256(p + 32), out);
}
static inline void unpack_high(const uint8_t* p, F (&out)[4]) {
    unpack_both(_mm256_srli_epi32(load256(p), 4), _mm256_srli_epi32(load256(p + 32), 4), out);
}
static inline void unpack_bytes(const uint8_t* p, F (&out)[4]) {
    const __m256i a = load256(p), b = load256(p + 32);
    out[0] = {to_float(_mm256_srai_epi32(_mm256_slli_epi32(a, 24), 24)),
              to_float(_mm256_srai_epi32(_mm256_slli_epi32(b, 24), 24))};
    out[1] = {to_float(_mm256_srai_epi32(_mm256_slli_epi32(a, 16), 24)),
              to_float(_mm256_srai_epi32(_mm256_slli_epi32(b, 16), 24))};
    out[2] = {to_float(_mm256_srai_epi32(_mm256_slli_epi32(a, 8), 24)),
              to_float(_mm256_srai_epi32(_mm256_slli_epi32(b, 8), 24))};
    out[3] = {to_float(_mm256_srai_epi32(a, 24)), to_float(_mm256_srai_epi32(b, 24))};
}

static inline __m256i broadcast4(const int8_t* p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

// Holds the compiler to the order that is written and to registers: left to itself, gcc 12 computes all
// products of a block first and spills them.
#define PEGA_KEEP(x, y) __asm__ volatile("" : "+x"(x), "+x"(y))

// out[t] lane r = sum over a block of q[r] · x[t]; x[t] at x + t · stride.
// Eight products of 15 · 127 · 2 sum to 30,480: 16 bits hold a whole block.
template <int MR>
static inline void dot_q4(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i sa[MR], sb[MR];
    for (int t = 0; t < MR; t++) sa[t] = sb[t] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++, w += 64, x += 4) {
        __m256i a = _mm256_and_si256(load256(w), mask), b = _mm256_and_si256(load256(w + 32), mask);
        for (int t = 0; t < MR; t++) {
            const __m256i v = broadcast4(x + t * stride);
            sa[t] = _mm256_add_epi16(sa[t], _mm256_maddubs_epi16(a, v));
            sb[t] = _mm256_add_epi16(sb[t], _mm256_maddubs_epi16(b, v));
            PEGA_KEEP(sa[t], sb[t]);
        }
        a = _mm256_and_si256(_mm256_srli_epi16(load256(w), 4), mask);
        b = _mm256_and_si256(_mm256_srli_epi16(load256(w + 32), 4), mask);
        for (int t = 0; t < MR; t++) {
            const __m256i v = broadcast4(x + t * stride + 16);
            sa[t] = _mm256_add_epi16(sa[t], _mm256_maddubs_epi16(a, v));
            sb[t] = _mm256_add_epi16(sb[t], _mm256_maddubs_epi16(b, v));
            PEGA_KEEP(sa[t], sb[t]);
        }
    }
    for (int t = 0; t < MR; t++)
        out[t] = {to_float(_mm256_madd_epi16(sa[t], ones)), to_float(_mm256_madd_epi16(sb[t], ones))};
}

// maddubs wants one factor unsigned: |w| and x with w's sign. 128 · 127 · 2 still fits 16 bits.
template <int MR>
static inline void dot_q8(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sa[MR], sb[MR];
    for (int t = 0; t < MR; t++) sa[t] = sb[t] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int g = 0; g < 8; g++, w += 64, x += 4) {
        const __m256i a = load256(w), b = load256(w + 32);
        const __m256i aa = _mm256_abs_epi8(a), ab = _mm256_abs_epi8(b);
        for (int t = 0; t < MR; t++) {
            const __m256i v = broadcast4(x + t * stride);
            const __m256i pa = _mm256_maddubs_epi16(aa, _mm256_sign_epi8(v, a));
            const __m256i pb = _mm256_maddubs_epi16(ab, _mm256_sign_epi8(v, b));
            sa[t] = _mm256_add_epi32(sa[t], _mm256_madd_epi16(pa, ones));
            sb[t] = _mm256_add_epi32(sb[t], _mm256_madd_epi16(pb, ones));
            PEGA_KEEP(sa[t], sb[t]);
        }
    }
    for (int t = 0; t < MR; t++) out[t] = {to_float(sa[t]), to_float(sb[t])};
}

#define PEGA_NATIVE_K

// Sixteen bytes as numbers.
static inline F widen_u8(const uint8_t* p) {
    const __m128i b = load128(p);
    return {to_float(_mm256_cvtepu8_epi32(b)), to_float(_mm256_cvtepu8_epi32(_mm_srli_si128(b, 8)))};
}
static inline F widen_i8(const int8_t* p) {
    const __m128i b = load128(p);
    return {to_float(_mm256_cvtepi8_epi32(b)), to_float(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}

// out[t] lane r = sum over a block of q[r] · x[t]; q is 0 … 31 and x[t] at x + t · stride.
// Four sums of 31 · 127 · 2 come to 31,496: 16 bits hold half a block.
template <int MR>
static inline void dot_q5(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&out)[MR]) {
    const __m256i nibble = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(16), ones = _mm256_set1_epi16(1);
    __m256i bits_a = _mm256_slli_epi32(load256(high), 4), bits_b = _mm256_slli_epi32(load256(high + 32), 4);
    __m256i s[MR], u[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = u[t] = _mm256_setzero_si256();
    for (int half = 0; half < 2; half++) {
        const __m128i down = _mm_cvtsi32_si128(4 * half);
        __m256i sa[MR], sb[MR];
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) sa[t] = sb[t] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++) {
            const __m128i turn = _mm_cvtsi32_si128(j);  // the bits of these columns stand at bit 4 + j
            const auto five = [&](const uint8_t* p, __m256i h) {
                const __m256i n = _mm256_and_si256(_mm256_srl_epi16(load256(p), down), nibble);
                const __m256i moved = _mm256_srl_epi32(h, turn);
                return _mm256_or_si256(n, _mm256_and_si256(moved, bit));
            };
            const __m256i a = five(low + 64 * j, bits_a), b = five(low + 64 * j + 32, bits_b);
            PEGA_UNROLL
            for (int t = 0; t < MR; t++) {
                const __m256i v = broadcast4(x + t * stride + 16 * half + 4 * j);
                sa[t] = _mm256_add_epi16(sa[t], _mm256_maddubs_epi16(a, v));
                sb[t] = _mm256_add_epi16(sb[t], _mm256_maddubs_epi16(b, v));
                PEGA_KEEP(sa[t], sb[t]);
            }
        }
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            s[t] = _mm256_add_epi32(s[t], _mm256_madd_epi16(sa[t], ones));
            u[t] = _mm256_add_epi32(u[t], _mm256_madd_epi16(sb[t], ones));
        }
        bits_a = load256(high);
        bits_b = load256(high + 32);
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) out[t] = {to_float(s[t]), to_float(u[t])};
}

// 4 products of 63 · 127 · 2 would pass 16 bits: two at a time are summed there.
template <int MR>
static inline void dot_six(const uint8_t* low, const uint8_t* high, int side, const int8_t* x, int64_t stride,
                           F (&out)[MR]) {
    const __m256i nibble = _mm256_set1_epi8(15), pair = _mm256_set1_epi8(48), ones = _mm256_set1_epi16(1);
    const __m128i down = _mm_cvtsi32_si128(side);
    __m256i sa[MR], sb[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) sa[t] = sb[t] = _mm256_setzero_si256();
    __m256i ha = _mm256_slli_epi16(load256(high), 4), hb = _mm256_slli_epi16(load256(high + 32), 4);
    __m256i na = load256(high), nb = load256(high + 32);  // the pairs of columns 8 …, two bits too low
    for (int j = 0; j < 4; j += 2, low += 128, x += 8) {
        const __m256i ha2 = j == 0 ? _mm256_slli_epi16(na, 2) : _mm256_srli_epi16(na, 2);
        const __m256i hb2 = j == 0 ? _mm256_slli_epi16(nb, 2) : _mm256_srli_epi16(nb, 2);
        const auto six = [&](const uint8_t* p, __m256i h) {
            const __m256i n = _mm256_and_si256(_mm256_srl_epi16(load256(p), down), nibble);
            return _mm256_or_si256(n, _mm256_and_si256(h, pair));
        };
        const __m256i a = six(low, ha), b = six(low + 32, hb), c = six(low + 64, ha2), d = six(low + 96, hb2);
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            const __m256i v = broadcast4(x + t * stride), u = broadcast4(x + t * stride + 4);
            const __m256i pa = _mm256_add_epi16(_mm256_maddubs_epi16(a, v), _mm256_maddubs_epi16(c, u));
            const __m256i pb = _mm256_add_epi16(_mm256_maddubs_epi16(b, v), _mm256_maddubs_epi16(d, u));
            sa[t] = _mm256_add_epi32(sa[t], _mm256_madd_epi16(pa, ones));
            sb[t] = _mm256_add_epi32(sb[t], _mm256_madd_epi16(pb, ones));
            PEGA_KEEP(sa[t], sb[t]);
        }
        ha = na;
        hb = nb;
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) out[t] = {to_float(sa[t]), to_float(sb[t])};
}

// first[t] lane r = sum over a block's first sixteen columns of q[r] · x[t], second[t] over the others; q is
// 0 … 63 and x[t] at x + t · stride.
template <int MR>
static inline void dot_q6(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&first)[MR], F (&second)[MR]) {
    dot_six<MR>(low, high, 0, x, stride, first);
    dot_six<MR>(low, high + 64, 4, x + 16, stride, second);
}

#define PEGA_NATIVE_TABLE
constexpr int kTableBias = 0;

// first[t] lane r = sum over a block's first sixteen columns of table[q[r]] · x[t], second[t] over the
// others; x[t] at x + t · stride. Signs as in dot_q8.
template <int MR>
static inline void dot_table(const uint8_t* w, const int8_t* table, const int8_t* x, int64_t stride,
                             F (&first)[MR], F (&second)[MR]) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const __m256i entries = _mm256_broadcastsi128_si256(load128(table));
    for (int half = 0; half < 2; half++) {
        const __m128i down = _mm_cvtsi32_si128(4 * half);
        __m256i sa[MR], sb[MR];
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) sa[t] = sb[t] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++) {
            const auto values = [&](const uint8_t* p) {
                const __m256i n = _mm256_and_si256(_mm256_srl_epi16(load256(p), down), mask);
                return _mm256_shuffle_epi8(entries, n);
            };
            const __m256i a = values(w + 64 * j), b = values(w + 64 * j + 32);
            const __m256i aa = _mm256_abs_epi8(a), ab = _mm256_abs_epi8(b);
            PEGA_UNROLL
            for (int t = 0; t < MR; t++) {
                const __m256i v = broadcast4(x + t * stride + 16 * half + 4 * j);
                const __m256i pa = _mm256_maddubs_epi16(aa, _mm256_sign_epi8(v, a));
                const __m256i pb = _mm256_maddubs_epi16(ab, _mm256_sign_epi8(v, b));
                sa[t] = _mm256_add_epi32(sa[t], _mm256_madd_epi16(pa, ones));
                sb[t] = _mm256_add_epi32(sb[t], _mm256_madd_epi16(pb, ones));
                PEGA_KEEP(sa[t], sb[t]);
            }
        }
        F(&out)[MR] = half == 0 ? first : second;
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) out[t] = {to_float(sa[t]), to_float(sb[t])};
    }
}

// Sixteen words of int4 and int8: float32 scales, whose low bytes are zero points.
static inline void split_words(const uint8_t* p, F& scale, F& zero) {
    const __m256i a = load256(p), b = load256(p + 32), byte = _mm256_set1_epi32(255);
    scale = {_mm256_castsi256_ps(_mm256_andnot_si256(byte, a)),
             _mm256_castsi256_ps(_mm256_andnot_si256(byte, b))};
    zero = {to_float(_mm256_and_si256(a, byte)), to_float(_mm256_and_si256(b, byte))};
}

#undef PEGA_KEEP

}  // namespace pega::PEGA_ISA
