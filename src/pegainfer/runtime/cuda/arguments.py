"""The argument structs of the CUDA kernels. `python -m pegainfer.kernels.headers` writes them to
kernels/cuda/include/arguments.cuh.

Long because it is a list: each struct that Python fills has its one declaration here.
"""

from __future__ import annotations

from pegainfer.runtime.cuda.layout import Layout

MAX_GROUPS = 8  # KV groups of a model
MAX_RANKS = 8  # tensor-parallel ranks of a group of GPUs
MAX_LAYERS = 80  # of a decode pass in one launch; 5 KB of the kernel's parameters

# Attention

ATTENTION = Layout(
    "attention::Args",
    "What the attention kernels read and write.",
    """
    void* out  // [T, H, D]
    const void* q  // [T, H, D]
    const void* kv  // the layer's part of the first page
    const int* query_starts  // [R]
    const int* query_lens  // [R]
    const int* context_lens  // [R]
    const int* block_table  // [R, W]
    const Plan* plan
    const Item* items  // of this kernel
    const int* firsts  // decode: the first item of each share, and the end; null: every block takes any
    float* sums  // [slots, ...]: weighted values, float32
    float2* heads  // [slots, ...]: (maximum, sum of weights)
    int64_t page_stride  // elements
    int h
    int g
    int block_size
    int table_width
    float scale_log2  // of the scores, for powers of two
    float v_scale  // of what an 8-bit cache holds as values
    """,
)
ATTENTION_PLAN = Layout(
    "attention::PlanArgs",
    "The work list that attention_plan makes.",
    """
    Plan* plan
    Cut* cuts  // [R], of each row, or of the rows that shares cut; 0 parts: no such
    int* firsts  // [shares + 1]: the first decoded item of each, and the end
    Item* merges  // prefilled tiles in several parts
    Item* decode  // room for all
    Item* prefill  // likewise
    const int* query_starts
    const int* query_lens
    const int* context_lens
    int rows
    int group  // query heads a KV head
    int kv_heads
    int tile_rows  // of the prefill kernel: (token, head of the group) pairs
    int decode_slots  // room for the sums of decoded parts
    int prefill_slots  // room for the sums of prefilled parts
    int shares  // of decoded rows; 0: rows are cut by their own length
    int chunk  // keys of a decoded part, of rows that are short
    """,
)
ATTENTION_MERGE = Layout(
    "attention::MergeArgs",
    "Parts of rows that are added up.",
    """
    void* out  // [T, H, D]
    const Plan* plan
    const Cut* cuts  // decoded rows
    const Item* merges  // prefilled tiles
    const float4* sums  // [slots, ...]
    const float2* heads  // [slots, ...]
    int h
    int g
    int tile_rows
    """,
)
ATTENTION_ROW = Layout(
    "attention::RowArgs",
    "How the blocks of a step of one row meet.",
    """
    unsigned* arrivals  // [units], 0 before and after
    int cluster_keys
    """,
)
PROJECTED = Layout(
    "attention::ProjectedArgs",
    "Heads as the projection leaves them, and what finishes them.",
    """
    const void* qkv  // [T, width, D], of which the first H + 2 G are read
    void* kv  // as in Args
    const float* q_norm  // [D] or null
    const float* k_norm  // [D] or null
    const int* positions  // [T]
    const int* slots  // [T]; negative: nothing is cached
    const float* cos_sin  // [P, D]
    int width  // heads of a token
    float eps
    float k_inverse  // what keys are multiplied by for an 8-bit cache
    float v_inverse
    """,
)
NORM_ROPE_APPEND = Layout(
    "NormRopeAppendArgs",
    "Heads that are finished in a launch of their own.",
    """
    void* q  // [T, H, D]
    void* gate  // [T, H, D] or null
    void* kv  // the layer's part of the first page; pages are [2, G, S, D]
    const void* qkv  // [T, H + 2 G, D], with a gate [T, 2 H + 2 G, D]
    const float* q_norm  // [D] or null
    const float* k_norm  // [D] or null
    const int* positions  // [T]
    const int* slots  // [T]; negative: padding, nothing is cached
    const float* cos_sin  // [P, D]
    int64_t page_stride  // elements
    int tokens
    int h
    int g
    int block_size
    float eps
    float k_inverse  // what keys are multiplied by for an 8-bit cache
    float v_inverse
    """,
)

