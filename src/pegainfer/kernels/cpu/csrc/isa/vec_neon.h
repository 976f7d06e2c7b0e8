// Sixteen float lanes as four NEON registers (AArch64 with the 8-bit dot product, Armv8.2 dotprod).
//
// Sums, fused products and reductions are those of the x86 units, operation for operation. Weights in bf16
// are widened exactly; bfdot and bfmlal would round the activations to bf16, which no path allows.
#pragma once

#include <arm_neon.h>

#include <initializer_list>

#include "../kernels.h"

namespace pega::PEGA_ISA {

constexpr int kMaxRows = 6;  // 6 × 4 accumulators, 4 weights and a broadcast: 29 of 32 registers

// Four registers, copied one by one: a plain structure of this size has a machine mode of its own in gcc 12,
// is copied through memory and so kept there.
template <class V>
struct Four {
    V a, b, c, d;

    Four() {}
    Four(V a_, V b_, V c_, V d_) : a(a_), b(b_), c(c_), d(d_) {}
    Four(const Four& o) : a(o.a), b(o.b), c(o.c), d(o.d) {}
    Four& operator=(const Four& o) {
        a = o.a;
        b = o.b;
        c = o.c;
        d = o.d;
        return *this;
    }
};

using F = Four<float32x4_t>;
using I = Four<int32x4_t>;
using Bytes = Four<int8x16_t>;

static inline F set1(float x) {
    const float32x4_t v = vdupq_n_f32(x);
    return {v, v, v, v};
}
static inline F zero() {
    return set1(0);
}
static inline F load(const float* p) {
    return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
static inline float32x4_t load_f16x4(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline F load_f16(const uint16_t* p) {
    return {load_f16x4(p), load_f16x4(p + 4), load_f16x4(p + 8), load_f16x4(p + 12)};
}
// See e4m3_to_float.
static inline F load_e4m3(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const auto halves = [](uint8x8_t x) {
        const uint16x8_t wide = vmovl_u8(x), ones = vdupq_n_u16(0x7f), magnitude = vandq_u16(wide, ones);
        const uint16x8_t nan = vandq_u16(vceqq_u16(magnitude, ones), vdupq_n_u16(0x7c00));
        const uint16x8_t sign = vshlq_n_u16(vbicq_u16(wide, ones), 8);
        return vorrq_u16(vorrq_u16(sign, nan), vshlq_n_u16(magnitude, 7));
    };
    const auto widened = [](uint16x4_t x) {
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(x)), 256.0f);
    };
    const uint16x8_t low = halves(vget_low_u8(bytes)), high = halves(vget_high_u8(bytes));
    return {widened(vget_low_u16(low)), widened(vget_high_u16(low)), widened(vget_low_u16(high)),
            widened(vget_high_u16(high))};
}
static inline float32x4_t load_bf16x4(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
static inline F load_bf16(const uint16_t* p) {
    return {load_bf16x4(p), load_bf16x4(p + 4), load_bf16x4(p + 8), load_bf16x4(p + 12)};
}
static inline void store(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
static inline F add(F x, F y) {
    return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d)};
}
static inline F sub(F x, F y) {
    return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b), vsubq_f32(x.c, y.c), vsubq_f32(x.d, y.d)};
}
static inline F mul(F x, F y) {
    return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d)};
}
static inline F div(F x, F y) {
    return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b), vdivq_f32(x.c, y.c), vdivq_f32(x.d, y.d)};
}
static inline F fma(F x, F y, F z) {
    return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
            vfmaq_f32(z.d, x.d, y.d)};
}
// The second where either is NaN, as everywhere else; fmax and fmin would give NaN, fmaxnm the other one.
static inline float32x4_t max(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcgtq_f32(x, y), x, y);
}
static inline F max(F x, F y) {
    return {max(x.a, y.a), max(x.b, y.b), max(x.c, y.c), max(x.d, y.d)};
}
static inline float32x4_t min(float32x4_t x, float32x4_t y) {
    return vbslq_f32(vcltq_f32(x, y), x, y);
}
static inline F min(F x, F y) {
    return {min(x.a, y.a), min(x.b, y.b), min(x.c, y.c), min(x.d, y.d)};
}
static inline F abs(F x) {
    return {vabsq_f32(x.a), vabsq_f32(x.b), vabsq_f32(x.c), vabsq_f32(x.d)};
}
static inline F round(F x) {
    return {vrndnq_f32(x.a), vrndnq_f32(x.b), vrndnq_f32(x.c), vrndnq_f32(x.d)};
}
// 2^n for whole n in -126 … 127.
static inline float32x4_t pow2(float32x4_t n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
static inline F pow2(F n) {
    return {pow2(n.a), pow2(n.b), pow2(n.c), pow2(n.d)};
}
// Lanes from `count` on become `other`.
static inline F keep_first(F x, int64_t count, float other) {
    constexpr int32_t kOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32x4_t n = vdupq_n_s32(static_cast<int32_t>(count));
    const float32x4_t v = vdupq_n_f32(other);
    return {vbslq_f32(vcltq_s32(vld1q_s32(kOrder), n), x.a, v),
            vbslq_f32(vcltq_s32(vld1q_s32(kOrder + 4), n), x.b, v),
            vbslq_f32(vcltq_s32(vld1q_s32(kOrder + 8), n), x.c, v),
            vbslq_f32(vcltq_s32(vld1q_s32(kOrder + 12), n), x.d, v)};
}
// Lanes 8 apart, then 4, 2, 1.
static inline float reduce_add(F x) {
    const float32x4_t t = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    const float32x2_t h = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(h, 0) + vget_lane_f32(h, 1);
}
static inline float reduce_max(F x) {
    const float32x4_t t = max(max(x.a, x.c), max(x.b, x.d));
    const float32x4_t h = max(t, vextq_f32(t, t, 2));
    return vgetq_lane_f32(max(h, vextq_f32(h, h, 1)), 0);
}
static inline bool any_nan(F x) {
    const uint32x4_t same = vandq_u32(vandq_u32(vceqq_f32(x.a, x.a), vceqq_f32(x.b, x.b)),
                                      vandq_u32(vceqq_f32(x.c, x.c), vceqq_f32(x.d, x.d)));
    return vminvq_u32(same) == 0;
}
// 2^-f for f in [0, 1) in fixed point, from the last coefficient to the first (ops/draw.py).
constexpr uint32_t kExp2[] = {234126, 2737501, 20571132, 119165494, 515877902, 1488521986, 2147483648};

// 2^40 · 2^-y, cut to whole numbers; y in 0 … 63. Sums fit 32 bits, products 64.
static inline void store_weights(uint64_t* p, F y) {
    for (const float32x4_t v : {y.a, y.b, y.c, y.d}) {
        const int32x4_t whole = vcvtq_s32_f32(v);
        const float32x4_t rest = vsubq_f32(v, vcvtq_f32_s32(whole));
        const uint32x4_t f = vcvtq_u32_f32(vmulq_f32(rest, vdupq_n_f32(2147483648.0f)));
        uint32x4_t m = vdupq_n_u32(kExp2[0]);
        for (int c = 1; c < 7; c++) {
            const uint32x2_t low = vshrn_n_u64(vmull_u32(vget_low_u32(m), vget_low_u32(f)), 31);
            m = vsubq_u32(vdupq_n_u32(kExp2[c]), vshrn_high_n_u64(low, vmull_high_u32(m, f), 31));
        }
        const int32x4_t left = vnegq_s32(whole);
        vst1q_u64(p, vshlq_u64(vshll_n_u32(vget_low_u32(m), 9), vmovl_s32(vget_low_s32(left))));
        vst1q_u64(p + 2, vshlq_u64(vshll_high_n_u32(m, 9), vmovl_high_s32(left)));
        p += 4;
    }
}
// One bit for each lane where x ≥ y.
static inline uint32_t at_least(F x, F y) {
    constexpr uint8_t kBits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t low = vcombine_u16(vmovn_u32(vcgeq_f32(x.a, y.a)), vmovn_u32(vcgeq_f32(x.b, y.b)));
    const uint16x8_t high = vcombine_u16(vmovn_u32(vcgeq_f32(x.c, y.c)), vmovn_u32(vcgeq_f32(x.d, y.d)));
    const uint8x8_t bits = vld1_u8(kBits);
    const uint32_t first = vaddv_u8(vand_u8(vmovn_u16(low), bits));
    return first | static_cast<uint32_t>(vaddv_u8(vand_u8(vmovn_u16(high), bits))) << 8;
}
static inline int16x8_t to_i16(float32x4_t low, float32x4_t high) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(low)), vqmovn_s32(vcvtnq_s32_f32(high)));
}
// Whole-number lanes to 16 int8.
static inline void store_i8(int8_t* p, F x) {
    vst1q_s8(p, vcombine_s8(vqmovn_s16(to_i16(x.a, x.b)), vqmovn_s16(to_i16(x.c, x.d))));
}

