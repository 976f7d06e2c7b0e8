// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, a weight of
// 4-bit groups with offsets.
#include "gemm.cuh"

// variant packed_int4_pair_8: form=int4_pair tokens=8
PACKED_KERNEL(packed_int4_pair_8, 4, Pair, 32, 1)
// variant packed_int4_pair_16: form=int4_pair tokens=16
PACKED_KERNEL(packed_int4_pair_16, 4, Pair, 32, 2)
// variant packed_int4_pair_32: form=int4_pair tokens=32
PACKED_KERNEL(packed_int4_pair_32, 4, Pair, 32, 4)
// variant packed_int4_pair_64: form=int4_pair tokens=64
PACKED_KERNEL(packed_int4_pair_64, 4, Pair, 32, 8)
// variant packed_int4_full_8: form=int4_full tokens=8
PACKED_KERNEL(packed_int4_full_8, 4, Full, 32, 1)
// variant packed_int4_full_16: form=int4_full tokens=16
PACKED_KERNEL(packed_int4_full_16, 4, Full, 32, 2)
// variant packed_int4_full_32: form=int4_full tokens=32
PACKED_KERNEL(packed_int4_full_32, 4, Full, 32, 4)
// variant packed_int4_full_64: form=int4_full tokens=64
PACKED_KERNEL(packed_int4_full_64, 4, Full, 32, 8)
