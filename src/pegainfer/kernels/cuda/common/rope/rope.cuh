// A head's norm (Qwen3) and RoPE by one warp. Every kernel that includes this gets the same bits.
//
// Lane l holds the N elements from l N of the head's first half, and the elements of the second half that
// RoPE pairs with them. Each multiplication and addition is an intrinsic, so that the compiler contracts the
// same ones in every kernel.
#pragma once
#include "reduce.cuh"
#include "types.cuh"

template <int D>
struct HeadLanes {
    static constexpr int N = D / 64, HALF = D / 2;
};

template <typename T, int D>
struct HeadPart {
    Vec<T, HeadLanes<D>::N> low, high;
    __device__ __forceinline__ void load_from(const T* head, int lane) {
        constexpr int N = HeadLanes<D>::N;
        low = load<T, N>(head + lane * N), high = load<T, N>(head + D / 2 + lane * N);
    }
    __device__ __forceinline__ void store_to(T* head, int lane) const {
        constexpr int N = HeadLanes<D>::N;
        store(head + lane * N, low), store(head + D / 2 + lane * N, high);
    }
};

// Returns 1 / rms of a head in every lane.
template <typename T, int D>
__device__ __forceinline__ float head_scale(const HeadPart<T, D>& x, float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < HeadLanes<D>::N; i++) {
        const float low = to_f32(x.low.v[i]), high = to_f32(x.high.v[i]);
        sum = __fmaf_rn(low, low, __fmaf_rn(high, high, sum));
    }
    return rsqrtf(__fmaf_rn(warp_sum(sum), 1.f / D, eps));
}

// Multiplies by scale · weight, then applies RoPE by the position's angles.
template <typename T, int D>
__device__ __forceinline__ void apply_rope(HeadPart<T, D>& x, float scale, const HeadPart<float, D>& weight,
                                           const HeadPart<float, D>& cos_sin) {
#pragma unroll
    for (int i = 0; i < HeadLanes<D>::N; i++) {
        const float low = __fmul_rn(to_f32(x.low.v[i]), __fmul_rn(scale, weight.low.v[i]));
        const float high = __fmul_rn(to_f32(x.high.v[i]), __fmul_rn(scale, weight.high.v[i]));
        const float c = cos_sin.low.v[i], s = cos_sin.high.v[i];
        x.low.v[i] = from_f32<T>(__fmaf_rn(low, c, -__fmul_rn(high, s)));
        x.high.v[i] = from_f32<T>(__fmaf_rn(high, c, __fmul_rn(low, s)));
    }
}

// A norm's weight [D], or ones where there is no norm.
template <int D>
__device__ __forceinline__ HeadPart<float, D> load_weight(const float* weight, int lane) {
    HeadPart<float, D> w;
#pragma unroll
    for (int i = 0; i < HeadLanes<D>::N; i++) w.low.v[i] = w.high.v[i] = 1;
    if (weight) w.load_from(weight, lane);
    return w;
}