# Latent attention

HEAD_LINEAR = Layout(
    "mla::HeadArgs",
    "A matrix for each head.",
    """
    void* out  // [T, H, out_width]
    const void* a  // [T, H, a_width]
    const void* w  // [H, N, K]
    int tokens
    int h
    int n
    int k
    int a_width  // K and the channels that are copied
    int out_width  // N and as many
    const int2* range  // tokens outside the range (first, end) need no result; null: all are wanted
    """,
)
MLA_EXPAND_PLAN = Layout(
    "attention::ExpandPlanArgs",
    "Which rows are attended over expanded latents, in which rounds.",
    """
    Plan* plans  // [rounds]
    Item* items  // [rounds, item_room]
    Item* merges  // tiles of queries in several parts
    int2* sources  // [rounds, tiles]: a tile of keys' row, and its number in the row
    int* rest  // [R]: query tokens that absorbed attention serves
    int2* absorbed  // all of those tokens are in the range (first, end)
    const int* query_starts
    const int* query_lens
    const int* context_lens
    int rows
    int heads
    int rounds
    int tiles  // of 128 keys, in a round
    int slots  // room for the sums of tiles of queries
    int item_room  // of a round
    int least  // query tokens of a row that is expanded
    """,
)
MLA_EXPAND = Layout(
    "attention::ExpandArgs",
    "Keys and values of a round's tiles of cached latents.",
    """
    void* out  // [tiles, 128, H * 256 + 64]
    const void* kv  // the layer's part of the first page
    const int* block_table  // [R, W]
    const int* context_lens  // [R]
    const Plan* plan  // of the round
    const int2* sources  // [tiles]
    int64_t page_stride  // elements
    int h
    int block_size
    int table_width
    """,
)
LATENT_APPEND = Layout(
    "mla::AppendArgs",
    "Latents, their norm, and where they are cached; and heads of queries beside them.",
    """
    void* kv  // the layer's part of the first page
    void* q  // [T, H, head_dim]; mla_finish only
    const void* latent  // [T, ...]: rank + rotated channels; mla_finish: behind the token's heads
    const float* norm  // [rank]
    const int* positions  // [T]
    const int* slots  // [T]; negative: nothing is cached
    const float* cos_sin  // [P, rotated]: cosines of the pairs, then sines
    int64_t stride  // elements from a token of latent to the next
    int64_t page_stride  // elements
    int tokens
    int h  // heads of queries; mla_finish only
    int head_dim  // likewise
    int rank
    int rotated
    int block_size
    float eps
    """,
)

# GEMM

