// Conversions between pairs of E4M3 codes and pairs of f16 (from compute capability 8.9 on).
#pragma once
#include "types.cuh"

// Two values as codes, rounded to the nearest, saturating; the low byte is the first.
__device__ __forceinline__ uint16_t f16_to_e4m3x2(uint32_t pair) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(codes) : "r"(pair));
    return codes;
}
// f16 holds every E4M3 value.
__device__ __forceinline__ uint32_t e4m3x2_to_f16(uint16_t codes) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
    return pair;
}
// a - b of two f16 numbers each.
__device__ __forceinline__ uint32_t sub_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
