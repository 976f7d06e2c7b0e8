// What a KV cache holds of keys and values: their own type, or 8-bit floats.
#pragma once
#include <cuda_fp8.h>

#include "rope.cuh"

// x · inverse to the nearest 8-bit float, at most its largest; NaN stays.
__device__ __forceinline__ e4m3 to_e4m3(float x, float inverse) {
    return {__nv_cvt_float_to_fp8(__fmul_rn(x, inverse), __NV_SATFINITE, __NV_E4M3)};
}

// A head as a cache of C holds it. `inverse`: 1 over the scale of an 8-bit cache.
template <typename C, typename T, int D>
__device__ __forceinline__ HeadPart<C, D> cached(const HeadPart<T, D>& x, float inverse) {
    if constexpr (sizeof(C) == 1) {
        HeadPart<C, D> held;
#pragma unroll
        for (int i = 0; i < HeadLanes<D>::N; i++) {
            held.low.v[i] = to_e4m3(to_f32(x.low.v[i]), inverse);
            held.high.v[i] = to_e4m3(to_f32(x.high.v[i]), inverse);
        }
        return held;
    } else {
        return x;
    }
}
