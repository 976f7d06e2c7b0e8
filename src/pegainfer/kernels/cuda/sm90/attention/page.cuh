// A page of 16 cached tokens in shared memory as the copy engine brings it (Hopper), and what a warp makes of
// it for one token's queries.
#pragma once
#include "../../common/attention/decode.cuh"
#include "hopper.cuh"

namespace attention {

// 16-byte piece c of row r of a page's keys or values, as a box of [2][D / 64][8][64] with swizzle lies.
template <int D>
__device__ __forceinline__ uint32_t boxed(int r, int c) {
    return ((r >> 3) * (D / 64) + (c >> 3)) * 1024 + (r & 7) * 128 + (((c & 7) ^ (r & 7)) << 4);
}

template <typename T, int D, typename Address>
__device__ __forceinline__ void place_head(const HeadPart<T, D>& x, uint8_t* to, Address address) {
    constexpr int N = HeadLanes<D>::N, LANES = 8 / N;  // of a piece
    const int lane = threadIdx.x & 31, c = lane / LANES, within = lane % LANES * N * 2;
    store(reinterpret_cast<T*>(to + address(c) + within), x.low);
    store(reinterpret_cast<T*>(to + address(c + D / 16) + within), x.high);
}

// The newest token's key and value, as the warp that comes to its page keeps them.
template <typename T, int D>
struct NewestPair {
    HeadPart<T, D> key, value;
};

// Puts the newest token's key and value where the page has it last (`valid` tokens), and zeros behind its
// values: what lies there is not ours and may be NaN.
template <typename T, int D, bool RAW>
__device__ __forceinline__ void complete_page(uint8_t* page, const NewestPair<T, D>& newest, int valid) {
    constexpr int VALUES = 16 * D * 2;
    if constexpr (RAW) {
        auto row = [&](int c) { return boxed<D>(valid - 1, c); };
        place_head(newest.key, page, row), place_head(newest.value, page + VALUES, row);
    }
    for (int j = threadIdx.x & 31; j < (16 - valid) * (D / 8); j += 32)
        store_shared16(shared_address(page) + VALUES + boxed<D>(valid + j / (D / 8), j % (D / 8)),
                       make_uint4(0, 0, 0, 0));
    __syncwarp();
}

// A warp's sums over pages for up to eight heads. With g = lane / 4 and t = lane % 4: o[d] has channels 16 d
// + g and 8 more of heads 2t and 2t + 1, m their maxima, l the sums of their weights (of this lane's tokens,
// until `close`).
template <typename T, int D>
struct PageSums {
    float o[D / 16][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};

    // Adds `valid` or 16 tokens, whichever is less: keys at `keys`, values behind them; qf: the queries.
    __device__ __forceinline__ void add(uint32_t keys, const uint32_t (&qf)[D / 16][2], int valid,
                                        float scale_log2) {
        const int lane = threadIdx.x & 31, g = lane >> 2;
        const uint32_t values = keys + 16 * D * 2;
        float s[4] = {};
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t r[4];
            ldmatrix4(r, keys + boxed<D>(lane & 15, 2 * k + (lane >> 4)));
            mma<T>(s, r[0], r[1], r[2], r[3], qf[k][0], qf[k][1]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) s[j] = g + (j >> 1) * 8 < valid ? s[j] * scale_log2 : -INFINITY;
        float scale[2];
        weigh(s, m, l, scale);
        const uint32_t p0 = movmatrix(pack2<T>(s[0], s[1])), p1 = movmatrix(pack2<T>(s[2], s[3]));
#pragma unroll
        for (int d = 0; d < D / 16; d++) {
            uint32_t r[4];
            ldmatrix4_trans(r, values + boxed<D>((lane >> 4) * 8 + (lane & 7), 2 * d + ((lane >> 3) & 1)));
#pragma unroll
            for (int j = 0; j < 4; j++) o[d][j] *= scale[j & 1];
            mma<T>(o[d], r[0], r[1], r[2], r[3], p0, p1);
        }
    }

    __device__ __forceinline__ void close() {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int shift = 4; shift < 32; shift <<= 1) l[j] += __shfl_xor_sync(~0u, l[j], shift);
    }

    // To shared memory, as `add_warps` reads it: outputs [warp][head][D], ends [warp][8]; `most` heads.
    __device__ __forceinline__ void leave(float* outputs, float2 (*ends)[8], int warp, int most) const {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        if (g == 0)
            ends[warp][2 * t] = make_float2(m[0], l[0]), ends[warp][2 * t + 1] = make_float2(m[1], l[1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int head = 2 * t + (j & 1);
            float* to = outputs + (warp * most + head) * D;
            if (head < most)
#pragma unroll
                for (int d = 0; d < D / 16; d++) to[channel_at(head, 16 * d + g + (j >> 1) * 8)] = o[d][j];
        }
    }
};

// The queries of a unit as operands, from rows of `queries` that are swizzled as `piece` does.
template <int D>
__device__ __forceinline__ void load_queries(const uint8_t* queries, int heads, uint32_t (&qf)[D / 16][2]) {
    const int lane = threadIdx.x & 31, row = min(lane & 7, heads - 1);
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t r[4];
        ldmatrix4(r, shared_address(queries) + piece<D>(row, 4 * j + (lane >> 3)));
        qf[2 * j][0] = r[0], qf[2 * j][1] = r[1], qf[2 * j + 1][0] = r[2], qf[2 * j + 1][1] = r[3];
    }
}

}  // namespace attention
