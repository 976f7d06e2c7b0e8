// op latent_attention: rows cut into parts, put together.
#include "../attention/merge.cuh"

// variant attention_merge_decode_bf16_d512: dtype=bf16 head=512 block=512
// variant attention_merge_prefill_bf16_d512: dtype=bf16 head=512 block=512
MERGE_KERNELS(bf16, bf16, 512)
// variant attention_merge_decode_f16_d512: dtype=f16 head=512 block=512
// variant attention_merge_prefill_f16_d512: dtype=f16 head=512 block=512
MERGE_KERNELS(f16, f16, 512)
