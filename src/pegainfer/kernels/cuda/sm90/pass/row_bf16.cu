// op embedding, qkv_norm_rope_append, attention, linear_residual, gate_up_swiglu, lm_head: all of them, of a
// step that has one row with one token, in one launch, bf16.
#include "row.cuh"

// variant row_pass_bf16_d64: dtype=bf16 head=64 block=288
ROW_PASS_KERNEL(row_pass_bf16_d64, bf16, bf16, 64)
// variant row_pass_bf16_d128: dtype=bf16 head=128 block=288
ROW_PASS_KERNEL(row_pass_bf16_d128, bf16, bf16, 128)