// Element I of each lane's four bytes as a number.
template <int I>
static inline F unsigned_byte(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
    const auto at = [](uint32x4_t q) {
        return vcvtq_f32_u32(vshrq_n_u32(I == 3 ? q : vshlq_n_u32(q, 24 - 8 * I), 24));
    };
    return {at(a), at(b), at(c), at(d)};
}
template <int I>
static inline F signed_byte(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
    const auto at = [](int32x4_t q) {
        return vcvtq_f32_s32(vshrq_n_s32(I == 3 ? q : vshlq_n_s32(q, 24 - 8 * I), 24));
    };
    return {at(a), at(b), at(c), at(d)};
}

static inline uint32x4_t low_nibbles(const uint8_t* p) {
    return vreinterpretq_u32_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
static inline uint32x4_t high_nibbles(const uint8_t* p) {
    return vreinterpretq_u32_u8(vshrq_n_u8(vld1q_u8(p), 4));
}
static inline int32x4_t four_bytes(const uint8_t* p) {
    return vreinterpretq_s32_u8(vld1q_u8(p));
}
static inline void unpack_unsigned(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d, F (&out)[4]) {
    out[0] = unsigned_byte<0>(a, b, c, d);
    out[1] = unsigned_byte<1>(a, b, c, d);
    out[2] = unsigned_byte<2>(a, b, c, d);
    out[3] = unsigned_byte<3>(a, b, c, d);
}
// Element i of each lane's four bytes as a number, for i in 0 … 3: low nibbles, high nibbles, signed bytes.
static inline void unpack_low(const uint8_t* p, F (&out)[4]) {
    unpack_unsigned(low_nibbles(p), low_nibbles(p + 16), low_nibbles(p + 32), low_nibbles(p + 48), out);
}
static inline void unpack_high(const uint8_t* p, F (&out)[4]) {
    unpack_unsigned(high_nibbles(p), high_nibbles(p + 16), high_nibbles(p + 32), high_nibbles(p + 48), out);
}
static inline void unpack_bytes(const uint8_t* p, F (&out)[4]) {
    const int32x4_t a = four_bytes(p), b = four_bytes(p + 16), c = four_bytes(p + 32), d = four_bytes(p + 48);
    out[0] = signed_byte<0>(a, b, c, d);
    out[1] = signed_byte<1>(a, b, c, d);
    out[2] = signed_byte<2>(a, b, c, d);
    out[3] = signed_byte<3>(a, b, c, d);
}

static inline I no_sum() {
    const int32x4_t v = vdupq_n_s32(0);
    return {v, v, v, v};
}
static inline F to_float(I x) {
    return {vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}
static inline int8x16_t load_i8(const uint8_t* p) {
    return vreinterpretq_s8_u8(vld1q_u8(p));
}
static inline int8x16_t low_i8(const uint8_t* p) {
    return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(p), vdupq_n_u8(15)));
}
static inline int8x16_t high_i8(const uint8_t* p) {
    return vreinterpretq_s8_u8(vshrq_n_u8(vld1q_u8(p), 4));
}
// Adds four columns of sixteen rows times those in lane LANE of x.
template <int LANE>
static inline I dot(I s, const Bytes& w, int8x16_t x) {
    return {vdotq_laneq_s32(s.a, w.a, x, LANE), vdotq_laneq_s32(s.b, w.b, x, LANE),
            vdotq_laneq_s32(s.c, w.c, x, LANE), vdotq_laneq_s32(s.d, w.d, x, LANE)};
}

