// op mla_decode: queries of decoded tokens rotated and absorbed, and their latents cached.
#include "head_linear.cuh"

// variant mla_absorb_bf16_t16: dtype=bf16 tokens=16 rows=32 block=64 shared=18432
// variant mla_absorb_bf16_t64: dtype=bf16 tokens=64 rows=64 block=128 shared=49152
// variant mla_absorb_bf16_t128: dtype=bf16 tokens=128 rows=128 block=256 shared=98304
ABSORB_KERNEL(bf16, bf16, 16, 1, 2, 1, 2)
ABSORB_KERNEL(bf16, bf16, 64, 2, 2, 2, 4)
ABSORB_KERNEL(bf16, bf16, 128, 2, 4, 4, 4)
// variant mla_absorb_f16_t16: dtype=f16 tokens=16 rows=32 block=64 shared=18432
// variant mla_absorb_f16_t64: dtype=f16 tokens=64 rows=64 block=128 shared=49152
// variant mla_absorb_f16_t128: dtype=f16 tokens=128 rows=128 block=256 shared=98304
ABSORB_KERNEL(f16, f16, 16, 1, 2, 1, 2)
ABSORB_KERNEL(f16, f16, 64, 2, 2, 2, 4)
ABSORB_KERNEL(f16, f16, 128, 2, 4, 4, 4)
