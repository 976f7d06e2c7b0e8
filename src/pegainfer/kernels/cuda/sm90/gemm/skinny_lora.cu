// op lora_linear_residual, lora_gate_up_swiglu, lora_qkv_norm_rope_append: the projection and what adapters
// add to it, few tokens, bf16.
#include "skinny.cuh"

// variant skinny_lora_bf16_8_1: dtype=bf16 tokens=8 rows=64
SKINNY_LORA_KERNEL(bf16, 8, 1)
// variant skinny_lora_bf16_8_2: dtype=bf16 tokens=8 rows=128
SKINNY_LORA_KERNEL(bf16, 8, 2)
// variant skinny_lora_bf16_8_3: dtype=bf16 tokens=8 rows=192
SKINNY_LORA_KERNEL(bf16, 8, 3)
// variant skinny_lora_bf16_16_1: dtype=bf16 tokens=16 rows=64
SKINNY_LORA_KERNEL(bf16, 16, 1)
// variant skinny_lora_bf16_16_2: dtype=bf16 tokens=16 rows=128
SKINNY_LORA_KERNEL(bf16, 16, 2)
// variant skinny_lora_bf16_16_3: dtype=bf16 tokens=16 rows=192
SKINNY_LORA_KERNEL(bf16, 16, 3)
// variant skinny_lora_bf16_32_1: dtype=bf16 tokens=32 rows=64
SKINNY_LORA_KERNEL(bf16, 32, 1)
// variant skinny_lora_bf16_32_2: dtype=bf16 tokens=32 rows=128
SKINNY_LORA_KERNEL(bf16, 32, 2)
// variant skinny_lora_bf16_32_3: dtype=bf16 tokens=32 rows=192
SKINNY_LORA_KERNEL(bf16, 32, 3)
// variant skinny_lora_bf16_64_1: dtype=bf16 tokens=64 rows=64
SKINNY_LORA_KERNEL(bf16, 64, 1)
// variant skinny_lora_bf16_64_2: dtype=bf16 tokens=64 rows=128
SKINNY_LORA_KERNEL(bf16, 64, 2)
// variant skinny_lora_bf16_64_3: dtype=bf16 tokens=64 rows=192
SKINNY_LORA_KERNEL(bf16, 64, 3)
