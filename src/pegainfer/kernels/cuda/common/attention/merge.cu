// op attention: rows cut into parts, put together.
#include "merge.cuh"

// variant attention_merge_decode_bf16_d64: dtype=bf16 head=64 block=64
// variant attention_merge_prefill_bf16_d64: dtype=bf16 head=64 block=64
MERGE_KERNELS(bf16, bf16, 64)
// variant attention_merge_decode_bf16_d128: dtype=bf16 head=128 block=128
// variant attention_merge_prefill_bf16_d128: dtype=bf16 head=128 block=128
MERGE_KERNELS(bf16, bf16, 128)
// variant attention_merge_decode_bf16_d256: dtype=bf16 head=256 block=256
// variant attention_merge_prefill_bf16_d256: dtype=bf16 head=256 block=256
MERGE_KERNELS(bf16, bf16, 256)
// variant attention_merge_decode_f16_d64: dtype=f16 head=64 block=64
// variant attention_merge_prefill_f16_d64: dtype=f16 head=64 block=64
MERGE_KERNELS(f16, f16, 64)
// variant attention_merge_decode_f16_d128: dtype=f16 head=128 block=128
// variant attention_merge_prefill_f16_d128: dtype=f16 head=128 block=128
MERGE_KERNELS(f16, f16, 128)
// variant attention_merge_decode_f16_d256: dtype=f16 head=256 block=256
// variant attention_merge_prefill_f16_d256: dtype=f16 head=256 block=256
MERGE_KERNELS(f16, f16, 256)
