// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection with FP8
// weights, few tokens, bf16; a scale for 128 columns of a row.
#include "skinny_fp8.cuh"

// variant skinny_fp8_groups_8_1: dtype=bf16 weights=fp8_groups tokens=8 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_groups_8_1, true, 8, 1)
// variant skinny_fp8_groups_8_2: dtype=bf16 weights=fp8_groups tokens=8 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_groups_8_2, true, 8, 2)
// variant skinny_fp8_groups_8_3: dtype=bf16 weights=fp8_groups tokens=8 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_groups_8_3, true, 8, 3)
// variant skinny_fp8_groups_16_1: dtype=bf16 weights=fp8_groups tokens=16 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_groups_16_1, true, 16, 1)
// variant skinny_fp8_groups_16_2: dtype=bf16 weights=fp8_groups tokens=16 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_groups_16_2, true, 16, 2)
// variant skinny_fp8_groups_16_3: dtype=bf16 weights=fp8_groups tokens=16 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_groups_16_3, true, 16, 3)
// variant skinny_fp8_groups_32_1: dtype=bf16 weights=fp8_groups tokens=32 rows=64
SKINNY_FP8_KERNEL(skinny_fp8_groups_32_1, true, 32, 1)
// variant skinny_fp8_groups_32_2: dtype=bf16 weights=fp8_groups tokens=32 rows=128
SKINNY_FP8_KERNEL(skinny_fp8_groups_32_2, true, 32, 2)
// variant skinny_fp8_groups_32_3: dtype=bf16 weights=fp8_groups tokens=32 rows=192
SKINNY_FP8_KERNEL(skinny_fp8_groups_32_3, true, 32, 3)
