// op attention, qkv_norm_rope_append: rows with one query token, f16, by clusters of eight blocks; `append`:
// norm, rotation and append of the token inside.
#include "decode.cuh"

// variant attention_decode_cluster_f16_d64: dtype=f16 head=64 block=160 ring=65536 cluster=8
// variant attention_decode_append_cluster_f16_d64: dtype=f16 head=64 block=160 ring=65536 cluster=8
DECODE_CLUSTER_KERNEL(f16, f16, 64, 4, 65536)
// variant attention_decode_cluster_f16_d128: dtype=f16 head=128 block=160 ring=65536 cluster=8
// variant attention_decode_append_cluster_f16_d128: dtype=f16 head=128 block=160 ring=65536 cluster=8
DECODE_CLUSTER_KERNEL(f16, f16, 128, 2, 65536)
// variant attention_decode_cluster_f16_d256: dtype=f16 head=256 block=96 ring=65536 cluster=8
// variant attention_decode_append_cluster_f16_d256: dtype=f16 head=256 block=96 ring=65536 cluster=8
DECODE_CLUSTER_KERNEL(f16, f16, 256, 2, 65536)
