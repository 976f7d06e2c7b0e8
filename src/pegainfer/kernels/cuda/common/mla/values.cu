// op mla_attention: decoded rows' parts added up, and each head's values of the sums.
#include "values.cuh"

// variant latent_values_bf16: dtype=bf16 tokens=16 rows=64 block=512 shared=86016
LATENT_VALUES_KERNEL(bf16, bf16)
// variant latent_values_f16: dtype=f16 tokens=16 rows=64 block=512 shared=86016
LATENT_VALUES_KERNEL(f16, f16)