STREAM = Layout(
    "stream::Args",
    "A GEMM whose weight is streamed through rings of cp.async stages.",
    """
    void* out  // [M, ld_out]
    const void* x  // [*, K]
    const void* w  // [N, K]
    const float* norm  // [K]: x is normalised first and multiplied by this; splits must be 1
    const int* rows  // [M]: which rows of x; null: the first M
    float* partial  // [splits, M, N] if splits > 1
    int* arrivals  // [groups] zeros if splits > 1, and zeros again afterwards
    int m
    int n
    int k
    int ld_out
    int splits
    int depth
    float eps
    """,
)
SKINNY = Layout(
    "skinny::Args",
    "A GEMM of wgmma, whose operands come by TMA.",
    """
    void* out  // [M, ld_out]; for RESIDUAL it is added to
    const float* squares  // [square_groups, MAX_TOKENS] of what x was before the norm; null: x as it is
    const float* norm  // RESIDUAL: [N] weight of the norm that follows; null: none does
    void* normed  // [M, N]: the new residual times `norm`
    float* next_squares  // [tiles * ceil(rows / 32), MAX_TOKENS] of the new residual
    int m
    int n
    int k
    int ld_out
    int kind  // Out
    int rows  // of a tile: a multiple of 8
    int groups  // of blocks, gridDim.y; each takes every groups-th tile
    int rounds  // tiles of a group
    int longer  // so many groups at the front take one tile more
    int splits  // of k, gridDim.x: a cluster; if there are several, it has one tile
    int chunks  // stages of a split
    int leftover  // so many splits at the front take one stage more
    int wide  // boxes of 64 k in a stage
    int depth_w  // stages of the weight's ring
    int depth_x  // stages of the ring of x
    int trigger  // stages still to ask for when the next launch may start
    int square_groups
    int sums  // where a tile's sums lie in shared memory
    int before  // where what a tile's end needs lies there
    float eps
    """,
)

FP8_GEMM = Layout(
    "fp8::Args",
    "A GEMM of E4M3 operands, which come by TMA.",
    """
    void* out  // [M, ld_out]; for RESIDUAL it is added to
    const float* x_scales  // [K / 128, pitch]
    const float* w_scales  // [N], or [K / 128, N]
    float* sums  // of several splits: [splits, tiles, sums of a tile]
    unsigned* arrivals  // of several splits: one a tile, zero before the launch and after it
    int m
    int n
    int k  // a multiple of 128
    int ld_out
    int pitch  // a multiple of 128
    int kind  // skinny::Out
    int tiles_m
    int tiles_n
    int splits  // of k
    int depth  // stages of the ring
    """,
)
PACKED = Layout(
    "packed::Args",
    "A GEMM of a quantised weight.",
    """
    void* out  // [M, ld_out]; for RESIDUAL it is added to
    const void* x  // [M, K]
    const void* w  // [N, K] in tiles, see common/packed/form.cuh
    float* partial  // room for two parts of a cell, of each block
    int* arrivals  // [cells] zeros, and zeros again afterwards
    const float* squares  // [square_groups, squares_width] of what x was before the norm; null: x as it is
    const float* norm  // RESIDUAL: [N] weight of the norm that follows
    void* normed  // [M, N]: the new residual times `norm`; null: no norm follows
    float* next_squares  // [cells' 32 rows, squares_width] of the new residual
    int m
    int n
    int k
    int ld_out
    int kind  // Kind
    int cells
    int token_blocks  // cells of the same rows
    int chunks  // of 128 columns
    int depth  // stages of the ring
    int square_groups
    int squares_width
    float eps
    """,
)
PACK = Layout(
    "packed::PackArgs",
    "Rows of a matrix that are put into tiles.",
    """
    void* out  // the packed matrix
    const void* in  // [rows, row_bytes]: blocks of a file
    int64_t row_bytes
    int64_t seed
    int rows
    int k
    int across  // tiles of columns
    int row  // of the matrix: the first of these rows
    int first  // row of the packed matrix where this one begins; of pairs, 1 for the second
    int pairs  // 1: eight rows of each of two matrices share a tile
    float scale
    """,
)
EXPAND = Layout(
    "packed::ExpandArgs",
    "Rows of a packed matrix that are expanded to bf16.",
    """
    void* out  // [rows or ids, K]
    const void* w
    const int* ids  // of rows, where some are taken
    int rows  // expanded, or that the matrix has
    int k
    int across  // tiles of columns
    int pairs  // 1: as in PackArgs
    """,
)

# The decode pass of one row

