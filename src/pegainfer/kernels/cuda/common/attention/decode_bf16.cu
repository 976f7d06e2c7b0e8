// op attention: rows with one query token, bf16.
#include "decode.cuh"

// variant attention_decode_bf16_d64: dtype=bf16 head=64 block=128 shared=65536
DECODE_KERNEL(bf16, bf16, 64)
// variant attention_decode_bf16_d128: dtype=bf16 head=128 block=128 shared=98304
DECODE_KERNEL(bf16, bf16, 128)
// variant attention_decode_bf16_d256: dtype=bf16 head=256 block=64 shared=98304
DECODE_KERNEL(bf16, bf16, 256)
static_assert(attention::DecodeShape<64>::SHARED == 65536 && attention::DecodeShape<128>::SHARED == 98304 &&
              attention::DecodeShape<256>::SHARED == 98304);
