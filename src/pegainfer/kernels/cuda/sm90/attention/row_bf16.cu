// op attention, qkv_norm_rope_append: a step's only row, with one query token, bf16; `append`: norm, rotation
// and append of the token inside.
#include "row.cuh"

// variant attention_decode_row_bf16_d64: dtype=bf16 head=64 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_bf16_d64: dtype=bf16 head=64 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(bf16, bf16, 64)
// variant attention_decode_row_bf16_d128: dtype=bf16 head=128 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_bf16_d128: dtype=bf16 head=128 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(bf16, bf16, 128)
// variant attention_decode_row_bf16_d256: dtype=bf16 head=256 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_bf16_d256: dtype=bf16 head=256 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(bf16, bf16, 256)
