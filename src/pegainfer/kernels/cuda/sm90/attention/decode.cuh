// Decode attention whose parts are added up where they are made: eight blocks are a cluster and share their
// memories (Hopper).
//
// A row of up to 1,024 keys is shared out to 1, 2, 4 or 8 blocks of one cluster, a longer one to the eight
// blocks of up to four clusters' turns. Streaming is common/attention/decode.cuh's. The summing warp of each
// block sends the others their channels of its sums, takes its own channels from all, and writes the output:
// no sums go through memory, no second launch adds them. Only for rows of more than one turn they do: the
// block that arrives last at a row's channels adds the turns in their order.
#pragma once
#include "../../common/attention/decode.cuh"
#include "cluster.cuh"

namespace attention {

struct ClusterSchedule {
    const Item* items;
    int heads, first, step, count, total, rank;
    __device__ __forceinline__ ClusterSchedule(const Args& a)
        : items(a.items),
          heads(a.g * ((a.h / a.g + 7) / 8)),
          first(blockIdx.x / CLUSTER),
          step(gridDim.x / CLUSTER),
          count(a.plan->decode),
          total((count + CLUSTER - 1) / CLUSTER * heads),
          rank(blockIdx.x % CLUSTER) {}
    __device__ __forceinline__ Item item(int unit) const {
        const int at = unit / heads * CLUSTER + rank;
        return unit < total && at < count ? load_item(items + at) : Item{};
    }
};

// What a block of a cluster receives: of each of `blocks` blocks, the sums of its own `slice` quads of
// channels, and every head's (maximum, sum of weights).
struct Inbox {
    uint32_t values, ends, full, free;  // full, free: barriers
    __device__ __forceinline__ void send(int slot, int rank, float4 v) const {
        store_cluster16(values + slot * 16, rank, v, full);
    }
    __device__ __forceinline__ void send_ends(int slot, int rank, float top, float weight) const {
        store_cluster16(ends + slot * 16, rank, make_float4(top, weight, 0, 0), full);
    }
};
__device__ __forceinline__ float4 load_shared_quad(uint32_t p) {
    const uint4 v = load_shared16(p);
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
                       __uint_as_float(v.w));
}

// Up to eight sums of the same four channels, added in their order.
struct Quads {
    float top[CLUSTER], weight[CLUSTER];
    float4 v[CLUSTER];
    __device__ __forceinline__ float4 add(int count, float& most, float& all) const {
        most = -INFINITY, all = 0;
        float4 sum = {};
#pragma unroll
        for (int i = 0; i < CLUSTER; i++)
            if (i < count) most = fmaxf(most, top[i]);
#pragma unroll
        for (int i = 0; i < CLUSTER; i++) {
            if (i >= count) continue;
            const float share = exp2_fast(top[i] - most);
            sum.x += share * v[i].x, sum.y += share * v[i].y;
            sum.z += share * v[i].z, sum.w += share * v[i].w;
            all += share * weight[i];
        }
        return sum;
    }
};

// The channels of one block, of one turn of a row.
template <typename T, int D>
struct Slice {
    static constexpr int QUADS = D / 4;
    const Args& a;
    const Item& item;
    const Place& place;
    int rank, first, count;  // quads of the heads' channels

    __device__ __forceinline__ T* out(int quad) const {
        return static_cast<T*>(a.out) + place.row * D + 4 * quad;
    }
    // Of a turn's sums: a head's place, and this block's copy of what the head's sums are relative to.
    __device__ __forceinline__ int64_t at(int turn, int quad) const {
        return place.place + static_cast<int64_t>(turn) * a.h + quad / QUADS;
    }
    __device__ __forceinline__ float4* sums(int turn, int quad) const {
        return reinterpret_cast<float4*>(a.sums) + at(turn, quad) * QUADS + quad % QUADS;
    }
    __device__ __forceinline__ float2* ends(int turn, int quad) const {
        return a.heads + at(turn, quad) * CLUSTER + rank;
    }

