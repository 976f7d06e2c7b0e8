// op attention: rows with several query tokens, f16.
#include "prefill.cuh"

// variant attention_prefill_f16_d64: dtype=f16 head=64 block=256 shared=49152 rows=128
PREFILL_KERNEL(f16, f16, f16, 64)
// variant attention_prefill_f16_d128: dtype=f16 head=128 block=256 shared=98304 rows=128
PREFILL_KERNEL(f16, f16, f16, 128)
// variant attention_prefill_f16_d256: dtype=f16 head=256 block=128 shared=98304 rows=64
PREFILL_KERNEL(f16, f16, f16, 256)
static_assert(attention::PrefillShape<64>::SHARED == 49152 && attention::PrefillShape<128>::SHARED == 98304 &&
              attention::PrefillShape<256>::SHARED == 98304);
