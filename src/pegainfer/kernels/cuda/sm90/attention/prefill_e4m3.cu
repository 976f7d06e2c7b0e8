// op attention: rows with several query tokens over a cache of 8-bit floats, bf16 beside it.
#include "prefill.cuh"

// variant attention_prefill_tiles_f8_e4m3_d64: dtype=f8_e4m3 head=64 block=384 shared=114944 rows=128
PREFILL_TILES_E4M3_KERNEL(64, 114944)
// variant attention_prefill_tiles_f8_e4m3_d128: dtype=f8_e4m3 head=128 block=384 shared=229632 rows=128
PREFILL_TILES_E4M3_KERNEL(128, 229632)
// variant attention_prefill_tiles_f8_e4m3_d256: dtype=f8_e4m3 head=256 block=384 shared=229568 rows=128
PREFILL_TILES_E4M3_KERNEL(256, 229568)
