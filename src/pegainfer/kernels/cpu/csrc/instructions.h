// Generated from the ops' declarations by `python -m pegainfer.kernels.headers`; do not edit.
// clang-format off
#pragma once

#include <cstdint>

namespace pega {

struct Packed;

enum Op : int32_t {
    kEmbedding = 0,
    kGatherRows = 1,
    kRmsNorm = 2,
    kHeadNorm = 3,
    kLinear = 4,
    kLinearResidual = 5,
    kRope = 6,
    kKvAppend = 7,
    kAttention = 8,
    kSiluMul = 9,
    kQkvNormRopeAppend = 10,
    kGateUpSwiglu = 11,
    kLmHead = 12,
    kAdjustLogits = 13,
    kSampleTokens = 14,
    kAppendTokens = 15,
    kTokenLogprobs = 16,
    kGatedRmsNorm = 17,
    kSigmoidGate = 18,
    kCausalConvSilu = 19,
    kGatedDeltaRule = 20,
    kRouteExperts = 21,
    kExpertGateUp = 22,
    kExpertDown = 23,
    kReduceResidual = 24,
    kLoraShrink = 25,
    kLoraLookup = 26,
    kLoraExpand = 27,
    kHeadLinear = 28,
    kRopeTail = 29,
    kLatentAppend = 30,
    kLatentAttention = 31,
    kLocalExperts = 32,
    kNumOps
};

// How many words the instruction of an op has (program.h).
struct Arity {
    int operands, axes, attrs;
};
constexpr Arity kArity[kNumOps] = {
    {3, 3, 0},  // embedding
    {3, 3, 0},  // gather_rows
    {3, 2, 1},  // rms_norm
    {2, 3, 1},  // head_norm
    {3, 3, 0},  // linear
    {3, 3, 0},  // linear_residual
    {3, 4, 0},  // rope
    {4, 6, 3},  // kv_append
    {7, 9, 4},  // attention
    {3, 2, 0},  // silu_mul
    {12, 11, 4},  // qkv_norm_rope_append
    {5, 3, 1},  // gate_up_swiglu
    {5, 4, 1},  // lm_head
    {20, 9, 1},  // adjust_logits
    {9, 2, 1},  // sample_tokens
    {4, 3, 0},  // append_tokens
    {7, 3, 1},  // token_logprobs
    {4, 3, 1},  // gated_rms_norm
    {2, 2, 0},  // sigmoid_gate
    {9, 7, 1},  // causal_conv_silu
    {12, 8, 3},  // gated_delta_rule
    {4, 3, 5},  // route_experts
    {5, 5, 0},  // expert_gate_up
    {5, 5, 0},  // expert_down
    {2, 2, 0},  // reduce_residual
    {5, 4, 0},  // lora_shrink
    {5, 4, 0},  // lora_lookup
    {5, 4, 0},  // lora_expand
    {3, 6, 0},  // head_linear
    {3, 5, 0},  // rope_tail
    {6, 8, 2},  // latent_append
    {7, 9, 2},  // latent_attention
    {2, 2, 2},  // local_experts
};

// The arguments of an op in a step: operands, axis sizes, attributes. Each takes eight bytes.

// out[t] = table[ids[t]], dequantised
struct EmbeddingArgs {
    float* out;  // [T, M]
    const Packed* table;  // [V, M]
    const int32_t* ids;  // [T]
    int64_t T, M, V;
};

// out[l] = x[rows[l]]
struct GatherRowsArgs {
    float* out;  // [L, M]
    const float* x;  // [T, M]
    const int32_t* rows;  // [L]
    int64_t L, M, T;
};

// out = x / sqrt(mean(x², over M) + eps) · weight
struct RmsNormArgs {
    float* out;  // [T, M]
    const float* x;  // [T, M]
    const float* weight;  // [M]
    int64_t T, M;
    double eps;
};

// rms_norm of each head in place (QK-norm of Qwen3)
struct HeadNormArgs {
    float* x;  // [T, H, D]
    const float* weight;  // [D]
    int64_t T, H, D;
    double eps;
};

// out = a · wᵀ
struct LinearArgs {
    float* out;  // [T, N]
    const float* a;  // [T, K]
    const Packed* w;  // [N, K]
    int64_t T, N, K;
};

// x += a · wᵀ
struct LinearResidualArgs {
    float* x;  // [T, N]
    const float* a;  // [T, K]
    const Packed* w;  // [N, K]
    int64_t T, N, K;
};

// rotates the pairs (i, i + D/2) of each head by positions[t] · frequency[i]
struct RopeArgs {
    float* x;  // [T, H, D]
    const int32_t* positions;  // [T]
    const float* cos_sin;  // [P, D]
    int64_t T, H, D, P;
};

// writes k and v of token t at place slots[t] = block · S + offset of the cache's layer
struct KvAppendArgs {
    uint8_t* kv;  // [N, Y, 2, G, S, D]
    const float* k;  // [T, G, D]
    const float* v;  // [T, G, D]
    const int32_t* slots;  // [T]
    int64_t N, Y, G, S, D, T;
    double layer, k_scale, v_scale;
};

// causal softmax(q · kᵀ · scale) · v of each row's tokens over its pages; heads share KV heads
struct AttentionArgs {
    float* out;  // [T, H, D]
    const float* q;  // [T, H, D]
    uint8_t* kv;  // [N, Y, 2, G, S, D]
    const int32_t* query_starts;  // [R]
    const int32_t* query_lens;  // [R]
    const int32_t* context_lens;  // [R]
    const int32_t* block_table;  // [R, W]
    int64_t T, H, D, N, Y, G, S, R, W;
    double layer, scale, k_scale, v_scale;
};

// out = gate · sigmoid(gate) · up (SwiGLU, arXiv:2002.05202)
struct SiluMulArgs {
    float* out;  // [T, F]
    const float* gate;  // [T, F]
    const float* up;  // [T, F]
    int64_t T, F;
};

// q, k, v from the normalised residual stream; heads normalised where asked; rotated; k, v cached
struct QkvNormRopeAppendArgs {
    float* q;  // [T, H, D]
    uint8_t* kv;  // [N, Y, 2, G, S, D]
    const float* x;  // [T, M]
    const float* norm;  // [M]
    const Packed* wq;  // [A, M]
    const Packed* wk;  // [B, M]
    const Packed* wv;  // [B, M]
    const int32_t* positions;  // [T]
    const int32_t* slots;  // [T]
    const float* cos_sin;  // [P, D]
    const float* q_norm;  // [D]; may be null
    const float* k_norm;  // [D]; may be null
    int64_t T, H, D, N, Y, G, S, M, A, B, P;
    double eps, layer, k_scale, v_scale;
};

// out = silu(h · w_gateᵀ) · (h · w_upᵀ) with h = rms_norm(x)
struct GateUpSwigluArgs {
    float* out;  // [T, F]
    const float* x;  // [T, M]
    const float* norm;  // [M]
    const Packed* w_gate;  // [F, M]
    const Packed* w_up;  // [F, M]
    int64_t T, F, M;
    double eps;
};

// logits of the wanted rows only: rms_norm(x[rows]) · wᵀ
struct LmHeadArgs {
    float* logits;  // [L, V]
    const float* x;  // [T, M]
    const int32_t* rows;  // [L]
    const float* norm;  // [M]
    const Packed* w;  // [V, M]
    int64_t L, V, T, M;
    double eps;
};

// scores = logits + bias, -inf where masked or banned, less penalties (float32, uncontracted)
struct AdjustLogitsArgs {
    float* scores;  // [L, V]
    const float* logits;  // [L, V]
    const int32_t* bias_ids;  // [J]
    const float* bias_values;  // [J]
    const int32_t* bias_starts;  // [L]
    const int32_t* bias_lens;  // [L]
    const uint32_t* masks;  // [E, I]
    const int32_t* mask_rows;  // [L]
    const int32_t* banned_tokens;  // [U]
    const int32_t* banned_seq_starts;  // [O]
    const int32_t* banned_seq_lens;  // [O]
    const int32_t* banned_starts;  // [L]
    const int32_t* banned_lens;  // [L]
    int32_t* history;  // [Z, X]
    const int32_t* slots;  // [L]
    const int32_t* history_lens;  // [L]
    const int32_t* prompt_lens;  // [L]
    const float* repetition_penalty;  // [L]
    const float* frequency_penalty;  // [L]
    const float* presence_penalty;  // [L]
    int64_t L, V, J, E, I, U, O, Z, X;
    double vocab_size;
};

// a token of softmax(scores / temperature) cut by top_k, top_p, min_p (ops/draw.py); or the best
struct SampleTokensArgs {
    int32_t* tokens;  // [L]
    int32_t* status;  // [L]
    const float* scores;  // [L, V]
    const float* temperature;  // [L]
    const int32_t* top_k;  // [L]
    const float* top_p;  // [L]
    const float* min_p;  // [L]
    const uint64_t* seeds;  // [L]
    const int32_t* draws;  // [L]
    int64_t L, V;
    double vocab_size;
};

// history[slots[l], history_lens[l]] = tokens[l], where the history has room
struct AppendTokensArgs {
    int32_t* history;  // [Z, X]
    const int32_t* tokens;  // [L]
    const int32_t* slots;  // [L]
    const int32_t* history_lens;  // [L]
    int64_t Z, X, L;
};

// log_softmax(logits) of targets (drawn or prompt tokens) and of the top_lens[l] best ids
struct TokenLogprobsArgs {
    float* logprobs;  // [L]
    int32_t* ranks;  // [L]
    int32_t* top_ids;  // [L, K]
    float* top_logprobs;  // [L, K]
    const float* logits;  // [L, V]
    const int32_t* targets;  // [L]
    const int32_t* top_lens;  // [L]
    int64_t L, K, V;
    double vocab_size;
};

// out = rms_norm of each head of x · silu(gate) (the output of Qwen3.5's linear attention)
struct GatedRmsNormArgs {
    float* out;  // [T, H, D]
    const float* x;  // [T, H, D]
    const float* gate;  // [T, H, D]
    const float* weight;  // [D]
    int64_t T, H, D;
    double eps;
};

// x = x · sigmoid(gate) (the gate of Qwen3.5's full attention, arXiv:2505.06708)
struct SigmoidGateArgs {
    float* x;  // [T, A]
    const float* gate;  // [T, A]
    int64_t T, A;
};

// out[t] = silu(Σ taps[w] · x[t - W + 1 + w]) by channel; the last W - 1 inputs of a row are kept
struct CausalConvSiluArgs {
    float* out;  // [T, F]
    float* conv;  // [N, Y, X, F]
    const float* x;  // [T, F]
    const float* taps;  // [W, F]
    const int32_t* state_ids;  // [R]
    const int32_t* state_saves;  // [T]
    const int32_t* query_starts;  // [R]
    const int32_t* query_lens;  // [R]
    const int32_t* context_lens;  // [R]
    int64_t T, F, N, Y, X, W, R;
    double layer;
};

// S ← e^g S; S ← S + k (β (v - Sᵀ k))ᵀ; out = Sᵀ q; g = -e^a_log · softplus(a + dt_bias)
struct GatedDeltaRuleArgs {
    float* out;  // [T, H, V]
    float* delta;  // [N, Y, H, K, V]
    const float* qkv;  // [T, F]
    const float* a;  // [T, H]
    const float* b;  // [T, H]
    const float* a_log;  // [H]
    const float* dt_bias;  // [H]
    const int32_t* state_ids;  // [R]
    const int32_t* state_saves;  // [T]
    const int32_t* query_starts;  // [R]
    const int32_t* query_lens;  // [R]
    const int32_t* context_lens;  // [R]
    int64_t T, H, V, N, Y, K, F, R;
    double layer, eps, tiled;
};

// the K best experts of each token in ascending order, and the weights of their results
struct RouteExpertsArgs {
    int32_t* experts;  // [T, K]
    float* gates;  // [T, K]
    const float* logits;  // [T, N]
    const float* bias;  // [N]; may be null
    int64_t T, K, N;
    double sigmoid, renormalize, scale, groups, kept_groups;
};

// act = silu(h · w_gate[e]ᵀ) · (h · w_up[e]ᵀ) for each expert e of a token; 0 where e is none
struct ExpertGateUpArgs {
    float* act;  // [T, K, F]
    const float* h;  // [T, M]
    const int32_t* experts;  // [T, K]
    const Packed* w_gate;  // [N, F, M]
    const Packed* w_up;  // [N, F, M]
    int64_t T, K, F, M, N;
};

// out = the sum over a token's experts e, in their order, of gate · (act · w_down[e]ᵀ)
struct ExpertDownArgs {
    float* out;  // [T, M]
    const float* act;  // [T, K, F]
    const int32_t* experts;  // [T, K]
    const float* gates;  // [T, K]
    const Packed* w_down;  // [N, M, F]
    int64_t T, M, K, F, N;
};

// x += the sum over ranks of partial; the reference is that of one rank
struct ReduceResidualArgs {
    float* x;  // [T, N]
    const float* partial;  // [T, N]
    int64_t T, N;
};

// out[t] = down[adapters[t]] · a[t] in the channels below the adapter's rank, else 0
struct LoraShrinkArgs {
    float* out;  // [T, X]
    const float* a;  // [T, K]
    const float* down;  // [A, X, K]
    const int32_t* adapters;  // [T]
    const int32_t* ranks;  // [A]
    int64_t T, X, K, A;
};

// out[t] = table[adapters[t], ids[t]] in the channels below the adapter's rank, else 0
struct LoraLookupArgs {
    float* out;  // [T, X]
    const float* table;  // [A, V, X]
    const int32_t* ids;  // [T]
    const int32_t* adapters;  // [T]
    const int32_t* ranks;  // [A]
    int64_t T, X, A, V;
};

// x[t] += h[t] · up[adapters[t]] over the channels below the adapter's rank
struct LoraExpandArgs {
    float* x;  // [T, N]
    const float* h;  // [T, X]
    const float* up;  // [A, X, N]
    const int32_t* adapters;  // [T]
    const int32_t* ranks;  // [A]
    int64_t T, N, X, A;
};

// out = a · w[h]ᵀ of the first K channels of each head h, which has a matrix; the rest copied
struct HeadLinearArgs {
    float* out;  // [T, H, A]
    const float* a;  // [T, H, B]
    const Packed* w;  // [H, N, K]
    int64_t T, H, A, B, N, K;
};

// rotates the last B channels of each head: pairs (i, i + B/2) by positions[t] · frequency[i]
struct RopeTailArgs {
    float* x;  // [T, H, D]
    const int32_t* positions;  // [T]
    const float* cos_sin;  // [P, B]
    int64_t T, H, D, P, B;
};

// caches a row for token t: rms_norm of its first K channels, and its last B rotated
struct LatentAppendArgs {
    uint8_t* kv;  // [N, Y, S, D]
    const float* latent;  // [T, D]
    const float* norm;  // [K]
    const int32_t* positions;  // [T]
    const int32_t* slots;  // [T]
    const float* cos_sin;  // [P, B]
    int64_t N, Y, S, D, T, K, P, B;
    double layer, eps;
};

// causal softmax(q · cᵀ · scale) · c[:K] over cached rows c, which all heads share
struct LatentAttentionArgs {
    float* out;  // [T, H, K]
    const float* q;  // [T, H, D]
    uint8_t* kv;  // [N, Y, S, D]
    const int32_t* query_starts;  // [R]
    const int32_t* query_lens;  // [R]
    const int32_t* context_lens;  // [R]
    const int32_t* block_table;  // [R, W]
    int64_t T, H, K, D, N, Y, S, R, W;
    double layer, scale;
};

// places of experts among those held, first … first + count; -1 where one is not held
struct LocalExpertsArgs {
    int32_t* local;  // [T, K]
    const int32_t* experts;  // [T, K]
    int64_t T, K;
    double first, count;
};

constexpr const char* kDeclarationHash =
    "b39348dc3549ccd139579f76224dbb44849036783ab3c3a676c4e28f07fbc74c";

}  // namespace pega
