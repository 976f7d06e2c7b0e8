// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, some tokens,
// f16.
#include "wide.cuh"

// variant wide_f16_128_64: dtype=f16 tokens=128 rows=64
WIDE_KERNEL(f16, 1, 128, 64)
// variant wide_f16_128_88: dtype=f16 tokens=128 rows=88
WIDE_KERNEL(f16, 1, 128, 88)
// variant wide_f16_128_96: dtype=f16 tokens=128 rows=96
WIDE_KERNEL(f16, 1, 128, 96)
// variant wide_f16_128_152: dtype=f16 tokens=128 rows=152
WIDE_KERNEL(f16, 1, 128, 152)
// variant wide_f16_256_64: dtype=f16 tokens=256 rows=64
WIDE_KERNEL(f16, 2, 256, 64)
// variant wide_f16_256_88: dtype=f16 tokens=256 rows=88
WIDE_KERNEL(f16, 2, 256, 88)
// variant wide_f16_256_96: dtype=f16 tokens=256 rows=96
WIDE_KERNEL(f16, 2, 256, 96)
// variant wide_f16_256_152: dtype=f16 tokens=256 rows=152
WIDE_KERNEL(f16, 2, 256, 152)
