// op attention: rows with one query token of bf16 over a cache of 8-bit floats. Rings as deep in bytes as
// those of 16 bits, so twice as deep in pages.
#include "decode_e4m3.cuh"

// variant attention_decode_f8_e4m3_d64: dtype=f8_e4m3 head=64 block=160 ring=65536
// variant attention_decode_append_f8_e4m3_d64: dtype=f8_e4m3 head=64 block=160 ring=65536
DECODE_KERNEL(f8_e4m3, bf16, e4m3, 64, 8, 65536)
// variant attention_decode_f8_e4m3_d128: dtype=f8_e4m3 head=128 block=160 ring=65536
// variant attention_decode_append_f8_e4m3_d128: dtype=f8_e4m3 head=128 block=160 ring=65536
DECODE_KERNEL(f8_e4m3, bf16, e4m3, 128, 4, 65536)
// variant attention_decode_f8_e4m3_d256: dtype=f8_e4m3 head=256 block=96 ring=65536
// variant attention_decode_append_f8_e4m3_d256: dtype=f8_e4m3 head=256 block=96 ring=65536
DECODE_KERNEL(f8_e4m3, bf16, e4m3, 256, 4, 65536)
