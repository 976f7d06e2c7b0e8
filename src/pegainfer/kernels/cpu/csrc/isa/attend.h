// Attention of a block of queries over one segment of a paged cache.
//
// K pages are [D, 16]: lanes are tokens, so scores need no horizontal sums. V pages are [16, D]: lanes are
// channels. Pages of latents are keys and values in one, [16, D]: lanes are channels for both. A segment of
// kSegment tokens has one maximum; segments start at fixed positions and are merged in order, so that a
// result depends on nothing but the query and its context.
#pragma once

#include <cstring>

namespace pega::PEGA_ISA {

constexpr int kScoreRows = kMaxRows > 6 ? 8 : kMaxRows;

template <int KV>
static inline F load_kv(const uint8_t* page, int64_t at) {
    if constexpr (KV == kKvE4M3) return load_e4m3(page + at);
    if constexpr (KV == kKvF16) return load_f16(reinterpret_cast<const uint16_t*>(page) + at);
    return load(reinterpret_cast<const float*>(page) + at);
}

// Asks meanwhile for the page's values and for the keys of a page to come: a decode reads every page once,
// and pages lie anywhere. All are asked into the second-level cache: as many as a segment has would push each
// other out of the first.
template <int MR, int KV>
static void score_page(const AttendArgs& a, int64_t query, int64_t page) {
    constexpr int64_t kBytes = 16 * kv_bytes(KV);
    const uint8_t *keys = a.keys[page], *next = a.keys[page + kPagesAhead], *values = a.values[page];
    const float* const* q = a.q + query;
    F s[MR];
    PEGA_UNROLL
    for (int i = 0; i < MR; i++) s[i] = zero();
    for (int64_t d = 0; d < a.head_dim; d++) {
        __builtin_prefetch(next + kBytes * d, 0, 2);
        __builtin_prefetch(values + kBytes * d, 0, 2);
        const F k = load_kv<KV>(keys, 16 * d);
        PEGA_UNROLL
        for (int i = 0; i < MR; i++) s[i] = fma(k, set1(q[i][d]), s[i]);
    }
    PEGA_UNROLL
    for (int i = 0; i < MR; i++)
        store(a.scores + (query + i) * kSegment + 16 * page, mul(s[i], set1(a.scale)));
}

// `rest` elements from p on, zeros after them.
template <int KV>
static inline F load_kv_some(const uint8_t* page, int64_t at, int64_t rest) {
    static_assert(KV != kKvE4M3, "latents have no 8-bit form");
    if constexpr (KV == kKvF16) {
        uint16_t t[16] = {};
        std::memcpy(t, reinterpret_cast<const uint16_t*>(page) + at, static_cast<size_t>(rest) * 2);
        return load_f16(t);
    }
    return load_some(reinterpret_cast<const float*>(page) + at, rest);
}

// Scores of a page of latents: a horizontal sum for each query and token. JT tokens share a load of a query.
template <int MR, int KV>
static void score_latents(const AttendArgs& a, int64_t query, int64_t page) {
    constexpr int JT = kMaxRows > 6 ? 2 : 1;
    constexpr int64_t kElement = kv_bytes(KV);
    const uint8_t *rows = a.keys[page], *next = a.keys[page + kPagesAhead];
    const float* const* q = a.q + query;
    const int64_t width = a.head_dim, whole = width / 16 * 16;
    for (int64_t j = 0; j < 16; j += JT) {
        F s[MR][JT];
        PEGA_UNROLL
        for (int i = 0; i < MR; i++) {
            PEGA_UNROLL
            for (int t = 0; t < JT; t++) s[i][t] = zero();
        }
        for (int64_t d = 0; d < whole; d += 16) {
            F k[JT];
            PEGA_UNROLL
            for (int t = 0; t < JT; t++) {
                __builtin_prefetch(next + kElement * ((j + t) * width + d), 0, 2);
                k[t] = load_kv<KV>(rows, (j + t) * width + d);
            }
            PEGA_UNROLL
            for (int i = 0; i < MR; i++) {
                const F x = load(q[i] + d);
                PEGA_UNROLL
                for (int t = 0; t < JT; t++) s[i][t] = fma(x, k[t], s[i][t]);
            }
        }
        for (int t = 0; t < JT; t++) {
            F k = zero();
            if (whole < width) k = load_kv_some<KV>(rows, (j + t) * width + whole, width - whole);
            PEGA_UNROLL
            for (int i = 0; i < MR; i++) {
                if (whole < width) s[i][t] = fma(load_some(q[i] + whole, width - whole), k, s[i][t]);
                a.scores[(query + i) * kSegment + 16 * page + j + t] = reduce_add(s[i][t]) * a.scale;
            }
        }
    }
}

// Sixteen channels from d on, of MR queries, over the segment's tokens.
template <int MR, int KV>
static void mix_values(const AttendArgs& a, int64_t query, int64_t d) {
    constexpr int64_t kBytes = 16 * kv_bytes(KV);
    F s[MR];
    PEGA_UNROLL
    for (int i = 0; i < MR; i++) s[i] = zero();
    for (int64_t page = 0; 16 * page < a.tokens; page++) {
        const float* p = a.scores + query * kSegment + 16 * page;
        const int64_t tokens = a.tokens - 16 * page < 16 ? a.tokens - 16 * page : 16;
        const uint8_t *values = a.values[page], *next = a.next[page] + kBytes * d;
        for (int64_t j = 0; j < tokens; j++) {
            __builtin_prefetch(next + kBytes * j, 0, 2);
            const F v = load_kv<KV>(values, j * a.ldv + d);
            PEGA_UNROLL
            for (int i = 0; i < MR; i++) s[i] = fma(v, set1(p[i * kSegment + j]), s[i]);
        }
    }
    PEGA_UNROLL
    for (int i = 0; i < MR; i++) store(a.acc + (query + i) * a.value_dim + d, s[i]);
}

// Turns a query's scores into unnormalised weights; those past what it sees become exactly zero. A NaN that
// it sees makes all of them NaN: the maximum alone may pass over it.
static void soften(const AttendArgs& a, int64_t query) {
    float* s = a.scores + query * kSegment;
    const int64_t padded = (a.tokens + 15) / 16 * 16;
    const int64_t seen = a.seen[query] - a.start;
    F top = set1(-INFINITY), all = zero();
    for (int64_t j = 0; j < padded; j += 16) {
        const F v = keep_first(load(s + j), seen - j, -INFINITY);
        store(s + j, v);
        top = max(top, v);
        all = add(all, v);
    }
    const float largest = any_nan(all) ? NAN : reduce_max(top);
    F sum = zero();
    for (int64_t j = 0; j < padded; j += 16) {
        const F p = keep_first(exp(sub(load(s + j), set1(largest))), seen - j, 0);
        store(s + j, p);
        sum = add(sum, p);
    }
    a.max[query] = seen > 0 ? largest : -INFINITY;
    a.sum[query] = reduce_add(sum);
}

template <int MR, int KV>
static void attend_rows(const AttendArgs& a, int64_t query) {
    for (int64_t page = 0; page < (a.tokens + 15) / 16; page++)
        if constexpr (KV == kKvE4M3)
            score_page<MR, KV>(a, query, page);
        else
            a.latent ? score_latents<MR, KV>(a, query, page) : score_page<MR, KV>(a, query, page);
    for (int i = 0; i < MR; i++) soften(a, query + i);
    for (int64_t d = 0; d < a.value_dim; d += 16) mix_values<MR, KV>(a, query, d);
}

template <int MR, int KV>
static void attend_rest(const AttendArgs& a, int64_t query, int64_t rest) {
    if (rest == MR) return attend_rows<MR, KV>(a, query);
    if constexpr (MR > 1) attend_rest<MR - 1, KV>(a, query, rest);
}

template <int KV>
static void attend_all(const AttendArgs& a) {
    int64_t query = 0;
    for (; a.queries - query > kScoreRows; query += kScoreRows) attend_rows<kScoreRows, KV>(a, query);
    attend_rest<kScoreRows, KV>(a, query, a.queries - query);
}

static void attend(const AttendArgs& a) {
    if (a.kv_format == kKvE4M3) return attend_all<kKvE4M3>(a);
    a.kv_format == kKvF16 ? attend_all<kKvF16>(a) : attend_all<kKvF32>(a);
}

static void merge(float* max, float* sum, float* acc, float seg_max, float seg_sum, const float* seg_acc,
                  int64_t head_dim) {
    if (seg_max == -INFINITY) return;
    const float top = *max > seg_max ? *max : seg_max;
    float factors[16] = {*max, seg_max};
    store(factors, exp(sub(load(factors), set1(top))));
    const float mine = factors[0], theirs = factors[1];
    const F fm = set1(mine), ft = set1(theirs);
    for (int64_t d = 0; d < head_dim; d += 16)
        store(acc + d, fma(load(acc + d), fm, mul(load(seg_acc + d), ft)));
    *sum = *sum * mine + seg_sum * theirs;
    *max = top;
}

static void divide(float* out, const float* acc, float sum, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store(out + i, div(load(acc + i), set1(sum)));
}

}  // namespace pega::PEGA_ISA
