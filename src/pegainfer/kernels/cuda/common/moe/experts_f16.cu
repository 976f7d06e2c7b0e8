// op expert_gate_up, expert_down: products with the chosen experts' matrices, f16.
#include "experts.cuh"

// variant expert_rows_f16_swiglu: dtype=f16 multiple=8 out=swiglu
EXPERT_ROWS(expert_rows_f16_swiglu, f16, true, 8)
// variant expert_rows_f16_swiglu_any: dtype=f16 multiple=1 out=swiglu
EXPERT_ROWS(expert_rows_f16_swiglu_any, f16, true, 1)
// variant expert_rows_f16_store: dtype=f16 multiple=8 out=store
EXPERT_ROWS(expert_rows_f16_store, f16, false, 8)
// variant expert_rows_f16_store_any: dtype=f16 multiple=1 out=store
EXPERT_ROWS(expert_rows_f16_store_any, f16, false, 1)
// variant expert_tiles_f16_swiglu: dtype=f16 multiple=8 out=swiglu
EXPERT_TILES(expert_tiles_f16_swiglu, f16, true)
// variant expert_tiles_f16_store: dtype=f16 multiple=8 out=store
EXPERT_TILES(expert_tiles_f16_store, f16, false)
