// The table of kernels that an instruction set fills. Pointers are to float32 unless a name says otherwise.
#pragma once

#include "formats.h"

// Over rows in flight. gcc unrolls outermost loops only after it has chosen what lives in registers; an array
// that such a loop walks through stays in memory, and is stored in every round of the loops within.
#define PEGA_UNROLL _Pragma("GCC unroll 16")

namespace pega {

// Activations rounded to 8 bits: x ≈ scale · q with one scale for each 32 columns.
struct QuantRows {
    int8_t* q;     // [rows, k], -127 … 127
    float* scale;  // [rows, k / 32]
    float* sum;    // [rows, k / 32]: sum of the block's q
    float* half;   // [rows, k / 32]: sum of its first sixteen
};

// One KV head's queries over one segment of its context. Pages are of sixteen tokens. Keys and values lie
// apart, or (latent) a page's rows [16, D] are keys whose first V channels are the values.
struct AttendArgs {
    const float* const* q;         // [queries] rows of D
    int64_t queries;               // at most kMaxQueries
    const int64_t* seen;           // [queries] context tokens that each may look at, from position 0
    const uint8_t* const* keys;    // [ceil(tokens / 16) + kPagesAhead] pages of K: [D, 16], or [16, D] of
                                   // latents; the last are only prefetched
    const uint8_t* const* values;  // [ceil(tokens / 16)] pages of V: [16, ldv]
    const uint8_t* const* next;    // [as values] pages of K that this thread wants next: only prefetched
    int64_t start;                 // position of the segment's first token, a multiple of 16
    int64_t tokens;                // tokens of the segment that any query sees
    int64_t head_dim;              // D; a multiple of 16 unless latent
    int64_t value_dim;             // V, a multiple of 16
    int64_t ldv;                   // elements between the values of two tokens
    int32_t kv_format;             // what the cache holds
    int32_t latent;
    float scale;
    float* scores;  // scratch [queries, kSegment]
    float* max;     // out [queries]; -inf where a query sees nothing here
    float* sum;     // out [queries]
    float* acc;     // out [queries, V]
};

// Tokens of one row, in order, through one value head of the delta rule.
struct DeltaArgs {
    float* state;        // [K, V], updated in place
    const float* q;      // [tokens, K], normalised and scaled
    const float* k;      // [tokens, K], normalised
    const float* decay;  // [tokens] e^g
    const float* beta;   // [tokens]
    const float* v;      // [tokens, V], ldv floats apart
    float* out;          // [tokens, V], ldo floats apart
    const float* next;   // the state that this thread is likely to take next, or null: only prefetched
    int64_t tokens, key_dim, value_dim, ldv, ldo;  // V a multiple of 16
};

constexpr int kSegment = 128;    // context tokens a softmax is taken over at once
constexpr int kMaxQueries = 24;  // a block of queries: tokens × heads that share a KV head
constexpr int kPagesAhead = 2;   // pages of K that are prefetched: one takes less time than memory's latency
constexpr int kDecodeColumns = 256;  // columns that gemm_f32 expands to float32 at a time

struct Kernels {
    const char* name;
    // acc[t][r] = x[t] · w[16 · tile + r] for nt rows of x, ldx floats apart.
    // scratch: [kDecodeColumns, 16].
    void (*gemm_f32)(const Packed& w, int64_t tile, const float* x, int64_t ldx, int64_t nt, float* acc,
                     float* scratch);
    // The same from 8-bit rows first … first + nt; w is one of the quantised formats.
    void (*gemm_i8)(const Packed& w, int64_t tile, const QuantRows& x, int64_t first, int64_t nt, float* acc);
    // The same from rows of bf16, ldx values apart, w too being bf16; null where the processor has no
    // products of them. Sums two columns at a time.
    void (*gemm_bf16)(const Packed& w, int64_t tile, const uint16_t* x, int64_t ldx, int64_t nt, float* acc);
    // One row of n values to the nearest bf16, ties to even, and a zero after an odd last one. Null likewise.
    void (*round_bf16)(const float* x, int64_t n, uint16_t* out);
    // One row of n = 32 · blocks values.
    void (*quantise)(const float* x, int64_t n, int8_t* q, float* scale, float* sum, float* half);
    void (*rms_norm)(float* out, const float* x, const float* weight, int64_t n, float eps);
    void (*silu_mul)(float* out, const float* gate, const float* up, int64_t n);
    void (*add)(float* x, const float* y, int64_t n);
    void (*rope)(float* x, const float* cos_sin, int64_t head_dim);
    // A segment's unnormalised softmax · V of each query, and its maximum and sum.
    void (*attend)(const AttendArgs& a);
    // Merges a segment's (max, sum, acc) into a running one, [D] wide.
    void (*merge)(float* max, float* sum, float* acc, float seg_max, float seg_sum, const float* seg_acc,
                  int64_t head_dim);
    // The greatest of n values; NaN if any is NaN.
    float (*maximum)(const float* x, int64_t n);
    // Sum of e^(x - max).
    float (*sum_exp)(const float* x, int64_t n, float max);
    // 2^40 · 2^-((max - x) · cold), cut to whole numbers (ops/draw.py).
    void (*draw_weights)(const float* x, int64_t n, float max, float cold, uint64_t* weights);
    uint64_t (*sum_weights)(const uint64_t* weights, int64_t n);
    // Ids of the values that are at least `least`, ascending; their number.
    int64_t (*select_at_least)(const float* x, int64_t n, float least, int32_t* ids);
    void (*divide)(float* out, const float* acc, float sum, int64_t n);
    // x · sigmoid(gate) in place.
    void (*sigmoid_mul)(float* x, const float* gate, int64_t n);
    // out = x · scale / sqrt(sum of x² + eps).
    void (*unit)(float* out, const float* x, int64_t n, float eps, float scale);
    // silu of the sum of taps[w] · rows[w], rows of n channels; a null row is one of zeros.
    void (*conv_silu)(float* out, const float* const* rows, const float* const* taps, int64_t num_taps,
                      int64_t n);
    void (*delta)(const DeltaArgs& a);
    float (*dot)(const float* x, const float* y, int64_t n);
    // x += Σ h[i] · rows[i] over rows of n values, ld floats apart.
    void (*add_weighted)(float* x, const float* h, const float* rows, int64_t ld, int64_t num_rows,
                         int64_t n);
};

const Kernels* portable_kernels();
#ifdef PEGA_X86
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
void avx512_gemm_bf16(const Packed& w, int64_t tile, const uint16_t* x, int64_t ldx, int64_t nt, float* acc);
void avx512_round_bf16(const float* x, int64_t n, uint16_t* out);
#endif
#ifdef PEGA_ARM64
const Kernels* neon_kernels();
#endif

// By name, or the best that this processor runs where name is null or empty. Null if there is none such.
const Kernels* choose_kernels(const char* name);

}  // namespace pega
