// op mla_attention: rows of many tokens over expanded latents, bf16.
#include "attend.cuh"

// variant mla_attend_expanded_bf16: dtype=bf16 block=384 shared=213120 rows=128
ATTEND_EXPANDED_KERNEL(bf16, bf16)
