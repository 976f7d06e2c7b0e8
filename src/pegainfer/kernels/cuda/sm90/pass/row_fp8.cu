// op embedding, qkv_norm_rope_append, attention, linear_residual, gate_up_swiglu, lm_head: all of them, of a
// step that has one row with one token, in one launch, bf16; layers' weights in FP8 with a scale a row.
#include "row.cuh"

// variant row_pass_fp8_rows_d64: dtype=bf16 weights=fp8_rows head=64 block=288
ROW_PASS_KERNEL(row_pass_fp8_rows_d64, bf16, e4m3, 64)
// variant row_pass_fp8_rows_d128: dtype=bf16 weights=fp8_rows head=128 block=288
ROW_PASS_KERNEL(row_pass_fp8_rows_d128, bf16, e4m3, 128)
