// Adds up the parts of rows that were cut along their keys, in the parts' order.
#pragma once
#include "attention.cuh"

namespace attention {

// A weighted sum of four channels, and what it is relative to.
struct Sum {
    float top = -INFINITY, weight = 0;
    float4 v = {};
    __device__ __forceinline__ void add(float other_top, float other_weight, float4 u) {
        const float higher = fmaxf(top, other_top), base = higher == -INFINITY ? 0.f : higher;
        const float mine = exp2_fast(top - base), its = exp2_fast(other_top - base);
        top = higher, weight = weight * mine + other_weight * its;
        v.x = v.x * mine + u.x * its, v.y = v.y * mine + u.y * its;
        v.z = v.z * mine + u.z * its, v.w = v.w * mine + u.w * its;
    }
    template <typename T>
    __device__ __forceinline__ void store(T* out) const {
        const float inverse = 1.f / weight;
        const uint2 packed = {pack2<T>(v.x * inverse, v.y * inverse), pack2<T>(v.z * inverse, v.w * inverse)};
        *reinterpret_cast<uint2*>(out) = packed;
    }
};

// Adds parts first, first + step … below `parts`; `stride` heads lie between one part and the next. Eight
// parts' loads are under way at a time: a loop that waits for each would take a microsecond a part.
template <int D>
__device__ __forceinline__ void add_parts(Sum& sum, const MergeArgs& a, int64_t head, int quad, int first,
                                          int step, int parts, int64_t stride) {
    for (int p0 = first; p0 < parts; p0 += 8 * step) {
        float2 ends[8];
        float4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int p = p0 + j * step;
            const int64_t at = head + (p < parts ? p : first) * stride;
            ends[j] = a.heads[at], v[j] = a.sums[at * (D / 4) + quad];
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (p0 + j * step < parts) sum.add(ends[j].x, ends[j].y, v[j]);
    }
}

// Grid (H, cuts): a head of a decoded row; four groups of D / 4 threads share its parts.
template <typename T, int D>
__device__ __forceinline__ void merge_decode(const MergeArgs& a) {
    constexpr int QUADS = D / 4, GROUPS = 4;
    __shared__ Sum shared[GROUPS][QUADS];
    const Cut cut = a.cuts[blockIdx.y];  // of the step's work list: older than the kernel before this one
    const int head = blockIdx.x, quad = threadIdx.x % QUADS, group = threadIdx.x / QUADS;
    pdl_wait();
    pdl_launch();
    if (cut.parts == 0) return;
    Sum sum;
    add_parts<D>(sum, a, static_cast<int64_t>(cut.slot) * a.h + head, quad, group, GROUPS, cut.parts, a.h);
    shared[group][quad] = sum;
    __syncthreads();
    if (group) return;
#pragma unroll
    for (int i = 1; i < GROUPS; i++) sum.add(shared[i][quad].top, shared[i][quad].weight, shared[i][quad].v);
    sum.store(static_cast<T*>(a.out) + (static_cast<int64_t>(cut.token) * a.h + head) * D + 4 * quad);
}

// Four rows of a prefilled tile a block and round.
template <typename T, int D>
__device__ __forceinline__ void merge_prefill(const MergeArgs& a) {
    constexpr int QUADS = D / 4, ROWS = 4;
    const int quad = threadIdx.x % QUADS, group = a.h / a.g, rounds = a.tile_rows / ROWS;
    const int total = a.plan->merges * a.g * rounds;
    pdl_wait();
    pdl_launch();
    for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
        const Item item = load_item(a.merges + unit / rounds / a.g);
        const int kv_head = unit / rounds % a.g, r = unit % rounds * ROWS + threadIdx.x / QUADS;
        const int row = item.tile * a.tile_rows + r, token = row / group;
        if (token >= item.end) continue;
        Sum sum;
        const int64_t head = (static_cast<int64_t>(item.slot) * a.g + kv_head) * a.tile_rows + r;
        add_parts<D>(sum, a, head, quad, 0, 1, item.parts(), static_cast<int64_t>(a.g) * a.tile_rows);
        const int64_t to = (static_cast<int64_t>(item.start) + token) * a.h + kv_head * group + row % group;
        sum.store(static_cast<T*>(a.out) + to * D + 4 * quad);
    }
}

}  // namespace attention

#define MERGE_KERNELS(TYPE, T, D)                                       \
    extern "C" __global__ void __launch_bounds__(D)                     \
        attention_merge_decode_##TYPE##_d##D(attention::MergeArgs a) {  \
        attention::merge_decode<T, D>(a);                               \
    }                                                                   \
    extern "C" __global__ void __launch_bounds__(D)                     \
        attention_merge_prefill_##TYPE##_d##D(attention::MergeArgs a) { \
        attention::merge_prefill<T, D>(a);                              \
    }