PASS_LAYER = Layout(
    "pass::Layer",
    "A layer's weights.",
    """
    const void* qkv  // [(H + 2 G) D, M]
    const void* o  // [M, H D]
    const void* gate_up  // [2 F, M]: (gate, up) pairs of rows
    const void* down  // [M, F]
    const float* attn_norm  // [M]
    const float* q_norm  // [D] or null
    const float* k_norm  // [D] or null
    const float* mlp_norm  // [M]
    const float* qkv_scales  // of FP8 weights: one a row; as the next three
    const float* o_scales
    const float* gate_up_scales
    const float* down_scales
    """,
)
PASS_LAYERS = Layout("pass::Layers", "All layers.", f"Layer layer[{MAX_LAYERS}]", (PASS_LAYER,))
PASS = Layout(
    "pass::Args",
    "The rest of what a decode pass reads and writes.",
    """
    const void* embedding  // [V, M]
    const void* head  // [V, M]
    const float* norm  // [M]
    const int* token_ids  // [1], as the next five
    const int* positions
    const int* slots  // negative: nothing is cached
    const int* query_lens
    const int* context_lens
    const int* block_table  // [1, W]
    const float* cos_sin  // [P, D]
    void* kv  // [N, Y, 2, G, S, D]
    void* x  // [M]
    float* logits  // [V]
    uint32_t* words  // results that blocks exchange: x [M], qkv [(H + 2 G) D], attn [H D], act [F]
    uint2* parts  // attention's parts: [parts, H, D + 1]
    unsigned* launches  // [2]: launches on these words so far; blocks that have ended, 0 before and after
    int layers
    int m
    int h
    int g
    int f
    int v
    int block_size
    int stage  // bytes of a stage of the ring, a multiple of 1024
    int depth  // stages of the ring
    int window  // stages that may be in flight at a time
    float eps
    float scale_log2
    """,
)

# Recurrent layers

STEP_ROWS = Layout(
    "StepRows",
    "Row r's tokens are starts[r] .. + lens[r] and its state is entry ids[r] of the pool; the state after "
    "token t is also written to entry saves[t]. Negative: none.",
    """
    const int* ids  // [R]
    const int* saves  // [T]
    const int* starts  // [R]
    const int* lens  // [R]
    const int* contexts  // [R]
    """,
)
CONV = Layout(
    "ConvArgs",
    "A causal convolution.",
    """
    T* out  // [T, F]
    T* pool  // the layer's part of state 0: [kept, F]
    const T* x  // [T, x_stride], of which F channels are read
    const float* taps  // [kept + 1, F]
    StepRows rows
    int64_t entry  // elements from a state to the next
    int64_t x_stride  // elements from a token of x to the next
    int channels
    int kept
    int num_rows
    """,
    (STEP_ROWS,),
    template="T",
)
DELTA = Layout(
    "DeltaArgs",
    "The gated delta rule.",
    """
    T* out  // [T, H, V]
    void* pool  // the layer's part of state 0: [H, K, V] of float or bf16
    const T* qkv  // [T, F]: q of G key heads, k of as many, v of H value heads
    const T* a  // [T, gate_stride], of which H are read
    const T* b  // likewise
    const float* a_log  // [H]
    const float* dt_bias  // [H]
    StepRows rows
    int64_t entry  // elements from a state to the next
    int64_t gate_stride  // elements from a token of a or b to the next
    int channels
    int heads
    int key_heads
    int key_dim
    int value_dim
    float eps
    float scale  // K^-1/2, of q
    int tiled  // 1: value head h reads key head h mod G instead of h / (H / G)
    """,
    (STEP_ROWS,),
    template="T",
)
DELTA_DECODE = Layout(
    "DeltaDecodeArgs",
    "A layer of linear attention behind its projections, for rows of one token.",
    """
    T* out  // [T, H, 128]
    T* conv  // the layer's part of convolution state 0: [3, F]
    void* delta  // the layer's part of matrix state 0: [H, 128, 128] of float or bf16
    const T* x  // [T, x_stride]: F channels of q, k and v, then H of 128 gates, H of a, H of b
    const float* taps  // [4, F]
    const float* a_log  // [H]
    const float* dt_bias  // [H]
    const float* norm  // [128]
    int* arrivals  // [R, G] zeros, and zeros again afterwards
    StepRows rows
    int64_t conv_entry  // elements from a state to the next
    int64_t delta_entry
    int64_t x_stride
    int heads
    int key_heads
    int chain  // value heads that a block takes in turn: 1, or all of a key head
    int units  // such chains in the step
    float eps  // of the norm
    float key_eps  // added to the squared length of q and k
    int tiled  // as in DeltaArgs
    """,
    (STEP_ROWS,),
    template="T",
)
DELTA_CHUNKS = Layout(
    "ChunkArgs",
    "What delta_chunk_prepare leaves for delta_chunk_scan. Rows of the matrices are whole up to the end of "
    "their diagonal block of 16; nothing behind it is read.",
    """
    T* inverse  // [T, H, 64]: row of (I + A)^-1
    T* products  // [T, H, 64]: row of P
    float4* factors  // [T, H]: G, β, 1 / |k|, K^-1/2 / |q|
    int num_rows
    int stages  // chunks that a block of the scan has room for in shared memory: 1, 2 or 3
    """,
    template="T",
)

