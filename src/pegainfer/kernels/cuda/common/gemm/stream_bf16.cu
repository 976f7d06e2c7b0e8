// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, few tokens,
// bf16.
#include "stream.cuh"

// variant stream_bf16_store_8: dtype=bf16 tokens=8 out=store
STREAM_KERNEL(stream_bf16_store_8, bf16, 1, Store, false)
// variant stream_bf16_store_16: dtype=bf16 tokens=16 out=store
STREAM_KERNEL(stream_bf16_store_16, bf16, 2, Store, false)
// variant stream_bf16_norm_store_8: dtype=bf16 tokens=8 out=store norm=1
STREAM_KERNEL(stream_bf16_norm_store_8, bf16, 1, Store, true)
// variant stream_bf16_norm_store_16: dtype=bf16 tokens=16 out=store norm=1
STREAM_KERNEL(stream_bf16_norm_store_16, bf16, 2, Store, true)
// variant stream_bf16_storef32_8: dtype=bf16 tokens=8 out=storef32
STREAM_KERNEL(stream_bf16_storef32_8, bf16, 1, StoreF32, false)
// variant stream_bf16_storef32_16: dtype=bf16 tokens=16 out=storef32
STREAM_KERNEL(stream_bf16_storef32_16, bf16, 2, StoreF32, false)
// variant stream_bf16_norm_storef32_8: dtype=bf16 tokens=8 out=storef32 norm=1
STREAM_KERNEL(stream_bf16_norm_storef32_8, bf16, 1, StoreF32, true)
// variant stream_bf16_norm_storef32_16: dtype=bf16 tokens=16 out=storef32 norm=1
STREAM_KERNEL(stream_bf16_norm_storef32_16, bf16, 2, StoreF32, true)
// variant stream_bf16_residual_8: dtype=bf16 tokens=8 out=residual
STREAM_KERNEL(stream_bf16_residual_8, bf16, 1, Residual, false)
// variant stream_bf16_residual_16: dtype=bf16 tokens=16 out=residual
STREAM_KERNEL(stream_bf16_residual_16, bf16, 2, Residual, false)
// variant stream_bf16_norm_swiglu_8: dtype=bf16 tokens=8 out=swiglu norm=1
STREAM_KERNEL(stream_bf16_norm_swiglu_8, bf16, 1, SwiGLU, true)
// variant stream_bf16_norm_swiglu_16: dtype=bf16 tokens=16 out=swiglu norm=1
STREAM_KERNEL(stream_bf16_norm_swiglu_16, bf16, 2, SwiGLU, true)
// variant stream_bf16_swiglu_8: dtype=bf16 tokens=8 out=swiglu
STREAM_KERNEL(stream_bf16_swiglu_8, bf16, 1, SwiGLU, false)
// variant stream_bf16_swiglu_16: dtype=bf16 tokens=16 out=swiglu
STREAM_KERNEL(stream_bf16_swiglu_16, bf16, 2, SwiGLU, false)
