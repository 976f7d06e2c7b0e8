// op attention: rows with several query tokens, bf16.
#include "prefill.cuh"

// variant attention_prefill_bf16_d64: dtype=bf16 head=64 block=256 shared=49152 rows=128
PREFILL_KERNEL(bf16, bf16, bf16, 64)
// variant attention_prefill_bf16_d128: dtype=bf16 head=128 block=256 shared=98304 rows=128
PREFILL_KERNEL(bf16, bf16, bf16, 128)
// variant attention_prefill_bf16_d256: dtype=bf16 head=256 block=128 shared=98304 rows=64
PREFILL_KERNEL(bf16, bf16, bf16, 256)
static_assert(attention::PrefillShape<64>::SHARED == 49152 && attention::PrefillShape<128>::SHARED == 98304 &&
              attention::PrefillShape<256>::SHARED == 98304);
