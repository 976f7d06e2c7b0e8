// op expert_gate_up, expert_down, moe: products of a few slots, bf16.
#include "stream.cuh"

// variant expert_stream_bf16_swiglu: dtype=bf16 multiple=8 out=swiglu
EXPERT_STREAM(expert_stream_bf16_swiglu, bf16, false)
// variant expert_stream_bf16_sum: dtype=bf16 multiple=8 out=sum
EXPERT_STREAM(expert_stream_bf16_sum, bf16, true)
