// op mla_attention: keys and values of every head from cached latents.
#include "expand.cuh"

// variant mla_expand_bf16: dtype=bf16 block=384 shared=229552
EXPAND_KERNEL(bf16, bf16)
// variant mla_expand_f16: dtype=f16 block=384 shared=229552
EXPAND_KERNEL(f16, f16)
