// Sixteen float lanes as one AVX-512 register (F, BW, VL, DQ, VNNI).
#pragma once

#include <immintrin.h>

#include "../kernels.h"

namespace pega::PEGA_ISA {

constexpr int kMaxRows = 12;  // 12 accumulators; broadcasts fold into the FMA's memory operand

struct F {
    __m512 v;
};

static inline F zero() {
    return {_mm512_setzero_ps()};
}
static inline F set1(float x) {
    return {_mm512_set1_ps(x)};
}
static inline F load(const float* p) {
    return {_mm512_loadu_ps(p)};
}
static inline __m256i load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static inline __m512i load512(const void* p) {
    return _mm512_loadu_si512(p);
}
static inline F load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(load256(p))};
}
// See e4m3_to_float.
static inline F load_e4m3(const uint8_t* p) {
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i ones = _mm256_set1_epi16(0x7f), magnitude = _mm256_and_si256(x, ones);
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, ones), _mm256_set1_epi16(0x7c00));
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(ones, x), 8);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16(magnitude, 7));
    return {_mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256))};
}
#define PEGA_NATIVE_PAIRS

// Two columns of bf16, [16][2].
static inline void load_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const __m512i v = load512(p);
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16))};
    second = {_mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
static inline void store(float* p, F x) {
    _mm512_storeu_ps(p, x.v);
}
static inline F add(F x, F y) {
    return {_mm512_add_ps(x.v, y.v)};
}
static inline F sub(F x, F y) {
    return {_mm512_sub_ps(x.v, y.v)};
}
static inline F mul(F x, F y) {
    return {_mm512_mul_ps(x.v, y.v)};
}
static inline F div(F x, F y) {
    return {_mm512_div_ps(x.v, y.v)};
}
static inline F fma(F x, F y, F z) {
    return {_mm512_fmadd_ps(x.v, y.v, z.v)};
}
static inline F max(F x, F y) {
    return {_mm512_max_ps(x.v, y.v)};
}
static inline F min(F x, F y) {
    return {_mm512_min_ps(x.v, y.v)};
}
static inline F abs(F x) {
    return {_mm512_abs_ps(x.v)};
}
static inline F round(F x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// 2^n for whole n in -126 … 127.
static inline F pow2(F n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// Lanes from `count` on become `other`.
static inline F keep_first(F x, int64_t count, float other) {
    const uint32_t bits = count >= 16 ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
    return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), _mm512_set1_ps(other), x.v)};
}
// Lanes 8 apart, then 4, 2, 1.
static inline float reduce_add(F x) {
    const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
static inline float reduce_max(F x) {
    return _mm512_reduce_max_ps(x.v);
}
static inline bool any_nan(F x) {
    return _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q) != 0;
}
// 2^-f for f in [0, 1) in fixed point, from the last coefficient to the first (ops/draw.py).
constexpr uint64_t kExp2[] = {234126, 2737501, 20571132, 119165494, 515877902, 1488521986, 2147483648};

