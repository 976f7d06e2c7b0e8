// op head_linear: a matrix for each head.
#include "head_linear.cuh"

// variant head_linear_bf16_t16: dtype=bf16 tokens=16 rows=32 block=64 shared=18432
// variant head_linear_bf16_t64: dtype=bf16 tokens=64 rows=64 block=128 shared=49152
// variant head_linear_bf16_t128: dtype=bf16 tokens=128 rows=128 block=256 shared=98304
// variant head_linear_any_bf16: dtype=bf16
HEAD_KERNEL(bf16, bf16, 16, 18432, 1, 2, 1, 2)
HEAD_KERNEL(bf16, bf16, 64, 49152, 2, 2, 2, 4)
HEAD_KERNEL(bf16, bf16, 128, 98304, 2, 4, 4, 4)
HEAD_ANY(bf16, bf16)
// variant head_linear_f16_t16: dtype=f16 tokens=16 rows=32 block=64 shared=18432
// variant head_linear_f16_t64: dtype=f16 tokens=64 rows=64 block=128 shared=49152
// variant head_linear_f16_t128: dtype=f16 tokens=128 rows=128 block=256 shared=98304
// variant head_linear_any_f16: dtype=f16
HEAD_KERNEL(f16, f16, 16, 18432, 1, 2, 1, 2)
HEAD_KERNEL(f16, f16, 64, 49152, 2, 2, 2, 4)
HEAD_KERNEL(f16, f16, 128, 98304, 2, 4, 4, 4)
HEAD_ANY(f16, f16)
// variant head_linear_any_f32: dtype=f32
HEAD_ANY(f32, float)
