// Decode attention of a step that has one row (Hopper): one block an SM, all of them begin at once and end
// together.
//
// Up to `cluster_keys` keys, the eight blocks of a cluster share those of one unit (a KV head and up to eight
// of its query heads) and send each other their sums through shared memory. Longer rows are shared out to all
// blocks evenly; the block that arrives last at a unit adds up what the others left in memory.
//
// A producer warp issues TMA copies of pages into a ring, whose stages the other warps consume one after the
// other. A block's shared memory leaves room for a block of a GEMM (gemm/skinny.cuh) on the same SM, but not
// for a second block of this kernel. So the ring fills while the projection ends; the GEMM that follows may
// start when one ring of pages is still to be copied, and fills its own ring while the sums are added.
#pragma once
#include <cuda.h>

#include "../../common/attention/merge.cuh"
#include "cluster.cuh"
#include "page.cuh"

namespace attention {

constexpr int CLUSTER = 8;  // blocks
constexpr int READY = 3;    // the barriers are made

template <int D>
struct RowShape {
    static constexpr int WARPS = 6, STREAMING = WARPS * 32, THREADS = STREAMING + 32;
    static constexpr int HALF = 16 * D * 2, STAGE = 2 * HALF;  // bytes: keys of a page, and values
    // A multiple of WARPS: a stage is always the same warp's, which so never waits for a phase ahead of the
    // next.
    static constexpr int STAGES = (96 << 10) / STAGE, RING = STAGES * STAGE;
    static_assert(STAGES % WARPS == 0);
};

// What lies behind the ring in shared memory.
template <int D>
struct RowPlaces {
    using Shape = RowShape<D>;
    uint8_t* base;
    int most;  // heads of a unit
    __device__ __forceinline__ uint8_t* queries() const { return base + Shape::RING; }
    __device__ __forceinline__ float2 (*ends() const)[8] {
        return reinterpret_cast<float2(*)[8]>(queries() + 8 * D * 2);
    }
    __device__ __forceinline__ uint32_t full(int i) const {
        return shared_address(queries() + 8 * D * 2 + Shape::WARPS * 64) + 8 * i;
    }
    __device__ __forceinline__ uint32_t empty(int i) const { return full(Shape::STAGES + i); }
    __device__ __forceinline__ uint32_t received() const { return full(2 * Shape::STAGES); }
    __device__ __forceinline__ int* last() const {
        return reinterpret_cast<int*>(queries() + 8 * D * 2 + Shape::WARPS * 64 +
                                      8 * (2 * Shape::STAGES + 1));
    }
    // Of each block of the cluster, its sums of this block's channels and each head's (maximum, weight).
    __device__ __forceinline__ uint32_t inbox() const { return full(2 * Shape::STAGES + 2); }
    __device__ __forceinline__ uint32_t inbox_ends() const { return inbox() + most * D * 4; }
    // The ring's memory again, once all pages are taken: [warp][head][D] sums, or [group][quad] of all parts.
    __device__ __forceinline__ float* outputs() const { return reinterpret_cast<float*>(base); }
};

// A block's share: pages first … end of a unit.
struct Share {
    int unit, part, parts, first, end, context, token, kv_head, head, heads;
    bool clustered;
    __device__ __forceinline__ Share(const Args& a, const RowArgs& r) {
        const int group = a.h / a.g, subgroups = (group + 7) / 8, units = a.g * subgroups;
        context = a.query_lens[0] == 1 ? a.context_lens[0] : 0, token = a.query_starts[0];
        clustered = context <= r.cluster_keys;
        unit = clustered ? blockIdx.x / CLUSTER : blockIdx.x % units;
        part = clustered ? blockIdx.x % CLUSTER : blockIdx.x / units;
        parts = clustered ? CLUSTER : gridDim.x / units;
        const int pages = (context + 15) / 16;
        const bool mine = context > 0 && unit < units && part < parts;
        first = mine ? pages * part / parts : 0, end = mine ? pages * (part + 1) / parts : 0;
        kv_head = unit / subgroups;
        const int skipped = unit % subgroups * 8;
        head = kv_head * group + skipped, heads = mine ? min(8, group - skipped) : 0;
    }
    __device__ __forceinline__ bool newest() const { return end > first && end * 16 >= context; }
};

template <int D, bool RAW>
__device__ __forceinline__ void ask_pages(const Args& a, const void* map, const Share& share,
                                          const RowPlaces<D>& at) {
    using Shape = RowShape<D>;
    const int lane = threadIdx.x & 31, count = share.end - share.first;
    const int heads = static_cast<int>(a.page_stride / (a.block_size * D));  // of a block, all layers
    auto entry_of = [&](int i) {
        return i < count ? a.block_table[(share.first + i) * 16 / a.block_size] : 0;
    };
    int entry = entry_of(lane), ahead = entry_of(32 + lane);
    const int fire = max(count - Shape::STAGES, min(count, Shape::STAGES));
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        if (i == fire) pdl_wait(), pdl_launch();
        if (!RAW && i == count - 1 && share.newest()) pdl_wait();  // the launch before this one appends to it
        if (i > 0 && i % 32 == 0) entry = ahead, ahead = entry_of(i + 32 + lane);
        const int block = __shfl_sync(~0u, entry, i & 31), slot = i % Shape::STAGES;
        if (i >= Shape::STAGES) mbarrier_wait(at.empty(slot), (i / Shape::STAGES & 1) ^ 1);
        if (lane == 0) {
            const uint32_t to = shared_address(at.base) + slot * Shape::STAGE;
            const int x3 = (share.first + i) * 16 % a.block_size / 8, x4 = block * heads + share.kv_head;
            mbarrier_arrive_expect(at.full(slot), Shape::STAGE);
            tma_load5(to, map, 0, 0, 0, x3, x4, at.full(slot));
            tma_load5(to + Shape::HALF, map, 0, 0, 0, x3, x4 + a.g, at.full(slot));
        }
        __syncwarp();
    }
    if (fire == count) pdl_wait(), pdl_launch();
}

