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
// every instruction set gives the same weights.
static void draw_weights(const float* x, int64_t n, float max, float cold, uint64_t* weights) {
    const F top = set1(max), slope = set1(cold), most = set1(63);  // 2^40 is shifted to nothing from 41 on
    for (int64_t i = 0; i < n; i += 16) {
        const F v = n - i >= 16 ? load(x + i) : keep_first(load_some(x + i, n - i), n - i, max);
        const F y = min(mul(sub(top, v), slope), most);
        if (n - i >= 16) {
            store_weights(weights + i, y);
            continue;
        }
        uint64_t last[16];
        store_weights(last, y);
        __builtin_memcpy(weights + i, last, static_cast<size_t>(n - i) * sizeof(uint64_t));
    }
}

static uint64_t sum_weights(const uint64_t* weights, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += weights[i];
    return sum;
}

static int64_t select_at_least(const float* x, int64_t n, float least, int32_t* ids) {
    const F bar = set1(least);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 16) {
        uint32_t found = at_least(load_some(x + i, n - i), bar);
        if (n - i < 16) found &= (1u << (n - i)) - 1;
        for (; found != 0; found &= found - 1) ids[count++] = static_cast<int32_t>(i + __builtin_ctz(found));
    }
    return count;
}

}  // namespace pega::PEGA_ISA
