// op moe: the experts of up to 8 tokens, bf16.
#include "few.cuh"

// chunks: of 512 columns of the residual stream; experts: the most.

// variant expert_few_bf16_up_4_4: dtype=bf16 multiple=64 chunks=4 experts=128
FEW_UP(expert_few_bf16_up_4_4, bf16, 4, 4)
// variant expert_few_bf16_up_4_8: dtype=bf16 multiple=64 chunks=4 experts=256
FEW_UP(expert_few_bf16_up_4_8, bf16, 4, 8)
// variant expert_few_bf16_up_4_16: dtype=bf16 multiple=64 chunks=4 experts=512
FEW_UP(expert_few_bf16_up_4_16, bf16, 4, 16)
// variant expert_few_bf16_up_8_4: dtype=bf16 multiple=64 chunks=8 experts=128
FEW_UP(expert_few_bf16_up_8_4, bf16, 8, 4)
// variant expert_few_bf16_down_4: dtype=bf16 multiple=64 experts=128
FEW_DOWN(expert_few_bf16_down_4, bf16, 4)
// variant expert_few_bf16_down_8: dtype=bf16 multiple=64 experts=256
FEW_DOWN(expert_few_bf16_down_8, bf16, 8)
// variant expert_few_bf16_down_16: dtype=bf16 multiple=64 experts=512
FEW_DOWN(expert_few_bf16_down_16, bf16, 16)