    __device__ __forceinline__ void receive(const Inbox& inbox, int blocks) const {
        for (int i = threadIdx.x & 31; i < count; i += 32) {
            const int quad = first + i, head = quad / QUADS;
            Quads q;
#pragma unroll
            for (int b = 0; b < CLUSTER; b++)
                if (b < blocks) {
                    const float4 e = load_shared_quad(inbox.ends + (b * place.heads + head) * 16);
                    q.top[b] = e.x, q.weight[b] = e.y;
                    q.v[b] = load_shared_quad(inbox.values + (b * count + i) * 16);
                }
            float top, weight;
            const float4 sum = q.add(blocks, top, weight);
            if (item.parts() == 1) {
                store_quad(out(quad), sum, weight);
            } else {
                *sums(item.part(), quad) = sum;
                if (i == 0 || quad % QUADS == 0) *ends(item.part(), quad) = make_float2(top, weight);
            }
        }
    }
    // Adds up the turns if this one is the last to arrive; `arrivals` is 0 before and after.
    __device__ __forceinline__ void settle(unsigned* arrivals) const {
        const int turns = item.parts(), lane = threadIdx.x & 31;
        __threadfence();
        __syncwarp();
        unsigned before = 0;
        if (lane == 0) before = atomicAdd(arrivals, 1);
        before = __shfl_sync(~0u, before, 0);
        if (before != turns - 1) return;
        if (lane == 0) *arrivals = 0;
        __threadfence();
        for (int i = lane; i < count; i += 32) {
            const int quad = first + i;
            Quads q;
#pragma unroll
            for (int j = 0; j < CLUSTER_TURNS; j++)
                if (j < turns) {
                    const float2 e = __ldcg(ends(j, quad));
                    q.top[j] = e.x, q.weight[j] = e.y, q.v[j] = __ldcg(sums(j, quad));
                }
            float top, weight;
            const float4 sum = q.add(turns, top, weight);
            store_quad(out(quad), sum, weight);
        }
    }
};

// Brings a part's queries and its piece of the block table to the L2 cache; `far` may be no part at all.
template <typename T, int D, typename Source>
__device__ __forceinline__ void prefetch_unit(const Args& a, const Source& source, const Item& far, int unit,
                                              int units, int subgroups) {
    const Place place(a, far, unit, units, subgroups);
    const int lane = threadIdx.x & 31, lines = (place.heads * D * 2 + 127) / 128;
    const int head = place.kv_head * (a.h / a.g) + place.first;
    const char* q = reinterpret_cast<const char*>(source.template queries<T>(a, far.start, head, D));
    const int* table =
        a.block_table + static_cast<int64_t>(far.row) * a.table_width + far.begin / a.block_size;
    if (far.tile == 0) return;
    if (lane < lines) prefetch_l2(q + lane * 128);
    if (lane == 31) prefetch_l2(table);
}

