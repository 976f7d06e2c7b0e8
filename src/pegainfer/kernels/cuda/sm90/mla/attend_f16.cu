// op mla_attention: rows of many tokens over expanded latents, f16.
#include "attend.cuh"

// variant mla_attend_expanded_f16: dtype=f16 block=384 shared=213120 rows=128
ATTEND_EXPANDED_KERNEL(f16, f16)
