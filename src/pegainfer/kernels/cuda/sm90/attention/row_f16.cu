// op attention, qkv_norm_rope_append: a step's only row, with one query token, f16; `append`: norm, rotation
// and append of the token inside.
#include "row.cuh"

// variant attention_decode_row_f16_d64: dtype=f16 head=64 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_f16_d64: dtype=f16 head=64 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(f16, f16, 64)
// variant attention_decode_row_f16_d128: dtype=f16 head=128 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_f16_d128: dtype=f16 head=128 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(f16, f16, 128)
// variant attention_decode_row_f16_d256: dtype=f16 head=256 block=224 shared=115968 cluster=8
// variant attention_decode_append_row_f16_d256: dtype=f16 head=256 block=224 shared=115968 cluster=8
DECODE_ROW_KERNEL(f16, f16, 256)