// The warp that adds up what its block's streaming warps and the cluster's other blocks have made.
template <typename T, int D, int STAGES, typename Source>
__device__ __forceinline__ void sum_cluster(const Args& a, const Source& source, uint8_t* shared,
                                            float2 (*ends)[8], const ClusterSchedule& schedule,
                                            uint32_t barriers, unsigned* arrivals) {
    using Shape = DecodeShape<D, STAGES>;
    constexpr int QUADS = D / 4, WARPS = Shape::WARPS;
    const int lane = threadIdx.x & 31, group = a.h / a.g, subgroups = (group + 7) / 8, most = min(8, group);
    const float* shares = reinterpret_cast<const float*>(shared + Shape::RING);
    const uint32_t values = shared_address(shares) + WARPS * most * D * 4;
    const Inbox inbox = {values, values + most * D * 4, barriers, barriers + 8};
    int received = 0, done = 0;
    Item far = schedule.item(schedule.first + 2 * schedule.step);
    pdl_wait();
    pdl_launch();
    cluster_wait();
    for (int unit = schedule.first; unit < schedule.total; unit += schedule.step, done++) {
        const Item item = schedule.item(unit);
        const Place place(a, item, unit, schedule.heads, subgroups);
        const int blocks = item.tile, total = place.heads * QUADS, own = schedule.rank & (blocks - 1);
        const bool last = unit + schedule.step >= schedule.total;
        const Slice<T, D> slice = {
            a, item, place, schedule.rank, blocks ? own * (total / blocks) : 0, blocks ? total / blocks : 0};
        // What the streaming warps will ask for the unit after the next: from here on it is in the L2 cache.
        prefetch_unit<T, D>(a, source, far, unit + 2 * schedule.step, schedule.heads, subgroups);
        far = schedule.item(unit + 3 * schedule.step);
        named_wait<Shape::THREADS>(FULL);
        // The others have read what they got for the unit before. Also who sends nothing waits: no block gets
        // ahead by more, and none has left when the others' arrivals come.
        if (done > 0) barrier_wait(inbox.free, done - 1 & 1);
        if (blocks > 1) {
            if (lane == 0) barrier_arrive_expect(inbox.full, blocks * (slice.count + place.heads) * 16);
        }
        for (int i = lane; i < total && blocks > 0; i += 32) {
            const int head = i / QUADS, d = i % QUADS;
            float top, weight;
            const float4 sum = add_warps<D, WARPS>(shares, ends, most, head, d, top, weight);
            if (blocks == 1) {
                store_quad(slice.out(i), sum, weight);
            } else {
                const int to = i / slice.count, base = schedule.rank - own;
                inbox.send(own * slice.count + i - to * slice.count, base + to, sum);
                if (d < blocks) inbox.send_ends(own * place.heads + head, base + d, top, weight);
            }
        }
        if (!last) named_arrive<Shape::THREADS>(FREE);
        if (blocks > 1) {
            barrier_wait(inbox.full, received++ & 1);
            slice.receive(inbox, blocks);
        }
        __syncwarp();
        if (!last && lane < CLUSTER) barrier_arrive_at(inbox.free, lane);
        if (item.parts() > 1)
            slice.settle(arrivals + (item.row * schedule.heads + unit % schedule.heads) * CLUSTER +
                         schedule.rank);
    }
}

template <typename T, int D, int STAGES, typename Source>
__device__ __forceinline__ void decode_cluster(const Args& a, const Source& source, unsigned* arrivals) {
    using Shape = DecodeShape<D, STAGES>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float2 ends[Shape::WARPS][8];
    __shared__ uint64_t barriers[2];
    if (threadIdx.x == Shape::WARPS * 32) {
        barrier_init(shared_address(barriers), 1);
        barrier_init(shared_address(barriers + 1), CLUSTER);
        barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
    const ClusterSchedule schedule(a);
    if (threadIdx.x < Shape::WARPS * 32)
        stream_parts<T, D, STAGES>(a, source, shared, ends, schedule);
    else
        sum_cluster<T, D, STAGES>(a, source, shared, ends, schedule, shared_address(barriers), arrivals);
}

}  // namespace attention

// Three blocks share an SM, or two with the largest heads, whose appending would spill.
#define DECODE_CLUSTER_KERNEL(TYPE, T, D, STAGES, BYTES)                                         \
    static_assert(attention::DecodeShape<D, STAGES>::RING == BYTES);                             \
    extern "C" __global__ void __launch_bounds__(attention::DecodeShape<D, STAGES>::THREADS)     \
        attention_decode_cluster_##TYPE##_d##D(attention::Args a, unsigned* arrivals) {          \
        attention::decode_cluster<T, D, STAGES>(a, attention::Stored{}, arrivals);               \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(attention::DecodeShape<D, STAGES>::THREADS,     \
                                                 D > 128 ? 2 : 3)                                \
        attention_decode_append_cluster_##TYPE##_d##D(attention::Args a, attention::Projected p, \
                                                      unsigned* arrivals) {                      \
        attention::decode_cluster<T, D, STAGES>(a, p, arrivals);                                 \
    }
