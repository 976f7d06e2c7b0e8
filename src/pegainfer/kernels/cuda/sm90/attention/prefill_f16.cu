// op attention: rows with several query tokens, f16.
#include "prefill.cuh"

// variant attention_prefill_tiles_f16_d64: dtype=f16 head=64 block=384 shared=98432 rows=128
PREFILL_TILES_KERNEL(f16, f16, 64, 98432)
// variant attention_prefill_tiles_f16_d128: dtype=f16 head=128 block=384 shared=196736 rows=128
PREFILL_TILES_KERNEL(f16, f16, 128, 196736)
// variant attention_prefill_tiles_f16_d256: dtype=f16 head=256 block=384 shared=196736 rows=128
PREFILL_TILES_KERNEL(f16, f16, 256, 196736)