// 2^40 · 2^-y, cut to whole numbers; y in 0 … 63.
static inline void store_weights(uint64_t* p, F y) {
    const __m512i whole = _mm512_cvttps_epi32(y.v);
    const __m512 rest = _mm512_sub_ps(y.v, _mm512_cvtepi32_ps(whole));
    const __m512i fraction = _mm512_cvttps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(2147483648.0f)));
    for (int half = 0; half < 2; half++) {
        const __m512i f = _mm512_cvtepu32_epi64(half == 0 ? _mm512_castsi512_si256(fraction)
                                                          : _mm512_extracti64x4_epi64(fraction, 1));
        const __m512i shift = _mm512_cvtepu32_epi64(half == 0 ? _mm512_castsi512_si256(whole)
                                                              : _mm512_extracti64x4_epi64(whole, 1));
        __m512i m = _mm512_set1_epi64(kExp2[0]);
        for (int c = 1; c < 7; c++)
            m = _mm512_sub_epi64(_mm512_set1_epi64(kExp2[c]), _mm512_srli_epi64(_mm512_mul_epu32(m, f), 31));
        _mm512_storeu_si512(p + 8 * half, _mm512_srlv_epi64(_mm512_slli_epi64(m, 9), shift));
    }
}
// One bit for each lane where x ≥ y.
static inline uint32_t at_least(F x, F y) {
    return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ);
}
// Whole-number lanes to 16 int8.
static inline void store_i8(int8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

// Element i of each lane's four bytes as a number, for i in 0 … 3: low nibbles, high nibbles, signed bytes.
static inline void unpack_nibbles(__m512i q, F (&out)[4]) {
    const __m512i m = _mm512_set1_epi32(15);
    out[0] = {_mm512_cvtepi32_ps(_mm512_and_si512(q, m))};
    out[1] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(q, 8), m))};
    out[2] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(q, 16), m))};
    out[3] = {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(q, 24), m))};
}
static inline void unpack_low(const uint8_t* p, F (&out)[4]) {
    unpack_nibbles(load512(p), out);
}
static inline void unpack_high(const uint8_t* p, F (&out)[4]) {
    unpack_nibbles(_mm512_srli_epi32(load512(p), 4), out);
}
static inline void unpack_bytes(const uint8_t* p, F (&out)[4]) {
    const __m512i q = load512(p);
    out[0] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24))};
    out[1] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 16), 24))};
    out[2] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(q, 8), 24))};
    out[3] = {_mm512_cvtepi32_ps(_mm512_srai_epi32(q, 24))};
}

static inline __m512i broadcast4(const int8_t* p) {
    int32_t v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

// out[t] lane r = sum over a block of q[r] · x[t]; x[t] at x + t · stride.
template <int MR>
static inline void dot_q4(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i s[MR];
    for (int t = 0; t < MR; t++) s[t] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m512i q = load512(w + 64 * j);
        const __m512i low = _mm512_and_si512(q, mask), high = _mm512_and_si512(_mm512_srli_epi16(q, 4), mask);
        for (int t = 0; t < MR; t++) {
            s[t] = _mm512_dpbusd_epi32(s[t], low, broadcast4(x + t * stride + 4 * j));
            s[t] = _mm512_dpbusd_epi32(s[t], high, broadcast4(x + t * stride + 16 + 4 * j));
        }
    }
    for (int t = 0; t < MR; t++) out[t] = {_mm512_cvtepi32_ps(s[t])};
}

// dpbusd wants one factor unsigned: w + 128, and 128 · sum(x) taken off again, exactly.
template <int MR>
static inline void dot_q8(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    const __m512i flip = _mm512_set1_epi8(-128);
    __m512i s[MR];
    for (int t = 0; t < MR; t++) {
        const __m256i xt = load256(x + t * stride);
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), xt);
        const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        __m128i h = _mm_add_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0x4e));
        h = _mm_add_epi32(h, _mm_shuffle_epi32(h, 0xb1));
        s[t] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(_mm512_broadcastd_epi32(h), 7));
    }
#pragma GCC unroll 2
    for (int g = 0; g < 8; g++) {
        const __m512i u = _mm512_xor_si512(load512(w + 64 * g), flip);
        for (int t = 0; t < MR; t++) s[t] = _mm512_dpbusd_epi32(s[t], u, broadcast4(x + t * stride + 4 * g));
    }
    for (int t = 0; t < MR; t++) out[t] = {_mm512_cvtepi32_ps(s[t])};
}

#define PEGA_NATIVE_K

// Sixteen bytes as numbers.
static inline F widen_u8(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline F widen_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// out[t] lane r = sum over a block of q[r] · x[t]; q is 0 … 31 and x[t] at x + t · stride.
template <int MR>
static inline void dot_q5(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&out)[MR]) {
    const __m512i nibble = _mm512_set1_epi8(15), bit = _mm512_set1_epi8(16);
    __m512i s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = _mm512_setzero_si512();
    // The bits of columns 4 j … stand at bit j, those of 16 + 4 j … at bit 4 + j; rotations bring them to 4.
    const __m512i bits = load512(high);
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m512i q = load512(low + 64 * j);
        const __m512i ha = _mm512_rorv_epi32(bits, _mm512_set1_epi32(j - 4));
        const __m512i hb = _mm512_rorv_epi32(bits, _mm512_set1_epi32(j));
        const __m512i qa = _mm512_or_si512(_mm512_and_si512(q, nibble), _mm512_and_si512(ha, bit));
        const __m512i qb =
            _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(q, 4), nibble), _mm512_and_si512(hb, bit));
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            s[t] = _mm512_dpbusd_epi32(s[t], qa, broadcast4(x + t * stride + 4 * j));
            s[t] = _mm512_dpbusd_epi32(s[t], qb, broadcast4(x + t * stride + 16 + 4 * j));
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) out[t] = {_mm512_cvtepi32_ps(s[t])};
}

