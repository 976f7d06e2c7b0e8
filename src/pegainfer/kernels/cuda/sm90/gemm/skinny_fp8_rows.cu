// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection with FP8
// weights, few tokens, bf16; a scale a row.
#include "skinny_fp8.cuh"

// variant skinny_fp8_rows_8_1: dtype=bf16 weights=fp8_rows tokens=8 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_rows_8_1, false, 8, 1)
// variant skinny_fp8_rows_8_2: dtype=bf16 weights=fp8_rows tokens=8 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_rows_8_2, false, 8, 2)
// variant skinny_fp8_rows_8_3: dtype=bf16 weights=fp8_rows tokens=8 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_rows_8_3, false, 8, 3)
// variant skinny_fp8_rows_16_1: dtype=bf16 weights=fp8_rows tokens=16 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_rows_16_1, false, 16, 1)
// variant skinny_fp8_rows_16_2: dtype=bf16 weights=fp8_rows tokens=16 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_rows_16_2, false, 16, 2)
// variant skinny_fp8_rows_16_3: dtype=bf16 weights=fp8_rows tokens=16 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_rows_16_3, false, 16, 3)
// variant skinny_fp8_rows_32_1: dtype=bf16 weights=fp8_rows tokens=32 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_rows_32_1, false, 32, 1)
// variant skinny_fp8_rows_32_2: dtype=bf16 weights=fp8_rows tokens=32 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_rows_32_2, false, 32, 2)
// variant skinny_fp8_rows_32_3: dtype=bf16 weights=fp8_rows tokens=32 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_rows_32_3, false, 32, 3)
