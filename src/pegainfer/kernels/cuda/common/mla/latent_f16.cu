// op latent_attention: absorbed queries over cached latents of 512 + 64 numbers, f16.
#include "latent.cuh"

// variant latent_attention_f16_r16_k64_s3: dtype=f16 rows=16 block=256 shared=227840
// variant latent_attention_f16_r64_k64_s2: dtype=f16 rows=64 block=256 shared=229888
// variant latent_attention_f16_r16_k64_s2: dtype=f16 rows=16 block=256 shared=154112
// variant latent_attention_f16_r64_k32_s2: dtype=f16 rows=64 block=256 shared=152064
// variant latent_attention_f16_r16_k32_s2: dtype=f16 rows=16 block=128 shared=93440
LATENT_KERNELS(f16, f16)