# Mixture of experts

ROUTE_EXPERTS = Layout(
    "route::Args",
    "The router of a mixture of experts.",
    """
    int* experts  // [T, K]
    float* gates  // [T, K]
    const float* logits  // [T, N]
    const float* bias  // [N] or null
    int tokens
    int n
    int k
    int sigmoid
    int renormalize
    int groups
    int kept_groups
    float scale
    """,
)
ROUTE_FEW = Layout(
    "route::FewArgs",
    "The norm and the router's GEMM ahead of routing, for a few tokens.",
    """
    void* h  // [T, M]: x, normalised
    float* logits  // [T, N]
    const void* x  // [T, M]
    const float* norm  // [M]
    const void* w  // [N, M]
    int* arrivals  // [1] zero, and zero again afterwards
    int m
    float eps
    """,
)
ROUTER_LOGITS = Layout(
    "route::LogitsArgs",
    "The norm and the router's GEMM of up to 8 tokens.",
    """
    void* h  // [T, M]: x times the norm's weight
    float* scales  // [T]: 1 / rms, by which a GEMM with h is multiplied
    float* logits  // [T, N]
    const void* x  // [T, M]
    const float* norm  // [M]
    const void* w  // [N, M]
    const void* w_shared  // [1, M], of the shared expert's gate; null: it has none
    float* shared_gates  // [T]: the sigmoid of its logit
    int tokens
    int n
    int m
    float eps
    """,
)
EXPERTS_UP = Layout(
    "few::UpArgs",
    "The gate and up projections of the experts of up to 8 tokens.",
    """
    void* act  // [matrices, 8, F]: only rows of tokens that chose the expert
    const void* h  // [T, M], not yet scaled
    const float* scales  // [T]
    const float* shared_gates  // [T]; null: 1
    int tokens
    int shared  // matrices that are a shared expert's
    int m
    int f
    int rows  // of a matrix in a tile, 8 or 16
    int tiles  // of a matrix
    int chunks  // stages of a tile, of 512 columns
    int depth  // stages of the ring
    int trigger  // stages left to be copied when the next launch may start
    """,
)
EXPERTS_DOWN = Layout(
    "few::DownArgs",
    "The down projections of the experts of up to 8 tokens, and each token's sum.",
    """
    void* x  // [T, M]: the residual stream, to which the sums are added; null: they go to `out`
    float* out  // [T, M]
    const void* act  // [matrices, 8, F]
    const float* norm  // [M] of the norm that follows; null: the next two are not wanted
    void* normed  // [T, M]: x times the norm's weight
    float* squares  // [M / rows, 64]: sums of squares of x
    int tokens
    int shared  // matrices that are a shared expert's
    int m
    int f
    int rows  // of a matrix in a tile, 8 or 16
    int boxes  // of 64 columns in a stage
    int chunks  // stages of a tile of one matrix
    int depth  // stages of the ring
    int trigger  // stages left to be copied when the next launch may start
    """,
)
SORT_SLOTS = Layout(
    "slots::SortArgs",
    "Slots (each is one of a token's K places for an expert), and their order by expert.",
    """
    int* order  // [slots]: slots by expert
    int* places  // [slots]: where a slot is in `order`, -1 without expert; null: not wanted
    int4* blocks  // [most blocks]: expert, first in `order`, count, 0
    int* in_use  // [1]: blocks in use
    const int* experts  // [slots]
    uint8_t* zeroed  // [slots, row_bytes]: rows of slots without expert become zeros; null: none do
    int slots
    int num_experts
    int row_bytes
    int tile  // most slots of a block
    """,
)
EXPERTS = Layout(
    "experts::Args",
    "Products of slots with the matrices of their experts.",
    """
    void* out  // [slots, n], or [slots, n / 2] of pairs
    const void* x  // [slots / each, k]
    const int* experts  // [slots]
    const void* w  // [num_experts, n, k]
    const int* order  // as sort_slots leaves it, like the next two; null for expert_rows
    const int4* blocks
    const int* in_use
    int slots
    int num_experts
    int n
    int k
    int each  // slots that share a row of x
    """,
)
EXPERT_STREAM = Layout(
    "experts::StreamArgs",
    "Products of a few slots, for which the chosen matrices are streamed.",
    """
    void* out  // pairs: [slots, n / 2]; sums: [T, n] float32, or null
    void* residual  // sums: [T, n], to which they are added; null: they go to `out`
    const void* x  // pairs: [T, k]; sums: [slots, k]
    const void* w  // [num_experts, n, k]
    const float* gates  // sums: [slots]
    const int* order  // as sort_slots leaves it, like the next two
    const int4* blocks  // of at most 8 slots
    const int* in_use
    int slots
    int most  // room in `blocks`
    int tokens
    int chosen  // K, slots of a token
    int n
    int k
    int depth  // stages of each warp's ring
    int early  // 1: the lists were made before the kernel ahead
    """,
)
EXPERT_GROUPS = Layout(
    "grouped::Args",
    "A grouped GEMM of slots that lie sorted by expert.",
    """
    void* out  // [slots, n], or [slots, n / 2] of pairs
    const int* order  // rows of `out`; null: results lie sorted as x does
    const int4* blocks  // expert, first slot, count
    const int* in_use
    int n
    int k
    int tiles  // of the rows of a matrix
    int tile  // rows of x in a stage
    int depth  // stages of the ring
    """,
)
SPREAD_ROWS = Layout(
    "slots::SpreadArgs",
    "Rows that are copied to where their slots lie when sorted.",
    """
    void* out  // [slots, m]
    const void* x  // [slots / each, m]
    const int* places  // [slots]
    int each  // slots that share a row of x
    int m
    """,
)
SUM_EXPERTS = Layout(
    "slots::SumArgs",
    "Each token's weighted sum of its experts' results.",
    """
    float* out  // [T, M], or null
    void* residual  // [T, M], to which the sums are added; null: they go to `out`
    const void* results  // [T K, M]
    const int* places  // [T, K]: rows of `results`; null: each slot has its own
    const int* experts  // [T, K]
    const float* gates  // [T, K]
    int num_experts
    int k
    int m
    """,
)

