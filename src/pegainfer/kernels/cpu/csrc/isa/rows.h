// Row-wise kernels: exponential, norm, quantisation, rotation, gating.
#pragma once

#include <cmath>

namespace pega::PEGA_ISA {

// e^x to about one unit in the last place for -87.3 … 88; outside, the value at that end. e^0 is exactly 1,
// e^NaN is NaN: max and min give the second where either is one.
static inline F exp(F x) {
    x = min(set1(88.0f), max(set1(-87.3f), x));
    const F n = round(mul(x, set1(1.44269504f)));
    // ln 2 in two parts, the first short enough for n · ln2_high to be exact.
    F r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(2.12194440e-4f), r);
    // Taylor's terms to r^7 / 7!: |r| ≤ 0.347 leaves 5e-9.
    F p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    return mul(p, pow2(n));
}

// Up to 16 values, zeros after them.
static inline F load_some(const float* p, int64_t count) {
    if (count >= 16) return load(p);
    float t[16] = {};
    __builtin_memcpy(t, p, static_cast<size_t>(count) * sizeof(float));
    return load(t);
}

static inline void store_some(float* p, F x, int64_t count) {
    if (count >= 16) return store(p, x);
    float t[16];
    store(t, x);
    __builtin_memcpy(p, t, static_cast<size_t>(count) * sizeof(float));
}

static void rms_norm(float* out, const float* x, const float* weight, int64_t n, float eps) {
    F s = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F v = load_some(x + i, n - i);
        s = fma(v, v, s);
    }
    const F factor = set1(1 / std::sqrt(reduce_add(s) / static_cast<float>(n) + eps));
    for (int64_t i = 0; i < n; i += 16) {
        const F v = mul(load_some(x + i, n - i), factor);
        store_some(out + i, mul(v, load_some(weight + i, n - i)), n - i);
    }
}

// Scales below this make no difference to any sum; their reciprocals would overflow.
constexpr float kSmallest = 1e-30f;

static void quantise(const float* x, int64_t n, int8_t* q, float* scale, float* sum, float* half) {
    for (int64_t b = 0; b < n / kBlock; b++, x += kBlock, q += kBlock) {
        const F a = load(x), c = load(x + 16);
        const float largest = reduce_max(max(abs(a), abs(c)));
        const float poison = reduce_add(mul(add(a, c), zero()));  // NaN where a value is not finite, else 0
        scale[b] = (largest < kSmallest ? 0 : largest / 127) + poison;
        const F inverse = set1(largest < kSmallest ? 0 : 127 / largest);
        const F qa = round(mul(a, inverse)), qc = round(mul(c, inverse));
        store_i8(q, qa);
        store_i8(q + 16, qc);
        half[b] = reduce_add(qa);  // whole numbers: exact
        sum[b] = half[b] + reduce_add(qc);
    }
}

static void silu_mul(float* out, const float* gate, const float* up, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const F g = load_some(gate + i, n - i);
        const F y = div(g, add(set1(1), exp(sub(zero(), g))));
        store_some(out + i, mul(y, load_some(up + i, n - i)), n - i);
    }
}

static void add_rows(float* x, const float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += 16)
        store_some(x + i, add(load_some(x + i, n - i), load_some(y + i, n - i)), n - i);
}

static float dot(const float* x, const float* y, int64_t n) {
    F s = zero();
    for (int64_t i = 0; i < n; i += 16) s = fma(load_some(x + i, n - i), load_some(y + i, n - i), s);
    return reduce_add(s);
}

static void add_weighted(float* x, const float* h, const float* rows, int64_t ld, int64_t num_rows,
                         int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        F s = load_some(x + i, n - i);
        for (int64_t r = 0; r < num_rows; r++) s = fma(set1(h[r]), load_some(rows + r * ld + i, n - i), s);
        store_some(x + i, s, n - i);
    }
}

// cos_sin: [D / 2] cosines, then sines. Rotates the pairs (i, i + D / 2) in place.
static void rope(float* x, const float* cos_sin, int64_t head_dim) {
    const int64_t half = head_dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t left = half - i;
        const F c = load_some(cos_sin + i, left), s = load_some(cos_sin + half + i, left);
        const F a = load_some(x + i, left), b = load_some(x + half + i, left);
        store_some(x + i, sub(mul(a, c), mul(b, s)), left);
        store_some(x + half + i, add(mul(b, c), mul(a, s)), left);
    }
}

}  // namespace pega::PEGA_ISA
