// op expert_gate_up, expert_down, moe: products with the chosen experts' matrices, bf16.
#include "experts.cuh"

// variant expert_rows_bf16_swiglu_any: dtype=bf16 multiple=1 out=swiglu
EXPERT_ROWS(expert_rows_bf16_swiglu_any, bf16, true, 1)
// variant expert_rows_bf16_store_any: dtype=bf16 multiple=1 out=store
EXPERT_ROWS(expert_rows_bf16_store_any, bf16, false, 1)
// variant expert_tiles_bf16_swiglu: dtype=bf16 multiple=8 out=swiglu
EXPERT_TILES(expert_tiles_bf16_swiglu, bf16, true)
// variant expert_tiles_bf16_store: dtype=bf16 multiple=8 out=store
EXPERT_TILES(expert_tiles_bf16_store, bf16, false)