# Sampling

ADJUST_LOGITS = Layout(
    "AdjustArgs",
    "Logits and what adjusts them; operands of the op adjust_logits have their names.",
    """
    float* scores  // [L, V]
    const float* logits  // [L, V]
    const int* bias_ids
    const float* bias_values
    const int* bias_starts
    const int* bias_lens
    const uint32_t* masks  // [E, I]
    const int* mask_rows
    const int* banned_tokens
    const int* banned_seq_starts
    const int* banned_seq_lens
    const int* banned_starts
    const int* banned_lens
    const int* history  // [Z, X]
    const int* slots
    const int* history_lens
    const int* prompt_lens
    const float* repetition_penalty
    const float* frequency_penalty
    const float* presence_penalty
    int* plain  // [L]: 1 where nothing is to be done, and `scores` is left alone; null: it never is
    int vocab  // ids that name tokens: the scores behind them are -inf
    int columns  // V, or those of this rank
    int first  // id of the first column
    int mask_words
    int width
    int unused  // pads to a multiple of a pointer
    """,
)
SAMPLE_TOKENS = Layout(
    "SampleArgs",
    "Scores, how tokens are drawn from them, and memory for what the three launches pass on.",
    """
    int* tokens  // [L]
    int* status  // [L]
    const float* scores  // [L, V]
    const float* logits  // [L, V], of rows that are `plain`
    const int* plain  // [L]; null: no row is
    const float* temperature
    const int* top_k
    const float* top_p
    const float* min_p
    const unsigned long long* seeds
    const int* draws
    unsigned long long* peaks  // [L, chunks]: place of the chunk's best, or NOT_A_NUMBER
    unsigned long long* sums  // [L, chunks]: weights
    unsigned long long* bin_weights  // [L, BINS]
    uint32_t* bin_counts  // [L, BINS]
    void* control  // ranks::Control, of those that have the other columns; null: there are none
    int vocab  // ids that name tokens: the columns behind them are not read
    int columns  // V, or those of this rank
    int first  // id of the first column
    int chunks
    int start  // row of the first block, in launches whose blocks are rows
    int unused  // pads to a multiple of a pointer
    """,
)
TOKEN_LOGPROBS = Layout(
    "LogprobArgs",
    "Logits, the tokens whose log-probabilities are wanted, and memory for what the launches pass on.",
    """
    float* logprobs  // [L]
    int* ranks  // [L]
    int* top_ids  // [L, K]
    float* top_logprobs  // [L, K]
    const float* logits  // [L, V]
    const int* targets  // [L]
    const int* top_lens  // [L]; negative: the row is skipped
    float2* parts  // [L, chunks]: (maximum or NaN, sum of exp)
    int* before  // [L, chunks]
    unsigned long long* best  // [L, chunks, K] places, best first; 0 behind the last
    int vocab  // ids that name tokens: the columns behind them are not read
    int columns  // V
    int chunks
    int k
    """,
)

