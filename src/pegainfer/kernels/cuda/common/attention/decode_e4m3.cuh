// How a decoding warp adds up pages of 8-bit floats.
#pragma once
#include "decode.cuh"
#include "e4m3.cuh"

namespace attention {

// See PageSums; of an 8-bit page. o[d] has channels 16 d + 2 g and the next of heads 2t and 2t + 1.
template <int D>
struct PageSums8 {
    float o[D / 16][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};

    __device__ __forceinline__ void add(uint32_t keys, const uint32_t (&qf)[D / 16][2], int valid,
                                        float scale_log2) {
        const int lane = threadIdx.x & 31, g = lane >> 2;
        const uint32_t values = keys + 16 * D;
        float s[4] = {};
#pragma unroll
        for (int k = 0; k < D / 32; k++) {
            uint32_t r[4], first[4], last[4];
            ldmatrix4(r, keys + piece_of<D>(lane & 15, 2 * k + (lane >> 4)));
#pragma unroll
            for (int i = 0; i < 4; i++) widen_channels(r[i], first[i], last[i]);
#pragma unroll
            for (int i = 0; i < 2; i++)
                mma<f16>(s, first[2 * i], first[2 * i + 1], last[2 * i], last[2 * i + 1], qf[2 * k + i][0],
                         qf[2 * k + i][1]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = g + (j >> 1) * 8 < valid ? s[j] * scale_log2 : -INFINITY;
        float scale[2];
        weigh(s, m, l, scale);
        const uint32_t p0 = movmatrix(pack2<f16>(s[0], s[1])), p1 = movmatrix(pack2<f16>(s[2], s[3]));
#pragma unroll
        for (int d = 0; d < D / 32; d++) {
            uint32_t r[4], even[4], odd[4];
            ldmatrix4_trans(r, values + piece_of<D>((lane >> 4) * 8 + (lane & 7), 2 * d + (lane >> 3 & 1)));
#pragma unroll
            for (int i = 0; i < 4; i++) widen_tokens(r[i], even[i], odd[i]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float (&to)[4] = o[2 * d + i];
#pragma unroll
                for (int j = 0; j < 4; j++) to[j] *= scale[j & 1];
                mma<f16>(to, even[i], odd[i], even[i + 2], odd[i + 2], p0, p1);
            }
        }
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int shift = 4; shift < 32; shift <<= 1) l[j] += __shfl_xor_sync(~0u, l[j], shift);
    }

    __device__ __forceinline__ void leave(float* outputs, float2 (*ends)[8], int warp, int most) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        if (g == 0)
            ends[warp][2 * t] = make_float2(m[0], l[0]), ends[warp][2 * t + 1] = make_float2(m[1], l[1]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int head = 2 * t + j;
            float* to = outputs + (warp * most + head) * D;
            if (head < most)
#pragma unroll
                for (int d = 0; d < D / 16; d++)
                    *reinterpret_cast<float2*>(to + channel_at(head, 16 * d + 2 * g)) =
                        make_float2(o[d][j], o[d][j + 2]);
        }
    }
};

template <int D>
struct Pages<bf16, e4m3, D> {
    using Sums = PageSums8<D>;
    static __device__ __forceinline__ void load_queries(const bf16* q, int heads, uint32_t (&qf)[D / 16][2]) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const bool valid = g < heads;
        q += (valid ? g : 0) * D + 4 * t;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const uint2 four = valid ? *reinterpret_cast<const uint2*>(q + 16 * k) : uint2{};
            qf[k][0] = narrow_query(four.x), qf[k][1] = narrow_query(four.y);
        }
    }
    static __device__ __forceinline__ void load_finished(const uint8_t* queries, int heads,
                                                         uint32_t (&qf)[D / 16][2]) {
        const int lane = threadIdx.x & 31, t = lane & 3, row = min(lane >> 2, heads - 1);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            const uint8_t* at = queries + piece<D>(row, 2 * k + (t >> 1)) + (t & 1) * 8;
            const uint2 four = *reinterpret_cast<const uint2*>(at);
            qf[k][0] = narrow_query(four.x), qf[k][1] = narrow_query(four.y);
        }
    }
};

}  // namespace attention
