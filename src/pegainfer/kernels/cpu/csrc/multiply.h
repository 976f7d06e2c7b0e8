// What all products with packed weights share: how rows are prepared for a weight, one tile's product, and
// how much of a product is one chunk.
#pragma once

#include <algorithm>

#include "exec.h"

namespace pega {

constexpr int64_t kTokensAChunk = 64;      // rows that one pass over a tile serves
constexpr int64_t kLeastBytes = 16 << 10;  // weight bytes below which a claim costs too much
constexpr int64_t kMostBytes = 128 << 10;  // above which a thread waits long for another's last chunk

// E4M3 levels are no integers: they meet the activations as they are.
inline bool rounds(const Exec& e, const Packed& w) {
    return e.int8 && is_quantised(w.format) && w.format != kFp8;
}

inline bool halves(const Exec& e, const Packed& w) {
    return e.bf16 && w.format == kBF16;
}

inline int64_t even(int64_t k) {
    return (k + 1) / 2 * 2;
}

// Row `at` of q from k values of x.
inline void quantise_row(const Exec& e, const float* x, int64_t k, const QuantRows& q, int64_t at) {
    const int64_t blocks = k / kBlock, first = at * blocks;
    e.kernels->quantise(x, k, q.q + at * k, q.scale + first, q.sum + first, q.half + first);
}

// acc[t][r] = rows first … first + nt times row 16 · tile + r of the weight, in the arithmetic that it asks
// for.
inline void multiply(const Exec& e, const Packed& w, int64_t tile, const Rows& r, int64_t first, int64_t nt,
                     const Scratch& s, float* acc) {
    if (rounds(e, w)) {
        e.kernels->gemm_i8(w, tile, r.q, first, nt, acc);
    } else if (halves(e, w)) {
        e.kernels->gemm_bf16(w, tile, r.bf16 + first * even(w.k), even(w.k), nt, acc);
    } else {
        e.kernels->gemm_f32(w, tile, r.f32 + first * r.ld, r.ld, nt, acc, s.decode);
    }
}

// How many of `units` (tiles or heads, `bytes` of weights each) are one chunk, where each is done for
// `blocks` blocks of up to `tokens` tokens.
inline int64_t units_a_chunk(int64_t units, int64_t blocks, int64_t bytes, int64_t tokens, int threads) {
    // Eight chunks a thread even out late threads; small ones are not worth a claim.
    const int64_t work = std::max<int64_t>(1, bytes * tokens / 2);
    const int64_t least = std::max<int64_t>(1, kLeastBytes / work);
    const int64_t most = std::max<int64_t>(least, kMostBytes / bytes);
    const int64_t even = (units * blocks + 8 * threads - 1) / (8 * threads);
    return std::min(units, std::clamp(even, least, most));
}

// Blocks that `slots` slots of `experts` experts make at the most.
inline int64_t most_expert_blocks(int64_t slots, int64_t experts) {
    return std::min(slots, experts) + slots / kTokensAChunk;
}

}  // namespace pega
