// op attention: rows with one query token, f16. Fewer stages are for GPUs whose blocks have 99 KiB.
#include "decode.cuh"

// variant attention_decode_f16_d64_s4: dtype=f16 head=64 block=128 shared=73728
DECODE_KERNEL(f16, f16, 64, 4, 73728)
// variant attention_decode_f16_d128_s3: dtype=f16 head=128 block=128 shared=114688
DECODE_KERNEL(f16, f16, 128, 3, 114688)
// variant attention_decode_f16_d128_s2: dtype=f16 head=128 block=128 shared=81920
DECODE_KERNEL(f16, f16, 128, 2, 81920)
// variant attention_decode_f16_d256_s3: dtype=f16 head=256 block=64 shared=114688
DECODE_KERNEL(f16, f16, 256, 3, 114688)
// variant attention_decode_f16_d256_s2: dtype=f16 head=256 block=64 shared=81920
DECODE_KERNEL(f16, f16, 256, 2, 81920)
