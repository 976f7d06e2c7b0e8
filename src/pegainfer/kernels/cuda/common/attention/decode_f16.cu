// op attention: rows with one query token, f16.
#include "decode.cuh"

// variant attention_decode_f16_d64: dtype=f16 head=64 block=128 shared=65536
DECODE_KERNEL(f16, f16, 64)
// variant attention_decode_f16_d128: dtype=f16 head=128 block=128 shared=98304
DECODE_KERNEL(f16, f16, 128)
// variant attention_decode_f16_d256: dtype=f16 head=256 block=64 shared=98304
DECODE_KERNEL(f16, f16, 256)
static_assert(attention::DecodeShape<64>::SHARED == 65536 && attention::DecodeShape<128>::SHARED == 98304 &&
              attention::DecodeShape<256>::SHARED == 98304);
