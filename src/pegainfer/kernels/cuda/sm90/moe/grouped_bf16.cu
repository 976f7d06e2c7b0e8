// op expert_gate_up, expert_down, moe: grouped GEMM of slots sorted by expert, bf16.
#include "grouped.cuh"

// variant expert_groups_bf16_64_128_swiglu: dtype=bf16 multiple=8 slots=64 columns=128 out=swiglu
EXPERT_GROUPS(expert_groups_bf16_64_128_swiglu, bf16, 1, 128, true)
// variant expert_groups_bf16_64_128_store: dtype=bf16 multiple=8 slots=64 columns=128 out=store
EXPERT_GROUPS(expert_groups_bf16_64_128_store, bf16, 1, 128, false)
// variant expert_groups_bf16_64_256_swiglu: dtype=bf16 multiple=8 slots=64 columns=256 out=swiglu
EXPERT_GROUPS(expert_groups_bf16_64_256_swiglu, bf16, 1, 256, true)
// variant expert_groups_bf16_64_256_store: dtype=bf16 multiple=8 slots=64 columns=256 out=store
EXPERT_GROUPS(expert_groups_bf16_64_256_store, bf16, 1, 256, false)
// variant expert_groups_bf16_128_256_swiglu: dtype=bf16 multiple=8 slots=128 columns=256 out=swiglu
EXPERT_GROUPS(expert_groups_bf16_128_256_swiglu, bf16, 2, 256, true)
// variant expert_groups_bf16_128_256_store: dtype=bf16 multiple=8 slots=128 columns=256 out=store
EXPERT_GROUPS(expert_groups_bf16_128_256_store, bf16, 2, 256, false)
