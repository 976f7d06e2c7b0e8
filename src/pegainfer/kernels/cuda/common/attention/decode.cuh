// Attention of one query token a row, bound by how fast its keys and values can be read.
//
// A block takes a part of a row's keys for one KV head and up to eight of the query heads that share it. Each
// warp streams pages of its own through a ring of cp.async stages: scoresᵀ = K · qᵀ puts 16 tokens on the
// 16-row side of the mma and the heads on its 8-column side, outᵀ = Vᵀ · weightsᵀ likewise the channels.
#pragma once
#include "attention.cuh"

namespace attention {

template <int D>
struct DecodeShape {
  static constexpr int WARPS = D == 256 ? 2 : 4;  // 96 KiB of stages at the most: a block of sm_86 has 99
  static constexpr int STAGES = D == 64 ? 4 : 3;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int STAGE = 2 * 16 * D * 2;  // keys and values of 16 tokens
  static constexpr int SHARED = WARPS * STAGES * STAGE;
};

template <typename T, int D>
__device__ __forceinline__ void decode(const Args& a) {
  using Shape = DecodeShape<D>;
  constexpr int WARPS = Shape::WARPS, STAGES = Shape::STAGES, STAGE = Shape::STAGE, PIECES = D / 8;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float2 ends[WARPS][8];
  __shared__ bool last;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE;
  pdl_launch();
  pdl_wait();

  const int group = a.h / a.g, subgroups = (group + 7) / 8, units = a.g * subgroups;
  const int total = a.plan->decode * units;
  for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
    const Item item = a.items[unit / units];
    const int kv_head = unit % units / subgroups, first = unit % units % subgroups * 8;
    const int context = a.context_lens[item.row], chunk = decode_chunk(context);
    const int begin = item.part() * chunk, end = min(context, begin + chunk);
    const int pages = (end - begin + 15) / 16;
    const int* table = a.block_table + static_cast<int64_t>(item.row) * a.table_width;
    const T* kv = static_cast<const T*>(a.kv) + static_cast<int64_t>(kv_head) * a.block_size * D;
    const int64_t values = static_cast<int64_t>(a.g) * a.block_size * D;

    auto fetch = [&](int page, int slot) {
      if (page < pages) {
        const int token = begin + page * 16;
        const T* from = kv + table[token / a.block_size] * a.page_stride +
                        static_cast<int64_t>(token % a.block_size) * D;
#pragma unroll
        for (int i = lane; i < 16 * PIECES; i += 32) {
          const int r = i / PIECES, c = i % PIECES;
          const bool valid = token + r < end;  // what lies behind is not ours and may be NaN
          const uint32_t to = ring + slot * STAGE + piece<D>(r, c);
          cp_async16(to, from + i * 8, valid);
          cp_async16(to + 16 * D * 2, from + values + i * 8, valid);
        }
      }
      cp_async_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch(warp + s * WARPS, s);

    const int heads = min(8, group - first);
    const int64_t head0 = static_cast<int64_t>(a.query_starts[item.row]) * a.h + kv_head * group + first;
    const T* q = static_cast<const T*>(a.q) + (head0 + (g < heads ? g : 0)) * D + 2 * t;
    uint32_t qf[D / 16][2];
#pragma unroll
    for (int k = 0; k < D / 16; k++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        qf[k][i] = g < heads ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 8 * i) : 0;

    float o[D / 16][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // of heads 2t and 2t + 1; l of this lane's tokens
    for (int page = warp, slot = 0; page < pages; page += WARPS) {
      cp_async_wait<STAGES - 1>();
      __syncwarp();
      const uint32_t keys = ring + slot * STAGE;
      float s[4] = {};
#pragma unroll
      for (int k = 0; k < D / 16; k++) {
        uint32_t r[4];
        ldmatrix4(r, keys + piece<D>(lane & 15, 2 * k + (lane >> 4)));
        mma<T>(s, r[0], r[1], r[2], r[3], qf[k][0], qf[k][1]);
      }
      const int token = begin + page * 16 + g;
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = token + (i >> 1) * 8 < end ? s[i] * a.scale_log2 : -INFINITY;
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float top = fmaxf(s[i], s[i + 2]);
#pragma unroll
        for (int shift = 4; shift < 32; shift <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, shift));
        top = fmaxf(m[i], top);
        scale[i] = exp2_fast(m[i] - top);
        m[i] = top;
        s[i] = exp2_fast(s[i] - top), s[i + 2] = exp2_fast(s[i + 2] - top);
        l[i] = l[i] * scale[i] + s[i] + s[i + 2];
      }
      const uint32_t p0 = movmatrix(pack2<T>(s[0], s[1])), p1 = movmatrix(pack2<T>(s[2], s[3]));
#pragma unroll
      for (int d = 0; d < D / 16; d++) {
        uint32_t r[4];
        ldmatrix4_trans(r, keys + 16 * D * 2 +
                               piece<D>((lane >> 4) * 8 + (lane & 7), 2 * d + ((lane >> 3) & 1)));
#pragma unroll
        for (int i = 0; i < 4; i++) o[d][i] *= scale[i & 1];
        mma<T>(o[d], r[0], r[1], r[2], r[3], p0, p1);
      }
      __syncwarp();
      fetch(page + STAGES * WARPS, slot);
      if (++slot == STAGES) slot = 0;
    }

    // The warps' shares meet in shared memory, where the ring was: [warp][head][D].
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int shift = 4; shift < 32; shift <<= 1) l[i] += __shfl_xor_sync(~0u, l[i], shift);
    cp_async_wait<0>();
    __syncthreads();
    float* shares = reinterpret_cast<float*>(shared);
    if (g == 0) ends[warp][2 * t] = make_float2(m[0], l[0]), ends[warp][2 * t + 1] = make_float2(m[1], l[1]);
#pragma unroll
    for (int d = 0; d < D / 16; d++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        shares[(warp * 8 + 2 * t + (i & 1)) * D + 16 * d + g + (i >> 1) * 8] = o[d][i];
    __syncthreads();
    const int64_t slot = item.slot + item.part();
    for (int i = threadIdx.x; i < heads * D; i += blockDim.x) {
      const int head = i / D, d = i % D;
      float top = -INFINITY, sum = 0, weight = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) top = fmaxf(top, ends[w][head].x);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float share = exp2_fast(ends[w][head].x - top);
        sum += share * shares[(w * 8 + head) * D + d];
        weight += share * ends[w][head].y;
      }
      if (item.slot < 0) {
        static_cast<T*>(a.out)[head0 * D + i] = from_f32<T>(sum / weight);
      } else {
        const int64_t at = slot * a.h + kv_head * group + first + head;
        a.sums[at * D + d] = sum;
        if (d == 0) a.heads[at] = make_float2(top, weight);
      }
    }
    if (item.slot >= 0) {
      int* arrivals = a.arrivals + static_cast<int64_t>(item.slot) * units + unit % units;
      if (arrive_last(arrivals, item.parts(), &last)) {
        for (int i = threadIdx.x; i < heads * D; i += blockDim.x) {
          const int64_t at = static_cast<int64_t>(item.slot) * a.h + kv_head * group + first + i / D;
          float top = -INFINITY, sum = 0, weight = 0;
          for (int p = 0; p < item.parts(); p++) top = fmaxf(top, __ldcg(&a.heads[at + p * a.h]).x);
          for (int p = 0; p < item.parts(); p++) {
            const float2 part = __ldcg(&a.heads[at + p * a.h]);
            const float share = exp2_fast(part.x - top);
            sum += share * __ldcg(&a.sums[(at + p * a.h) * D + i % D]);
            weight += share * part.y;
          }
          static_cast<T*>(a.out)[head0 * D + i] = from_f32<T>(sum / weight);
        }
      }
    }
    __syncthreads();  // the ring is filled anew
  }
}

}  // namespace attention

#define DECODE_KERNEL(TYPE, T, D)                                                                        \
  extern "C" __global__ void __launch_bounds__(attention::DecodeShape<D>::THREADS)                       \
      attention_decode_##TYPE##_d##D(attention::Args a) {                                                \
    attention::decode<T, D>(a);                                                                          \
  }
