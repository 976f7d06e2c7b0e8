// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, few tokens, f16.
#include "skinny.cuh"

// variant skinny_f16_8_1: dtype=f16 tokens=8 rows=64
SKINNY_KERNEL(f16, 8, 1)
// variant skinny_f16_8_2: dtype=f16 tokens=8 rows=128
SKINNY_KERNEL(f16, 8, 2)
// variant skinny_f16_8_3: dtype=f16 tokens=8 rows=192
SKINNY_KERNEL(f16, 8, 3)
// variant skinny_f16_16_1: dtype=f16 tokens=16 rows=64
SKINNY_KERNEL(f16, 16, 1)
// variant skinny_f16_16_2: dtype=f16 tokens=16 rows=128
SKINNY_KERNEL(f16, 16, 2)
// variant skinny_f16_16_3: dtype=f16 tokens=16 rows=192
SKINNY_KERNEL(f16, 16, 3)
// variant skinny_f16_32_1: dtype=f16 tokens=32 rows=64
SKINNY_KERNEL(f16, 32, 1)
// variant skinny_f16_32_2: dtype=f16 tokens=32 rows=128
SKINNY_KERNEL(f16, 32, 2)
// variant skinny_f16_32_3: dtype=f16 tokens=32 rows=192
SKINNY_KERNEL(f16, 32, 3)
// variant skinny_f16_64_1: dtype=f16 tokens=64 rows=64
SKINNY_KERNEL(f16, 64, 1)
// variant skinny_f16_64_2: dtype=f16 tokens=64 rows=128
SKINNY_KERNEL(f16, 64, 2)
// variant skinny_f16_64_3: dtype=f16 tokens=64 rows=192
SKINNY_KERNEL(f16, 64, 3)