// Columns 4 LANE … of a block of nibbles and 16 + 4 LANE …, of tokens whose columns are in `low` and `high`.
template <int LANE, int MR>
static inline void dot_nibbles(const uint8_t* w, const int8x16_t (&low)[MR], const int8x16_t (&high)[MR],
                               I (&s)[MR]) {
    w += 64 * LANE;
    const Bytes first{low_i8(w), low_i8(w + 16), low_i8(w + 32), low_i8(w + 48)};
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = dot<LANE>(s[t], first, low[t]);
    const Bytes second{high_i8(w), high_i8(w + 16), high_i8(w + 32), high_i8(w + 48)};
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = dot<LANE>(s[t], second, high[t]);
}

// Columns 4 LANE … of half a block of bytes.
template <int LANE, int MR>
static inline void dot_bytes(const uint8_t* w, const int8x16_t (&x)[MR], I (&s)[MR]) {
    w += 64 * LANE;
    const Bytes q{load_i8(w), load_i8(w + 16), load_i8(w + 32), load_i8(w + 48)};
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = dot<LANE>(s[t], q, x[t]);
}

// out[t] lane r = sum over a block of q[r] · x[t]; x[t] at x + t · stride.
template <int MR>
static inline void dot_q4(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    I s[MR];
    int8x16_t low[MR], high[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) {
        low[t] = vld1q_s8(x + t * stride);
        high[t] = vld1q_s8(x + t * stride + 16);
        s[t] = no_sum();
    }
    dot_nibbles<0, MR>(w, low, high, s);
    dot_nibbles<1, MR>(w, low, high, s);
    dot_nibbles<2, MR>(w, low, high, s);
    dot_nibbles<3, MR>(w, low, high, s);
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) out[t] = to_float(s[t]);
}

template <int MR>
static inline void dot_q8(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    I s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = no_sum();
    for (int half = 0; half < 2; half++, w += 256, x += 16) {
        int8x16_t v[MR];
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) v[t] = vld1q_s8(x + t * stride);
        dot_bytes<0, MR>(w, v, s);
        dot_bytes<1, MR>(w, v, s);
        dot_bytes<2, MR>(w, v, s);
        dot_bytes<3, MR>(w, v, s);
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) out[t] = to_float(s[t]);
}

}  // namespace pega::PEGA_ISA
