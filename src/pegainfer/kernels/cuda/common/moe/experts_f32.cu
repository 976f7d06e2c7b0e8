// op expert_gate_up, expert_down: products with the chosen experts' matrices, f32.
#include "experts.cuh"

// variant expert_rows_f32_swiglu: dtype=f32 multiple=4 out=swiglu
EXPERT_ROWS(expert_rows_f32_swiglu, float, true, 4)
// variant expert_rows_f32_swiglu_any: dtype=f32 multiple=1 out=swiglu
EXPERT_ROWS(expert_rows_f32_swiglu_any, float, true, 1)
// variant expert_rows_f32_store: dtype=f32 multiple=4 out=store
EXPERT_ROWS(expert_rows_f32_store, float, false, 4)
// variant expert_rows_f32_store_any: dtype=f32 multiple=1 out=store
EXPERT_ROWS(expert_rows_f32_store_any, float, false, 1)
