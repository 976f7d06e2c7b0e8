// op expert_gate_up, expert_down, moe: grouped GEMM of slots sorted by expert, bf16.
#include "grouped.cuh"

// variant expert_groups_bf16_64_swiglu: dtype=bf16 multiple=8 slots=64 out=swiglu
EXPERT_GROUPS(expert_groups_bf16_64_swiglu, bf16, 1, true)
// variant expert_groups_bf16_64_store: dtype=bf16 multiple=8 slots=64 out=store
EXPERT_GROUPS(expert_groups_bf16_64_store, bf16, 1, false)
// variant expert_groups_bf16_128_swiglu: dtype=bf16 multiple=8 slots=128 out=swiglu
EXPERT_GROUPS(expert_groups_bf16_128_swiglu, bf16, 2, true)
// variant expert_groups_bf16_128_store: dtype=bf16 multiple=8 slots=128 out=store
EXPERT_GROUPS(expert_groups_bf16_128_store, bf16, 2, false)