# Step inputs

GROUP = Layout(
    "Group",
    "A KV group. A slot's tables lie in one row of `tables`: each group has `width` columns from `first` on.",
    """
    int* by_row  // pages: block table [rows, width]; states: state ids [rows]; null: the program reads none
    int* by_token  // pages: place of each token; states: state that is saved after it, or -1; null likewise
    int first
    int width
    int block_size  // tokens a block; 0: a group of states, whose one column is the slot's state
    int unused  // pads to a multiple of a pointer
    """,
)
DECODE_INPUTS = Layout(
    "DecodeInputs",
    "What a decode step's inputs are made of. Outputs have the names of the forward pass's inputs.",
    f"""
    int* token_ids
    int* positions
    int* query_starts
    int* query_lens
    int* context_lens
    int* logit_rows
    int* adapters  // of each row; null: the program has none
    int* logit_adapters  // of each logit row; null likewise
    int* history_lens  // of the sampler, one higher after every step of the same batch
    int* draws  // likewise
    int* batch  // count; then of each row slot, position, logit row, one save a state group
    const int* history  // [Z, history_width]
    const int* tables  // [Z, table_width]
    int history_width
    int table_width
    int batch_width
    int adapter_column  // of `tables`: each slot's adapter
    int num_groups
    int unused  // pads to a multiple of a pointer
    Group groups[{MAX_GROUPS}]
    """,
    (GROUP,),
)
GATHER_INPUTS = Layout(
    "GatherInputs",
    "Where the inputs of a step that is no decode step come from.",
    f"""
    int* token_ids  // [tokens]
    const int* history  // [Z, X], read at `places`
    const int* places  // [tokens]: slot * X + position
    const int* rows  // [R]: slots
    const int* tables  // [Z, table_width]
    int tokens
    int table_width
    int num_groups
    Group groups[{MAX_GROUPS}]
    """,
    (GROUP,),
)
PUBLISH = Layout(
    "Publish",
    "Tokens and status of a step, and the ring of slots that the host reads.",
    """
    const int* tokens  // [rows]
    const int* status  // [rows]
    int* ring  // of the host: [slots, 2, width], tokens and status of one step each
    unsigned* ticket  // steps published so far: which slot is next
    int rows
    int width
    int slots
    """,
)

