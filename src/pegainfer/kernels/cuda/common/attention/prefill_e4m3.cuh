// How a prefilled tile takes its operands from pages of 8-bit floats (e4m3.cuh says in which order).
#pragma once
#include "e4m3.cuh"
#include "prefill.cuh"

namespace attention {

template <int D>
struct Tiles<bf16, e4m3, D> {
    using Product = f16;
    // Channels 8 c and on of a query: of each four, the first two go to the first half of the chunk of 16,
    // the last two to the other half.
    static __device__ __forceinline__ void load_query(uint32_t query, int r, int c, const bf16* from,
                                                      bool valid) {
        const uint4 x = valid ? *reinterpret_cast<const uint4*>(from + c * 8) : uint4{};
        const int first = c & ~1, half = (c & 1) * 8;
        store_shared8(query + piece<D>(r, first) + half, {narrow_query(x.x), narrow_query(x.z)});
        store_shared8(query + piece<D>(r, first + 1) + half, {narrow_query(x.y), narrow_query(x.w)});
    }
    static __device__ __forceinline__ void load_keys(uint32_t (&r)[4], uint32_t keys, int n, int k) {
        const int lane = threadIdx.x & 31;
        uint32_t x[2];
        ldmatrix2(x, keys + piece_of<D>(n * 16 + (lane & 15), k));
        widen_channels(x[0], r[0], r[1]), widen_channels(x[1], r[2], r[3]);
    }
    static __device__ __forceinline__ void load_values(uint32_t (&r)[4], uint32_t values, int n, int d) {
        const int lane = threadIdx.x & 31;
        uint32_t x[2];
        ldmatrix2_trans(x, values + piece_of<D>(n * 16 + (lane & 15), d));
        widen_tokens(x[0], r[0], r[2]), widen_tokens(x[1], r[1], r[3]);
    }
    // x has even channels, y the odd ones after them.
    static __device__ __forceinline__ void store_shared(uint32_t row, int r, int d, float2 x, float2 y) {
        const int t = threadIdx.x & 3;
        store_shared8(row + piece<D>(r, 2 * d + (t >> 1)) + (t & 1) * 8,
                      {pack2<bf16>(x.x, y.x), pack2<bf16>(x.y, y.y)});
    }
    static __device__ __forceinline__ void store_sums(float* sums, int d, float2 x, float2 y) {
        *reinterpret_cast<float4*>(sums + 16 * d + 4 * (threadIdx.x & 3)) = make_float4(x.x, y.x, x.y, y.y);
    }
};

}  // namespace attention