// first[t] lane r = sum over a block's first sixteen columns of q[r] · x[t], second[t] over the others; q is
// 0 … 63 and x[t] at x + t · stride.
template <int MR>
static inline void dot_q6(const uint8_t* low, const uint8_t* high, const int8_t* x, int64_t stride,
                          F (&first)[MR], F (&second)[MR]) {
    const __m512i nibble = _mm512_set1_epi8(15), pair = _mm512_set1_epi8(48);
    __m512i a[MR], b[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) a[t] = b[t] = _mm512_setzero_si512();
    // The pairs of columns 4 j … stand at bits 2 j; in a rotation right by 2 j - 4, at bits 4 and 5.
    const __m512i pairs_a = load512(high), pairs_b = load512(high + 64);
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m512i q = load512(low + 64 * j);
        const __m512i turn = _mm512_set1_epi32(2 * j - 4);
        const __m512i ha = _mm512_rorv_epi32(pairs_a, turn), hb = _mm512_rorv_epi32(pairs_b, turn);
        const __m512i qa = _mm512_or_si512(_mm512_and_si512(q, nibble), _mm512_and_si512(ha, pair));
        const __m512i qb =
            _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(q, 4), nibble), _mm512_and_si512(hb, pair));
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            a[t] = _mm512_dpbusd_epi32(a[t], qa, broadcast4(x + t * stride + 4 * j));
            b[t] = _mm512_dpbusd_epi32(b[t], qb, broadcast4(x + t * stride + 16 + 4 * j));
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) {
        first[t] = {_mm512_cvtepi32_ps(a[t])};
        second[t] = {_mm512_cvtepi32_ps(b[t])};
    }
}

#define PEGA_NATIVE_TABLE
constexpr int kTableBias = 128;  // dpbusd wants one factor unsigned

// first[t] lane r = sum over a block's first sixteen columns of (table[q[r]] + 128) · x[t], second[t] over
// the others; x[t] at x + t · stride.
template <int MR>
static inline void dot_table(const uint8_t* w, const int8_t* table, const int8_t* x, int64_t stride,
                             F (&first)[MR], F (&second)[MR]) {
    const __m512i mask = _mm512_set1_epi8(15);
    const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    const __m512i levels = _mm512_xor_si512(_mm512_broadcast_i32x4(entries), _mm512_set1_epi8(-128));
    __m512i a[MR], b[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) a[t] = b[t] = _mm512_setzero_si512();
#pragma GCC unroll 1
    for (int j = 0; j < 4; j++) {
        const __m512i q = load512(w + 64 * j);
        const __m512i low = _mm512_shuffle_epi8(levels, _mm512_and_si512(q, mask));
        const __m512i high = _mm512_shuffle_epi8(levels, _mm512_and_si512(_mm512_srli_epi16(q, 4), mask));
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            a[t] = _mm512_dpbusd_epi32(a[t], low, broadcast4(x + t * stride + 4 * j));
            b[t] = _mm512_dpbusd_epi32(b[t], high, broadcast4(x + t * stride + 16 + 4 * j));
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) {
        first[t] = {_mm512_cvtepi32_ps(a[t])};
        second[t] = {_mm512_cvtepi32_ps(b[t])};
    }
}

// Sixteen words of int4 and int8: float32 scales, whose low bytes are zero points.
static inline void split_words(const uint8_t* p, F& scale, F& zero) {
    const __m512i words = load512(p), byte = _mm512_set1_epi32(255);
    scale = {_mm512_castsi512_ps(_mm512_andnot_si512(byte, words))};
    zero = {_mm512_cvtepi32_ps(_mm512_and_si512(words, byte))};
}

}  // namespace pega::PEGA_ISA