# Several ranks

PEER = Layout("ranks::Peer", "One rank's exchange memory.", "uint8_t* base  // as this rank has it mapped")
CONTROL = Layout(
    "ranks::Control",
    "A rank's view of its group, in device memory.",
    f"""
    int64_t joined  // sums that this rank has joined
    int64_t limit  // ns: how long to wait for another rank
    int64_t part_bytes  // of a slot of exchange memory
    int* failed  // the group's word in the host's memory: 1 + rank of the first that failed, see ranks.cuh
    uint32_t arrived  // blocks of the sum under way that have ended
    int alone  // not 0: nothing is exchanged, and each rank's own part is the sum
    int rank
    int count  // of ranks
    Peer peers[{MAX_RANKS}]
    """,
    (PEER,),
)
SUM_RANKS = Layout(
    "ranks::SumArgs",
    "What a sum over ranks reads and writes.",
    """
    void* x  // [count], to which the sum is added
    const float* partial  // [count], this rank's part
    Control* control
    int64_t count  // a multiple of 4
    """,
)
SUM_NORM = Layout(
    "ranks::SumNormArgs",
    "What a sum over ranks and the norm behind it read and write.",
    """
    void* x  // [T, n], to which the sum is added
    const float* partial  // [T, n], this rank's part
    Control* control
    const float* norm  // [n]
    void* normed  // [T, n]: the new x times the norm's weight
    float* squares  // [parts, 64]: sums of the new x's squares, by part of a row and token
    int n  // a multiple of 4
    """,
)
GATHER_RANKS = Layout(
    "ranks::GatherArgs",
    "What gathers the columns of a matrix, of which each rank has made some.",
    """
    float* out  // [rows, columns]
    const float* part  // [rows, this rank's columns]
    const int* wanted  // [rows]: rows of negative numbers are left out
    Control* control
    int rows
    int columns  // a multiple of 4
    int each  // columns of a rank, a multiple of 4; the last one's are fewer where they do not divide
    int most  // rows that a slot holds
    """,
)

# In the order of the header: a struct stands behind those that it holds.
LAYOUTS = (
    ATTENTION, ATTENTION_PLAN, ATTENTION_MERGE, ATTENTION_ROW, PROJECTED, NORM_ROPE_APPEND,
    HEAD_LINEAR, MLA_EXPAND_PLAN, MLA_EXPAND, LATENT_APPEND, STREAM, SKINNY, FP8_GEMM, PACKED, PACK, EXPAND,
    PASS_LAYER, PASS_LAYERS, PASS, STEP_ROWS, CONV, DELTA, DELTA_DECODE, DELTA_CHUNKS, ROUTE_EXPERTS,
    ROUTE_FEW, ROUTER_LOGITS, EXPERTS_UP, EXPERTS_DOWN, SORT_SLOTS, EXPERTS, EXPERT_STREAM, EXPERT_GROUPS,
    SPREAD_ROWS, SUM_EXPERTS,
    PEER, CONTROL, SUM_RANKS, SUM_NORM, GATHER_RANKS,
    ADJUST_LOGITS, SAMPLE_TOKENS, TOKEN_LOGPROBS, GROUP, DECODE_INPUTS, GATHER_INPUTS, PUBLISH,
)  # fmt: skip
