// Attention over a cache of 8-bit floats.
//
// Keys and values become float16 in registers, which holds each of their values. ldmatrix moves pairs of
// bytes. Where it gives a lane two neighbouring channels of a key in 16 bits, it gives four in 8 bits: so the
// channels of a chunk of 16 take another order in the products of queries and keys. Transposed, it gives two
// neighbouring channels of two tokens' values where one would be in 16 bits: so the even channels of a chunk
// come as eight rows (or columns) of an operand, and the odd ones as the other eight.
#pragma once
#include "../rope/store.cuh"
#include "attention.cuh"

namespace attention {

// The two numbers of a register's low half as float16.
__device__ __forceinline__ uint32_t widen(uint32_t v) {
    const __half2 pair(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(v), __NV_E4M3));
    return *reinterpret_cast<const uint32_t*>(&pair);
}
// Four channels of a token: the first two, the last two.
__device__ __forceinline__ void widen_channels(uint32_t v, uint32_t& first, uint32_t& last) {
    first = widen(v), last = widen(v >> 16);
}
// Two channels of two tokens: the first channel of both, the second of both.
__device__ __forceinline__ void widen_tokens(uint32_t v, uint32_t& first, uint32_t& second) {
    const uint32_t by_channel = __byte_perm(v, 0, 0x3120);
    first = widen(by_channel), second = widen(by_channel >> 16);
}

// Two numbers of a query as float16. No norm lets a query come near its largest; NaN stays.
__device__ __forceinline__ uint32_t narrow_query(uint32_t v) {
    float2 pair = unpack2<bf16>(v);
    const auto held = [](float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; };
    return pack2<f16>(held(pair.x), held(pair.y));
}

}  // namespace attention
