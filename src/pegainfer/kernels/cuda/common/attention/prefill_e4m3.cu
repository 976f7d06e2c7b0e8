// op attention: rows with several query tokens of bf16 over a cache of 8-bit floats.
#include "prefill_e4m3.cuh"

// variant attention_prefill_f8_e4m3_d64: dtype=f8_e4m3 head=64 block=256 shared=32768 rows=128
PREFILL_KERNEL(f8_e4m3, bf16, e4m3, 64)
// variant attention_prefill_f8_e4m3_d128: dtype=f8_e4m3 head=128 block=256 shared=65536 rows=128
PREFILL_KERNEL(f8_e4m3, bf16, e4m3, 128)
// variant attention_prefill_f8_e4m3_d256: dtype=f8_e4m3 head=256 block=128 shared=65536 rows=64
PREFILL_KERNEL(f8_e4m3, bf16, e4m3, 256)
static_assert(attention::PrefillShape<64, 1>::SHARED == 32768 &&
              attention::PrefillShape<128, 1>::SHARED == 65536 &&
              attention::PrefillShape<256, 1>::SHARED == 65536);
