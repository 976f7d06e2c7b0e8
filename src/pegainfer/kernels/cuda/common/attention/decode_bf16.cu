// op attention: rows with one query token, bf16. Fewer stages are for GPUs whose blocks have 99 KiB.
#include "decode.cuh"

// variant attention_decode_bf16_d64_s4: dtype=bf16 head=64 block=160 ring=65536
DECODE_KERNEL(bf16, bf16, 64, 4, 65536)
// variant attention_decode_bf16_d128_s3: dtype=bf16 head=128 block=160 ring=98304
DECODE_KERNEL(bf16, bf16, 128, 3, 98304)
// variant attention_decode_bf16_d128_s2: dtype=bf16 head=128 block=160 ring=65536
DECODE_KERNEL(bf16, bf16, 128, 2, 65536)
// variant attention_decode_bf16_d256_s3: dtype=bf16 head=256 block=96 ring=98304
DECODE_KERNEL(bf16, bf16, 256, 3, 98304)
// variant attention_decode_bf16_d256_s2: dtype=bf16 head=256 block=96 ring=65536
DECODE_KERNEL(bf16, bf16, 256, 2, 65536)
