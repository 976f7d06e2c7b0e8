// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, a weight of
// 8-bit groups with offsets.
#include "gemm.cuh"

// variant packed_int8_pair_8: form=int8_pair tokens=8
PACKED_KERNEL(packed_int8_pair_8, 8, Pair, 32, 1)
// variant packed_int8_pair_16: form=int8_pair tokens=16
PACKED_KERNEL(packed_int8_pair_16, 8, Pair, 32, 2)
// variant packed_int8_pair_32: form=int8_pair tokens=32
PACKED_KERNEL(packed_int8_pair_32, 8, Pair, 32, 4)
// variant packed_int8_pair_64: form=int8_pair tokens=64
PACKED_KERNEL(packed_int8_pair_64, 8, Pair, 32, 8)
// variant packed_int8_full_8: form=int8_full tokens=8
PACKED_KERNEL(packed_int8_full_8, 8, Full, 32, 1)
// variant packed_int8_full_16: form=int8_full tokens=16
PACKED_KERNEL(packed_int8_full_16, 8, Full, 32, 2)
// variant packed_int8_full_32: form=int8_full tokens=32
PACKED_KERNEL(packed_int8_full_32, 8, Full, 32, 4)
// variant packed_int8_full_64: form=int8_full tokens=64
PACKED_KERNEL(packed_int8_full_64, 8, Full, 32, 8)
