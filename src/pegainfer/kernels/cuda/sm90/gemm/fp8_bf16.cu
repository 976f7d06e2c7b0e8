// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection in FP8, many
// tokens, bf16 output.
#include "fp8.cuh"

// variant fp8_rows_bf16_64: dtype=bf16 weights=fp8_rows columns=64
FP8_KERNEL(fp8_rows_bf16_64, bf16, false, 64)
// variant fp8_rows_bf16_96: dtype=bf16 weights=fp8_rows columns=96
FP8_KERNEL(fp8_rows_bf16_96, bf16, false, 96)
// variant fp8_rows_bf16_128: dtype=bf16 weights=fp8_rows columns=128
FP8_KERNEL(fp8_rows_bf16_128, bf16, false, 128)
// variant fp8_rows_bf16_160: dtype=bf16 weights=fp8_rows columns=160
FP8_KERNEL(fp8_rows_bf16_160, bf16, false, 160)
// variant fp8_groups_bf16_64: dtype=bf16 weights=fp8_groups columns=64
FP8_KERNEL(fp8_groups_bf16_64, bf16, true, 64)
// variant fp8_groups_bf16_96: dtype=bf16 weights=fp8_groups columns=96
FP8_KERNEL(fp8_groups_bf16_96, bf16, true, 96)
// variant fp8_groups_bf16_128: dtype=bf16 weights=fp8_groups columns=128
FP8_KERNEL(fp8_groups_bf16_128, bf16, true, 128)
// variant fp8_groups_bf16_160: dtype=bf16 weights=fp8_groups columns=160
FP8_KERNEL(fp8_groups_bf16_160, bf16, true, 160)
