// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: the projection, a weight of
// 8-bit groups with zero points.
#include "gemm.cuh"

// variant packed_int8_g32_8: form=int8_g32 tokens=8
PACKED_KERNEL(packed_int8_g32_8, 8, Zero, 32, 1)
// variant packed_int8_g32_16: form=int8_g32 tokens=16
PACKED_KERNEL(packed_int8_g32_16, 8, Zero, 32, 2)
// variant packed_int8_g32_32: form=int8_g32 tokens=32
PACKED_KERNEL(packed_int8_g32_32, 8, Zero, 32, 4)
// variant packed_int8_g32_64: form=int8_g32 tokens=64
PACKED_KERNEL(packed_int8_g32_64, 8, Zero, 32, 8)
// variant packed_int8_g64_8: form=int8_g64 tokens=8
PACKED_KERNEL(packed_int8_g64_8, 8, Zero, 64, 1)
// variant packed_int8_g64_16: form=int8_g64 tokens=16
PACKED_KERNEL(packed_int8_g64_16, 8, Zero, 64, 2)
// variant packed_int8_g64_32: form=int8_g64 tokens=32
PACKED_KERNEL(packed_int8_g64_32, 8, Zero, 64, 4)
// variant packed_int8_g64_64: form=int8_g64 tokens=64
PACKED_KERNEL(packed_int8_g64_64, 8, Zero, 64, 8)
// variant packed_int8_g128_8: form=int8_g128 tokens=8
PACKED_KERNEL(packed_int8_g128_8, 8, Zero, 128, 1)
// variant packed_int8_g128_16: form=int8_g128 tokens=16
PACKED_KERNEL(packed_int8_g128_16, 8, Zero, 128, 2)
// variant packed_int8_g128_32: form=int8_g128 tokens=32
PACKED_KERNEL(packed_int8_g128_32, 8, Zero, 128, 4)
// variant packed_int8_g128_64: form=int8_g128 tokens=64
PACKED_KERNEL(packed_int8_g128_64, 8, Zero, 128, 8)
// variant packed_int8_g16_8: form=int8_g16 tokens=8
PACKED_KERNEL(packed_int8_g16_8, 8, Plain, 16, 1)
// variant packed_int8_g16_16: form=int8_g16 tokens=16
PACKED_KERNEL(packed_int8_g16_16, 8, Plain, 16, 2)
// variant packed_int8_g16_32: form=int8_g16 tokens=32
PACKED_KERNEL(packed_int8_g16_32, 8, Plain, 16, 4)
// variant packed_int8_g16_64: form=int8_g16 tokens=64
PACKED_KERNEL(packed_int8_g16_64, 8, Plain, 16, 8)
