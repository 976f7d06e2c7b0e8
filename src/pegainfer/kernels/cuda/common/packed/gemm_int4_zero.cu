// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, a weight of
// 4-bit groups with zero points.
#include "gemm.cuh"

// variant packed_int4_g32_8: form=int4_g32 tokens=8
PACKED_KERNEL(packed_int4_g32_8, 4, Zero, 32, 1)
// variant packed_int4_g32_16: form=int4_g32 tokens=16
PACKED_KERNEL(packed_int4_g32_16, 4, Zero, 32, 2)
// variant packed_int4_g32_32: form=int4_g32 tokens=32
PACKED_KERNEL(packed_int4_g32_32, 4, Zero, 32, 4)
// variant packed_int4_g32_64: form=int4_g32 tokens=64
PACKED_KERNEL(packed_int4_g32_64, 4, Zero, 32, 8)
// variant packed_int4_g64_8: form=int4_g64 tokens=8
PACKED_KERNEL(packed_int4_g64_8, 4, Zero, 64, 1)
// variant packed_int4_g64_16: form=int4_g64 tokens=16
PACKED_KERNEL(packed_int4_g64_16, 4, Zero, 64, 2)
// variant packed_int4_g64_32: form=int4_g64 tokens=32
PACKED_KERNEL(packed_int4_g64_32, 4, Zero, 64, 4)
// variant packed_int4_g64_64: form=int4_g64 tokens=64
PACKED_KERNEL(packed_int4_g64_64, 4, Zero, 64, 8)
// variant packed_int4_g128_8: form=int4_g128 tokens=8
PACKED_KERNEL(packed_int4_g128_8, 4, Zero, 128, 1)
// variant packed_int4_g128_16: form=int4_g128 tokens=16
PACKED_KERNEL(packed_int4_g128_16, 4, Zero, 128, 2)
// variant packed_int4_g128_32: form=int4_g128 tokens=32
PACKED_KERNEL(packed_int4_g128_32, 4, Zero, 128, 4)
// variant packed_int4_g128_64: form=int4_g128 tokens=64
PACKED_KERNEL(packed_int4_g128_64, 4, Zero, 128, 8)
