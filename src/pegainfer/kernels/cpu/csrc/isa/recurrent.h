// Kernels of the recurrent layers: convolution, delta rule, and the gates around them.
#pragma once

#include <cmath>

namespace pega::PEGA_ISA {

static void sigmoid_mul(float* x, const float* gate, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const F g = load_some(gate + i, n - i);
        store_some(x + i, div(load_some(x + i, n - i), add(set1(1), exp(sub(zero(), g)))), n - i);
    }
}

static void unit(float* out, const float* x, int64_t n, float eps, float scale) {
    F s = zero();
    for (int64_t i = 0; i < n; i += 16) {
        const F v = load_some(x + i, n - i);
        s = fma(v, v, s);
    }
    const F factor = set1(scale / std::sqrt(reduce_add(s) + eps));
    for (int64_t i = 0; i < n; i += 16) store_some(out + i, mul(load_some(x + i, n - i), factor), n - i);
}

static void conv_silu(float* out, const float* const* rows, const float* const* taps, int64_t num_taps,
                      int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        F s = zero();
        for (int64_t w = 0; w < num_taps; w++)
            if (rows[w] != nullptr) s = fma(load_some(taps[w] + i, n - i), load_some(rows[w] + i, n - i), s);
        store_some(out + i, div(s, add(set1(1), exp(sub(zero(), s)))), n - i);
    }
}

// Columns of a state that are updated together: 16 KiB of 128 rows, or 32 KiB with 32 registers, so that a
// tile stays in the first-level cache from its first pass to its second and from token to token.
constexpr int kStateTile = kMaxRows > 6 ? 4 : 2;

// Sixteen times N columns from c on, token by token. Each column is computed by itself, channels in order, so
// that no result depends on the tile's width.
template <int N>
static void delta_columns(const DeltaArgs& a, int64_t c) {
    float* const state = a.state + c;
    for (int64_t t = 0; t < a.tokens; t++) {
        const float *q = a.q + t * a.key_dim, *k = a.k + t * a.key_dim;
        F seen[N];
        PEGA_UNROLL
        for (int i = 0; i < N; i++) seen[i] = zero();
        for (int64_t j = 0; j < a.key_dim; j++) {
            const F kj = set1(k[j]);
            PEGA_UNROLL
            for (int i = 0; i < N; i++) seen[i] = fma(load(state + j * a.value_dim + 16 * i), kj, seen[i]);
        }
        const F decay = set1(a.decay[t]), beta = set1(a.beta[t]);
        F write[N], out[N];
        PEGA_UNROLL
        for (int i = 0; i < N; i++) {
            write[i] = mul(beta, sub(load(a.v + t * a.ldv + c + 16 * i), mul(decay, seen[i])));
            out[i] = zero();
        }
        for (int64_t j = 0; j < a.key_dim; j++) {
            const F kj = set1(k[j]), qj = set1(q[j]);
            float* const row = state + j * a.value_dim;
            // The second pass finds its tile in the cache and leaves memory idle: time to ask for the next
            // state.
            if (t == 0 && a.next != nullptr) {
                const float* const next = a.next + c + j * a.value_dim;
                PEGA_UNROLL
                for (int i = 0; i < N; i++) __builtin_prefetch(next + 16 * i, 1, 2);
            }
            PEGA_UNROLL
            for (int i = 0; i < N; i++) {
                const F s = fma(kj, write[i], mul(decay, load(row + 16 * i)));
                store(row + 16 * i, s);
                out[i] = fma(s, qj, out[i]);
            }
        }
        PEGA_UNROLL
        for (int i = 0; i < N; i++) store(a.out + t * a.ldo + c + 16 * i, out[i]);
    }
}

static void delta(const DeltaArgs& a) {
    int64_t c = 0;
    for (; c + 16 * kStateTile <= a.value_dim; c += 16 * kStateTile) delta_columns<kStateTile>(a, c);
    for (; c < a.value_dim; c += 16) delta_columns<1>(a, c);
}

}  // namespace pega::PEGA_ISA