// Queries of the unit, as operands; where they are as the projection left them, finished by a warp a head.
template <typename T, int D, typename Source>
__device__ __forceinline__ void take_queries(const Args& a, const Source& source, const Share& share,
                                             const RowPlaces<D>& at, bool holds, NewestPair<T, D>& newest,
                                             uint32_t (&qf)[D / 16][2]) {
    using Shape = RowShape<D>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if constexpr (Source::RAW) {
        HeadPart<float, D> cos_sin, weight, key_weight;
        int slot = -1;
        if (warp < share.heads || holds) {
            cos_sin.load_from(source.cos_sin + static_cast<int64_t>(source.positions[share.token]) * D, lane);
            weight = load_weight<D>(source.q_norm, lane), key_weight = load_weight<D>(source.k_norm, lane);
            slot = source.slots[share.token];
        }
        pdl_wait();
        if (holds) {
            const T* k = source.template queries<T>(a, share.token, a.h + share.kv_head, D);
            newest.key.load_from(k, lane), newest.value.load_from(k + static_cast<int64_t>(a.g) * D, lane);
        }
        for (int head = warp; head < share.heads; head += Shape::WARPS) {
            HeadPart<T, D> x;
            x.load_from(source.template queries<T>(a, share.token, share.head + head, D), lane);
            apply_rope(x, source.q_norm ? head_scale(x, source.eps) : 1.f, weight, cos_sin);
            place_head(x, at.queries(), [&](int c) { return piece<D>(head, c); });
        }
        if (holds) {
            apply_rope(newest.key, source.k_norm ? head_scale(newest.key, source.eps) : 1.f, key_weight,
                       cos_sin);
            if (slot >= 0 && share.head == share.kv_head * (a.h / a.g)) {
                T* to = static_cast<T*>(source.kv) + slot / a.block_size * a.page_stride +
                        (static_cast<int64_t>(share.kv_head) * a.block_size + slot % a.block_size) * D;
                newest.key.store_to(to, lane);
                newest.value.store_to(to + static_cast<int64_t>(a.g) * a.block_size * D, lane);
            }
        }
        named_wait<Shape::STREAMING>(FREE);
        load_queries<D>(at.queries(), share.heads, qf);
    } else {
        pdl_wait();
        const int row = min(lane >> 2, share.heads - 1);
        const T* q = source.template queries<T>(a, share.token, share.head + row, D) + 2 * (lane & 3);
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) qf[k][i] = *reinterpret_cast<const uint32_t*>(q + 16 * k + 8 * i);
    }
}

