// Sixteen float lanes in plain C++; the compiler vectorises the loops with whatever its target has.
#pragma once

#include <cmath>

#include "../kernels.h"

namespace pega::PEGA_ISA {

constexpr int kMaxRows = 4;  // tokens that share a weight load: 4 × 16 accumulators

struct F {
    float v[16];
};

#define PEGA_LANES for (int i = 0; i < 16; i++)

static inline F zero() {
    return F{};
}
static inline F set1(float x) {
    F r;
    PEGA_LANES r.v[i] = x;
    return r;
}
static inline F load(const float* p) {
    F r;
    PEGA_LANES r.v[i] = p[i];
    return r;
}
static inline F load_f16(const uint16_t* p) {
    F r;
    PEGA_LANES r.v[i] = f16_to_float(p[i]);
    return r;
}
static inline F load_e4m3(const uint8_t* p) {
    F r;
    PEGA_LANES r.v[i] = e4m3_to_float(p[i]);
    return r;
}
static inline void store(float* p, F a) {
    PEGA_LANES p[i] = a.v[i];
}
static inline F add(F a, F b) {
    PEGA_LANES a.v[i] += b.v[i];
    return a;
}
static inline F sub(F a, F b) {
    PEGA_LANES a.v[i] -= b.v[i];
    return a;
}
static inline F mul(F a, F b) {
    PEGA_LANES a.v[i] *= b.v[i];
    return a;
}
static inline F div(F a, F b) {
    PEGA_LANES a.v[i] /= b.v[i];
    return a;
}
static inline F fma(F a, F b, F c) {
    PEGA_LANES c.v[i] += a.v[i] * b.v[i];
    return c;
}
static inline F max(F a, F b) {
    PEGA_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline F min(F a, F b) {
    PEGA_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return a;
}
static inline F abs(F a) {
    PEGA_LANES a.v[i] = a.v[i] < 0 ? -a.v[i] : a.v[i];
    return a;
}
static inline F round(F a) {
    PEGA_LANES a.v[i] = std::nearbyintf(a.v[i]);
    return a;
}
// 2^n for whole n in -126 … 127.
static inline F pow2(F n) {
    PEGA_LANES n.v[i] = bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
    return n;
}
// Lanes from `count` on become `other`.
static inline F keep_first(F a, int64_t count, float other) {
    PEGA_LANES a.v[i] = i < count ? a.v[i] : other;
    return a;
}
// The tree of the wider instruction sets: lanes 8 apart, then 4, 2, 1.
static inline float reduce_add(F a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a.v[i] += a.v[i + w];
    return a.v[0];
}
static inline float reduce_max(F a) {
    for (int w = 8; w > 0; w /= 2)
        for (int i = 0; i < w; i++) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
    return a.v[0];
}
static inline bool any_nan(F a) {
    bool found = false;
    PEGA_LANES found = found || a.v[i] != a.v[i];
    return found;
}
// 2^-f for f in [0, 1) in fixed point, from the last coefficient to the first (ops/draw.py).
constexpr uint64_t kExp2[] = {234126, 2737501, 20571132, 119165494, 515877902, 1488521986, 2147483648};

// 2^40 · 2^-y, cut to whole numbers; y in 0 … 63.
static inline void store_weights(uint64_t* p, F y) {
    PEGA_LANES {
        const auto whole = static_cast<int32_t>(y.v[i]);
        const auto fraction = static_cast<uint64_t>((y.v[i] - static_cast<float>(whole)) * 2147483648.0f);
        uint64_t m = kExp2[0];
        for (int c = 1; c < 7; c++) m = kExp2[c] - (m * fraction >> 31);
        p[i] = m << 9 >> whole;
    }
}
// One bit for each lane where a ≥ b.
static inline uint32_t at_least(F a, F b) {
    uint32_t found = 0;
    PEGA_LANES found |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
    return found;
}
// Whole-number lanes to 16 int8.
static inline void store_i8(int8_t* p, F a) {
    PEGA_LANES p[i] = static_cast<int8_t>(a.v[i]);
}

// Element i of each lane's four bytes as a number, for i in 0 … 3: low nibbles, high nibbles, signed bytes.
static inline void unpack_low(const uint8_t* p, F (&out)[4]) {
    for (int l = 0; l < 64; l++) out[l % 4].v[l / 4] = static_cast<float>(p[l] & 15);
}
static inline void unpack_high(const uint8_t* p, F (&out)[4]) {
    for (int l = 0; l < 64; l++) out[l % 4].v[l / 4] = static_cast<float>(p[l] >> 4);
}
static inline void unpack_bytes(const uint8_t* p, F (&out)[4]) {
    for (int l = 0; l < 64; l++) out[l % 4].v[l / 4] = static_cast<float>(static_cast<int8_t>(p[l]));
}

// out[t] lane r = sum over a block of q[r] · x[t]; x[t] at x + t · stride.
template <int MR>
static inline void dot_q4(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    for (int t = 0; t < MR; t++) {
        int32_t s[16] = {};
        const int8_t* xt = x + t * stride;
        for (int j = 0; j < 4; j++)
            for (int l = 0; l < 16; l++)
                for (int i = 0; i < 4; i++) {
                    const int q = w[64 * j + 4 * l + i];
                    s[l] += (q & 15) * xt[4 * j + i] + (q >> 4) * xt[16 + 4 * j + i];
                }
        PEGA_LANES out[t].v[i] = static_cast<float>(s[i]);
    }
}

template <int MR>
static inline void dot_q8(const uint8_t* w, const int8_t* x, int64_t stride, F (&out)[MR]) {
    for (int t = 0; t < MR; t++) {
        int32_t s[16] = {};
        const int8_t* xt = x + t * stride;
        for (int g = 0; g < 8; g++)
            for (int l = 0; l < 16; l++)
                for (int i = 0; i < 4; i++)
                    s[l] += static_cast<int8_t>(w[64 * g + 4 * l + i]) * xt[4 * g + i];
        PEGA_LANES out[t].v[i] = static_cast<float>(s[i]);
    }
}

#undef PEGA_LANES

}  // namespace pega::PEGA_ISA
