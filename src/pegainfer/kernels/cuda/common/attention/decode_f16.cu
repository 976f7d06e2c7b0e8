// op attention: rows with one query token, f16. Rings of 64 KiB: small GPUs have 99 KiB a block, large ones
// run three blocks an SM, which is worth more than a deeper ring.
#include "decode.cuh"

// variant attention_decode_f16_d64: dtype=f16 head=64 block=160 ring=65536
// variant attention_decode_append_f16_d64: dtype=f16 head=64 block=160 ring=65536
DECODE_KERNEL(f16, f16, f16, 64, 4, 65536)
// variant attention_decode_f16_d128: dtype=f16 head=128 block=160 ring=65536
// variant attention_decode_append_f16_d128: dtype=f16 head=128 block=160 ring=65536
DECODE_KERNEL(f16, f16, f16, 128, 2, 65536)
// variant attention_decode_f16_d256: dtype=f16 head=256 block=96 ring=65536
// variant attention_decode_append_f16_d256: dtype=f16 head=256 block=96 ring=65536
DECODE_KERNEL(f16, f16, f16, 256, 2, 65536)