// Sums of this warp's pages: every sixth of the block's.
template <typename T, int D, typename Source>
__device__ __forceinline__ void stream_row(const Args& a, const Source& source, const Share& share,
                                           const RowPlaces<D>& at) {
    using Shape = RowShape<D>;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int count = share.end - share.first;
    const bool holds = share.newest() && (count - 1) % Shape::WARPS == warp;
    NewestPair<T, D> newest;
    uint32_t qf[D / 16][2];
    take_queries<T, D>(a, source, share, at, holds, newest, qf);
    PageSums<T, D, boxed<D>> sums;
#pragma unroll 1
    for (int i = warp; i < count; i += Shape::WARPS) {
        const int slot = i % Shape::STAGES, token = (share.first + i) * 16;
        uint8_t* page = at.base + slot * Shape::STAGE;
        mbarrier_wait(at.full(slot), i / Shape::STAGES & 1);
        const int valid = share.context - token;
        if (valid <= 16) complete_page<T, D, Source::RAW>(page, newest, valid);
        sums.add(shared_address(page), qf, valid, a.scale_log2);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(at.empty(slot));
    }
    sums.close();
    named_wait<Shape::STREAMING>(FULL);  // all pages are taken: their place is free
    sums.leave(at.outputs(), at.ends(), warp, at.most);
    named_wait<Shape::STREAMING>(FULL);
}

__device__ __forceinline__ float4 load_shared_quad(uint32_t p) {
    const uint4 v = load_shared16(p);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}

// Adds up the sums of a cluster: each block gets an eighth of the channels from all of them.
template <typename T, int D>
__device__ __forceinline__ void sum_cluster(const Args& a, const Share& share, const RowPlaces<D>& at) {
    using Shape = RowShape<D>;
    constexpr int QUADS = D / 4;
    const int total = share.heads * QUADS, slice = total / CLUSTER;
    if (threadIdx.x == 0) mbarrier_arrive_expect(at.received(), CLUSTER * (slice + share.heads) * 16);
    for (int i = threadIdx.x; i < total; i += Shape::STREAMING) {
        const int head = i / QUADS, d = i % QUADS, to = i / slice;
        float top, weight;
        const float4 sum = add_warps<D, Shape::WARPS>(at.outputs(), at.ends(), at.most, head, d, top, weight);
        store_cluster16(at.inbox() + (share.part * slice + i - to * slice) * 16, to, sum, at.received());
        if (d < CLUSTER)
            store_cluster16(at.inbox_ends() + (share.part * share.heads + head) * 16, d,
                            make_float4(top, weight, 0, 0), at.received());
    }
    if (threadIdx.x >= (slice + 31) / 32 * 32) return;
    mbarrier_wait(at.received(), 0);
    for (int i = threadIdx.x; i < slice; i += Shape::STREAMING) {
        const int quad = share.part * slice + i;
        Sum sum;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const float4 e = load_shared_quad(at.inbox_ends() + (b * share.heads + quad / QUADS) * 16);
            sum.add(e.x, e.y, load_shared_quad(at.inbox() + (b * slice + i) * 16));
        }
        sum.template store<T>(static_cast<T*>(a.out) +
                              (static_cast<int64_t>(share.token) * a.h + share.head) * D + 4 * quad);
    }
}

