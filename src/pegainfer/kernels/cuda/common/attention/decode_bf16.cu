// op attention: rows with one query token, bf16. Rings of 64 KiB: small GPUs have 99 KiB a block, large ones
// run three blocks an SM, which is worth more than a deeper ring.
#include "decode.cuh"

// variant attention_decode_bf16_d64: dtype=bf16 head=64 block=160 ring=65536
// variant attention_decode_append_bf16_d64: dtype=bf16 head=64 block=160 ring=65536
DECODE_KERNEL(bf16, bf16, bf16, 64, 4, 65536)
// variant attention_decode_bf16_d128: dtype=bf16 head=128 block=160 ring=65536
// variant attention_decode_append_bf16_d128: dtype=bf16 head=128 block=160 ring=65536
DECODE_KERNEL(bf16, bf16, bf16, 128, 2, 65536)
// variant attention_decode_bf16_d256: dtype=bf16 head=256 block=96 ring=65536
// variant attention_decode_append_bf16_d256: dtype=bf16 head=256 block=96 ring=65536
DECODE_KERNEL(bf16, bf16, bf16, 256, 2, 65536)
