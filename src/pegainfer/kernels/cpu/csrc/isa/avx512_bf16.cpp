// Products of bf16 rows with bf16 weights, for processors that have AVX512_BF16 beside the rest.
//
// An instruction adds two columns' products to a lane. As in gemm.h an output element is one chain down the
// columns, whatever the number of rows in flight.
#include <immintrin.h>

#include "../kernels.h"

namespace pega {

namespace {

constexpr int kRows = 12;  // accumulators in flight: the latency of six cycles twice
// Bytes of weights asked for ahead of their use, as in gemm.h, but into the second-level cache: with so
// little to compute for a byte, lines that wait in the first one push each other out.
constexpr int64_t kAhead = 3072;

template <int MR>
void pair_rows(const uint16_t* w, int64_t pairs, const uint16_t* x, int64_t ldx, float* acc) {
    __m512 s[MR];
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) s[t] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++, w += 32, x += 2) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead, 0, 2);
        const auto v = (__m512bh)_mm512_loadu_si512(w);
        PEGA_UNROLL
        for (int t = 0; t < MR; t++) {
            int32_t two;
            std::memcpy(&two, x + t * ldx, 4);
            s[t] = _mm512_dpbf16_ps(s[t], v, (__m512bh)_mm512_set1_epi32(two));
        }
    }
    PEGA_UNROLL
    for (int t = 0; t < MR; t++) _mm512_storeu_ps(acc + 16 * t, s[t]);
}

template <int MR>
void pair_rest(const uint16_t* w, int64_t pairs, const uint16_t* x, int64_t ldx, int64_t nt, float* acc) {
    if (nt == MR) return pair_rows<MR>(w, pairs, x, ldx, acc);
    if constexpr (MR > 1) pair_rest<MR - 1>(w, pairs, x, ldx, nt, acc);
}

}  // namespace

void avx512_gemm_bf16(const Packed& w, int64_t tile, const uint16_t* x, int64_t ldx, int64_t nt, float* acc) {
    const auto* p = reinterpret_cast<const uint16_t*>(w.tile(tile));
    while (nt > 0) {
        // The last two passes share evenly.
        const int64_t rows = nt >= 2 * kRows ? kRows : nt > kRows ? (nt + 1) / 2 : nt;
        pair_rest<kRows>(p, (w.k + 1) / 2, x, ldx, rows, acc);
        nt -= rows;
        x += rows * ldx;
        acc += rows * 16;
    }
}

void avx512_round_bf16(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        const auto lanes = static_cast<__mmask16>((1u << left) - 1);
        const auto bits = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes, x + i));
        const auto kept = static_cast<__mmask16>((1u << (left + 1) / 2 * 2) - 1);
        _mm256_mask_storeu_epi16(out + i, kept, bits);
    }
}

}  // namespace pega