// Leaves this block's sums in memory; the last block of a unit to do so adds them up, in the parts' order.
template <typename T, int D>
__device__ __forceinline__ void sum_parts(const Args& a, const RowArgs& r, const Share& share,
                                          const RowPlaces<D>& at) {
    using Shape = RowShape<D>;
    constexpr int QUADS = D / 4;
    const int total = share.heads * QUADS;
    float4* sums = reinterpret_cast<float4*>(a.sums);
    for (int i = threadIdx.x; i < total; i += Shape::STREAMING) {
        const int64_t to = static_cast<int64_t>(share.part) * a.h + share.head + i / QUADS;
        float top, weight;
        sums[to * QUADS + i % QUADS] =
            add_warps<D, Shape::WARPS>(at.outputs(), at.ends(), at.most, i / QUADS, i % QUADS, top, weight);
        if (i % QUADS == 0) a.heads[to] = make_float2(top, weight);
    }
    named_wait<Shape::STREAMING>(FULL);
    if (threadIdx.x == 0) {
        __threadfence();
        const bool last = atomicAdd(r.arrivals + share.unit, 1) == share.parts - 1;
        if (last) r.arrivals[share.unit] = 0;
        *at.last() = last;
        __threadfence();
    }
    named_wait<Shape::STREAMING>(FULL);
    if (!*at.last()) return;
    // Loads of all parts at a time.
    constexpr int AT_ONCE = 16;
    const int groups = max(1, Shape::STREAMING / total);
    Sum* partial = reinterpret_cast<Sum*>(at.base);
    for (int i = threadIdx.x; i < total * groups; i += Shape::STREAMING) {
        const int64_t head = share.head + i % total / QUADS;
        Sum sum;
        for (int p0 = i / total; p0 < share.parts; p0 += AT_ONCE * groups) {
            float2 e[AT_ONCE];
            float4 v[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int p = p0 + j * groups;
                const int64_t from = head + static_cast<int64_t>(p < share.parts ? p : p0) * a.h;
                e[j] = __ldcg(a.heads + from), v[j] = __ldcg(sums + from * QUADS + i % QUADS);
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (p0 + j * groups < share.parts) sum.add(e[j].x, e[j].y, v[j]);
        }
        partial[i] = sum;
    }
    named_wait<Shape::STREAMING>(FULL);
    for (int i = threadIdx.x; i < total; i += Shape::STREAMING) {
        Sum sum = partial[i];
        for (int j = 1; j < groups; j++) {
            const Sum other = partial[j * total + i];
            sum.add(other.top, other.weight, other.v);
        }
        sum.template store<T>(static_cast<T*>(a.out) +
                              (static_cast<int64_t>(share.token) * a.h + share.head) * D + 4 * i);
    }
}

template <typename T, int D, typename Source>
__device__ __forceinline__ void decode_row(const void* map, const Args& a, const Source& source,
                                           const RowArgs& r) {
    using Shape = RowShape<D>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const RowPlaces<D> at = {shared, min(8, a.h / a.g)};
    const Share share(a, r);
    if (share.heads == 0) {  // no work for this block; a step without any still ends after the launch before
        if (share.context == 0) pdl_wait();
        if (share.context > 0 && !share.clustered)
            cluster_arrive(), cluster_wait();  // others of its cluster do
        return;
    }
    const bool is_producer = threadIdx.x >= Shape::STREAMING;
    if (threadIdx.x == Shape::STREAMING) {
        tma_prefetch(map);
        for (int i = 0; i <= 2 * Shape::STAGES; i++) mbarrier_init(at.full(i), 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
    if (is_producer) {
        named_arrive<Shape::THREADS>(READY);
        ask_pages<D, Source::RAW>(a, map, share, at);
        cluster_wait();
        return;
    }
    named_wait<Shape::THREADS>(READY);
    stream_row<T, D>(a, source, share, at);
    cluster_wait();  // the other blocks' barriers are there
    if (share.clustered)
        sum_cluster<T, D>(a, share, at);
    else
        sum_parts<T, D>(a, r, share, at);
}

}  // namespace attention

#define DECODE_ROW_KERNEL(TYPE, T, D)                                                                  \
    extern "C" __global__ void __launch_bounds__(attention::RowShape<D>::THREADS, D > 128 ? 1 : 2)     \
        attention_decode_row_##TYPE##_d##D(const __grid_constant__ CUtensorMap map, attention::Args a, \
                                           attention::RowArgs r) {                                     \
        attention::decode_row<T, D>(&map, a, attention::Stored{}, r);                                  \
    }                                                                                                  \
    extern "C" __global__ void __launch_bounds__(attention::RowShape<D>::THREADS, D > 128 ? 1 : 2)     \
        attention_decode_append_row_##TYPE##_d##D(const __grid_constant__ CUtensorMap map,             \
                                                  attention::Args a, attention::Projected p,           \
                                                  attention::RowArgs r) {                              \
        attention::decode_row<T, D>(&map, a, p, r);                                                    \
    }
