// op attention: rows with several query tokens, bf16.
#include "prefill.cuh"

// variant attention_prefill_tiles_bf16_d64: dtype=bf16 head=64 block=384 shared=98432 rows=128
PREFILL_TILES_KERNEL(bf16, bf16, 64, 98432)
// variant attention_prefill_tiles_bf16_d128: dtype=bf16 head=128 block=384 shared=196736 rows=128
PREFILL_TILES_KERNEL(bf16, bf16, 128, 196736)
// variant attention_prefill_tiles_bf16_d256: dtype=bf16 head=256 block=384 shared=196736 rows=128
PREFILL_TILES_KERNEL(bf16, bf16, 256, 196736)
