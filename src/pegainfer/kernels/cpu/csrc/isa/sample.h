// What sampling does to every logit.
#pragma once

namespace pega::PEGA_ISA {

static float maximum(const float* x, int64_t n) {
    F top = set1(-INFINITY);
    for (int64_t i = 0; i < n; i += 16) {
        const F v = n - i >= 16 ? load(x + i) : keep_first(load_some(x + i, n - i), n - i, -INFINITY);
        if (any_nan(v)) return NAN;
        top = max(top, v);
    }
    return reduce_max(top);
}

// Sixty-four lanes, so that no lane adds up more than V / 64 terms.
static float sum_exp(const float* x, int64_t n, float max) {
    F s[4] = {zero(), zero(), zero(), zero()};
    const F top = set1(max);
    for (int64_t i = 0; i < n; i += 16) {
        const F e = exp(sub(load_some(x + i, n - i), top));
        s[i / 16 % 4] = add(s[i / 16 % 4], keep_first(e, n - i, 0));
    }
    return reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
}

// Float operations are rounded one by one, as the reference does; all that follows is in whole numbers, so
// every instruction set gives the same weights. The compiler vectorises the loop.
static void draw_weights(const float* x, int64_t n, float max, float cold, uint64_t* weights) {
    constexpr uint64_t kCoefficients[] = {20571132, 119165494, 515877902, 1488521986, 2147483648};
    for (int64_t i = 0; i < n; i++) {
        float y = (max - x[i]) * cold;
        y = y < 63.0f ? y : 63.0f;  // 2^40 is shifted to nothing from 41 on
        const auto whole = static_cast<int32_t>(y);
        const auto fraction =
            static_cast<uint32_t>(static_cast<int32_t>((y - static_cast<float>(whole)) * 2147483648.0f));
        uint64_t m = 2737501 - (uint64_t{234126} * fraction >> 31);
        for (const uint64_t c : kCoefficients) m = c - ((m & 0xffffffffu) * fraction >> 31);
        weights[i] = m << 9 >> static_cast<uint64_t>(whole);
    }
}

}  // namespace pega::PEGA_ISA
