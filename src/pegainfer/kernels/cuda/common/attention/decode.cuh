// Attention of one query token a row, bound by how fast its keys and values can be read.
//
// A block takes a part of a row's keys for one KV head and up to eight of the query heads that share it. Each
// streaming warp takes pages of its own through a ring of cp.async stages: scoresᵀ = K · qᵀ puts 16 tokens on
// the 16-row side of the mma and the heads on its 8-column side, outᵀ = Vᵀ · weightsᵀ likewise the channels.
// The ring runs ahead into the block's next part. One more warp adds up what the others leave in shared
// memory and settles rows of several parts: a fence waits for all that its warp has requested from memory, so
// it must not be a streaming one. The first part's pages, all but the one that this step appends to, are
// fetched before griddepcontrol.wait; that one too where this launch appends to it itself (newest.cuh).
#pragma once
#include "attention.cuh"
#include "newest.cuh"

namespace attention {

template <int D, int STAGES_, int BYTES = 2>  // bytes an element of the cache
struct DecodeShape {
    static constexpr int STAGES = STAGES_;
    static constexpr int WARPS = D == 256 ? 2 : 4;  // that stream
    static constexpr int THREADS = (WARPS + 1) * 32;
    static constexpr int STAGE = 2 * 16 * D * BYTES;  // keys and values of 16 tokens
    static constexpr int RING = WARPS * STAGES * STAGE;
};

// Where channel d of a head lies among the D floats of its output: no two lanes of an mma meet in a bank.
__device__ __forceinline__ int channel_at(int head, int d) {
    return d ^ (head >> 1 & 3) << 3;
}

// Which parts a block takes, one a unit: unit u is KV head (and eight of its query heads) u % heads of an
// item. The items of a share follow each other, and `heads` blocks take them; else any block takes any.
struct Schedule {
    const Item* items;
    int heads, first, step, total;
    __device__ __forceinline__ Schedule(const Args& a) : items(a.items), heads(a.g * ((a.h / a.g + 7) / 8)) {
        if (a.firsts) {
            const int* share = a.firsts + blockIdx.x / heads;
            first = share[0] * heads + blockIdx.x % heads, step = heads, total = share[1] * heads;
        } else {
            first = blockIdx.x, step = gridDim.x, total = a.plan->decode * heads;
        }
    }
    __device__ __forceinline__ Item item(int unit) const {
        return unit < total ? load_item(items + unit / heads) : Item{};
    }
};

// One block's work on one part, as one streaming warp sees it. Pages of a part go round the warps.
struct Part {
    Item item;
    int kv_head, first;  // first: of the group's query heads
    int count, issued;   // pages of this warp, and how many have been requested
    int entry;           // of this lane: which block holds the warp's page `lane` (of 32)
};

// Where a part's heads are: `first` counts from the KV head's group, `row` in q and out, `place` in the sums.
struct Place {
    int kv_head, first, heads;
    int64_t row, place;
    __device__ __forceinline__ Place(const Args& a, const Item& item, int unit, int units, int subgroups) {
        const int group = a.h / a.g;
        kv_head = unit % units / subgroups, first = unit % units % subgroups * 8;
        heads = min(8, group - first);
        row = static_cast<int64_t>(item.start) * a.h + kv_head * group + first;
        place = static_cast<int64_t>(item.slot) * a.h + kv_head * group + first;
    }
};

// Barriers between the streaming warps and the one that sums up: outputs are there; their place is free
// again. Both sides wait at both: where one only arrives it is no faster, and racecheck loses the order of
// what was read before with what is written then (docs/gpu.md).
constexpr int FULL = 1, FREE = 2;

// A page's scores s of heads 2t and 2t + 1 become weights. m: the heads' maxima so far, l: this lane's sums
// of weights, scale: what the outputs so far are to be multiplied by.
__device__ __forceinline__ void weigh(float (&s)[4], float (&m)[2], float (&l)[2], float (&scale)[2]) {
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
}

// A warp's sums over pages for up to eight heads. With g = lane / 4 and t = lane % 4: o[d] has channels 16 d
// + g and 8 more of heads 2t and 2t + 1, m their maxima, l the sums of their weights (of this lane's tokens,
// until `close`). PLACE: where 16-byte piece c of row r of a page's keys or values lies.
template <typename T, int D, uint32_t (*PLACE)(int r, int c)>
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
            ldmatrix4(r, keys + PLACE(lane & 15, 2 * k + (lane >> 4)));
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
            ldmatrix4_trans(r, values + PLACE((lane >> 4) * 8 + (lane & 7), 2 * d + ((lane >> 3) & 1)));
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

// What a warp adds pages of C up in, for queries and outputs of T.
template <typename T, typename C, int D>
struct Pages {
    using Sums = PageSums<T, D, piece<D>>;
    // `heads` rows of q as operands of all channels.
    static __device__ __forceinline__ void load_queries(const T* q, int heads, uint32_t (&qf)[D / 16][2]) {
        const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
        const bool valid = g < heads;
        q += (valid ? g : 0) * D + 2 * t;
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                qf[k][i] = valid ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 8 * i) : 0;
    }
    // The same of rows in shared memory, swizzled as `piece` does.
    static __device__ __forceinline__ void load_finished(const uint8_t* queries, int heads,
                                                         uint32_t (&qf)[D / 16][2]) {
        attention::load_queries<D>(queries, heads, qf);
    }
};

template <typename T, typename C, int D, int STAGES, typename Source>
__device__ __forceinline__ void stream_parts(const Args& a, const Source& source, uint8_t* shared,
                                             float2 (*ends)[8], const Schedule& schedule) {
    constexpr int BYTES = sizeof(C), ROW = D * BYTES, PIECES = ROW / 16;
    using Shape = DecodeShape<D, STAGES, BYTES>;
    constexpr bool RAW = Source::RAW;
    constexpr int WARPS = Shape::WARPS, STAGE = Shape::STAGE;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const uint32_t ring = shared_address(shared) + warp * STAGES * STAGE;
    float* shares = reinterpret_cast<float*>(shared + Shape::RING);  // [warp][head][D], behind the ring
    const int group = a.h / a.g, subgroups = (group + 7) / 8, units = a.g * subgroups, most = min(8, group);
    const int64_t values = static_cast<int64_t>(a.g) * a.block_size * D;

    auto entry_of = [&](const Item& item, int page) {  // which block holds this warp's page
        const int token = item.begin + (warp + page * WARPS) * 16;
        const int* table = a.block_table + static_cast<int64_t>(item.row) * a.table_width;
        return token < item.end ? table[token / a.block_size] : 0;
    };
    const int total = schedule.total, step = schedule.step;
    auto begin_part = [&](const Item& item, int unit) {
        Part p = {};
        if (unit < total) {
            p.item = item;
            p.kv_head = unit % units / subgroups, p.first = unit % units % subgroups * 8;
            p.count = max(0, ((item.end - item.begin + 15) / 16 - warp + WARPS - 1) / WARPS);
            p.entry = entry_of(item, lane);
        }
        return p;
    };
    // A warp moves STEP rows of a page at a time, 16 bytes a lane; `place` is where this lane's j-th go.
    constexpr int STEP = 32 / PIECES;
    const uint32_t own_row = lane / PIECES * ROW, own_piece = lane % PIECES ^ swizzle<ROW>(lane / PIECES);
    auto place = [&](int j) {
        return own_row + j * STEP * ROW + ((own_piece ^ swizzle<ROW>(j * STEP)) << 4);
    };
    int requested = 0, taken = 0;  // stages, over all parts
    [[maybe_unused]] Newest<T, C, D> newest;
    // Issues the copies of the part's next page, unless no page is left or (`old`) this step may still write
    // it.
    auto fetch = [&](Part& p, bool old) {
        if (p.issued == p.count) return false;
        const int token = p.item.begin + (warp + p.issued * WARPS) * 16;
        if (!RAW && old && token + 16 >= p.item.context) return false;
        if (p.issued > 0 && p.issued % 32 == 0) p.entry = entry_of(p.item, p.issued + lane);
        const int block = __shfl_sync(~0u, p.entry, p.issued & 31);
        const C* from = static_cast<const C*>(a.kv) + block * a.page_stride +
                        (static_cast<int64_t>(p.kv_head) * a.block_size + token % a.block_size) * D;
        const uint32_t to = ring + requested % STAGES * STAGE;
        // What lies behind is not ours and may be NaN; nor is the newest token's row, while it is raw.
        const int rows = min(16, (RAW ? min(p.item.end, p.item.context - 1) : p.item.end) - token);
        constexpr int MOVED = 512 / BYTES;  // elements of a warp's step
        from += lane * (16 / BYTES);
        if (rows == 16) {
#pragma unroll
            for (int j = 0; j < 16 / STEP; j++) {
                cp_async16(to + place(j), from + j * MOVED);
                cp_async16(to + 16 * ROW + place(j), from + values + j * MOVED);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 16 / STEP; j++) {
                const bool valid = lane / PIECES + j * STEP < rows;
                cp_async16(to + place(j), from + j * MOVED, valid);
                cp_async16(to + 16 * ROW + place(j), from + values + j * MOVED, valid);
            }
        }
        cp_async_commit();
        p.issued++, requested++;
        return true;
    };
    auto load_q = [&](const Part& p, uint32_t (&qf)[D / 16][2]) {
        const int heads = min(8, group - p.first);
        if constexpr (RAW) {  // through this warp's share of the outputs' memory
            uint8_t* const to = reinterpret_cast<uint8_t*>(shares + warp * most * D);
            newest.finish(a, source, p.item.start, p.kv_head, p.first, heads, to);
            __syncwarp();
            Pages<T, C, D>::load_finished(to, heads, qf);
            __syncwarp();  // a warp without pages writes its outputs there at once
            const bool holds = p.item.end == p.item.context && p.count > 0 &&
                               (p.item.end - p.item.begin - 1) / 16 % WARPS == warp;
            if (holds && p.first == 0) newest.append(a, source, p.kv_head);
        } else {
            const T* q = source.template queries<T>(a, p.item.start, p.kv_head * group + p.first, D);
            Pages<T, C, D>::load_queries(q, heads, qf);
        }
    };

    Part part = begin_part(schedule.item(schedule.first), schedule.first);
    while (requested < STAGES && fetch(part, true)) {
    }
    if constexpr (RAW)
        if (schedule.first < total) newest.prepare(source, part.item.start);
    pdl_wait();
    pdl_launch();
    while (requested < STAGES && fetch(part, false)) {
    }
    uint32_t qf[D / 16][2];
    if (schedule.first < total) load_q(part, qf);
    Item ahead = schedule.item(schedule.first + step);

    for (int unit = schedule.first; unit < total; unit += step) {
        // What the next part needs is requested now and used a page later.
        Part next = begin_part(ahead, unit + step);
        ahead = schedule.item(unit + 2 * step);
        const Item& item = part.item;
        typename Pages<T, C, D>::Sums sums;
        for (int page = 0; page < part.count; page++) {
            cp_async_wait_upto(requested - taken - 1);
            __syncwarp();
            const uint32_t keys = ring + taken % STAGES * STAGE;
            if constexpr (RAW) {
                const int row = item.context - 1 - item.begin - (warp + page * WARPS) * 16;
                if (row < 16) {
                    newest.patch(source, shared + (warp * STAGES + taken % STAGES) * STAGE, row);
                    __syncwarp();
                }
            }
            sums.add(keys, qf, item.end - item.begin - (warp + page * WARPS) * 16, a.scale_log2);
            __syncwarp();
            taken++;
            while (requested - taken < STAGES && (fetch(part, false) || fetch(next, false))) {
            }
        }
        while (requested - taken < STAGES && fetch(next, false)) {
        }
        if constexpr (!RAW)
            if (unit + step < total) load_q(next, qf);

        sums.close();
        if (!RAW && unit != schedule.first) named_wait<Shape::THREADS>(FREE);
        sums.leave(shares, ends, warp, most);
        named_wait<Shape::THREADS>(FULL);
        part = next;
        if constexpr (RAW)
            if (unit + step < total) {
                newest.prepare(source, part.item.start);
                named_wait<Shape::THREADS>(FREE);
                load_q(part, qf);
            }
    }
}

// What the streaming warps left of four channels of a head: a sum of values, and what it is relative to.
template <int D, int WARPS>
__device__ __forceinline__ float4 add_warps(const float* shares, const float2 (*ends)[8], int most, int head,
                                            int d, float& top, float& weight) {
    top = -INFINITY, weight = 0;
    float4 sum = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, ends[w][head].x);
    const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const float share = exp2_fast(ends[w][head].x - base);
        const float* from = shares + (w * most + head) * D + channel_at(head, 4 * d);
        const float4 v = *reinterpret_cast<const float4*>(from);
        sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
        weight += share * ends[w][head].y;
    }
    return sum;
}
template <typename T>
__device__ __forceinline__ void store_quad(T* out, float4 sum, float weight) {
    const float inverse = 1.f / weight;
    const uint2 packed = {pack2<T>(sum.x * inverse, sum.y * inverse),
                          pack2<T>(sum.z * inverse, sum.w * inverse)};
    *reinterpret_cast<uint2*>(out) = packed;
}

// The warp that adds up the streaming warps' outputs, part after part.
template <typename T, typename C, int D, int STAGES>
__device__ __forceinline__ void sum_parts(const Args& a, uint8_t* shared, float2 (*ends)[8],
                                          const Schedule& schedule) {
    using Shape = DecodeShape<D, STAGES, sizeof(C)>;
    constexpr int QUADS = D / 4;
    const int lane = threadIdx.x & 31;
    const float* shares = reinterpret_cast<const float*>(shared + Shape::RING);
    const int group = a.h / a.g, subgroups = (group + 7) / 8, most = min(8, group);
    float4* sums = reinterpret_cast<float4*>(a.sums);
    pdl_wait();
    pdl_launch();
    Item item = schedule.item(schedule.first);
    for (int unit = schedule.first; unit < schedule.total; unit += schedule.step) {
        const Item next = schedule.item(unit + schedule.step);
        const Place p(a, item, unit, schedule.heads, subgroups);
        named_wait<Shape::THREADS>(FULL);
        for (int i = lane; i < p.heads * QUADS; i += 32) {
            const int head = i / QUADS, d = i % QUADS;
            float top, weight;
            float4 sum = add_warps<D, Shape::WARPS>(shares, ends, most, head, d, top, weight);
            if constexpr (sizeof(C) == 1)
                sum.x *= a.v_scale, sum.y *= a.v_scale, sum.z *= a.v_scale, sum.w *= a.v_scale;
            if (item.slot < 0) {
                store_quad(static_cast<T*>(a.out) + p.row * D + 4 * i, sum, weight);
            } else {
                const int64_t at = p.place + static_cast<int64_t>(item.part()) * a.h + head;
                sums[at * QUADS + d] = sum;
                if (d == 0) a.heads[at] = make_float2(top, weight);
            }
        }
        item = next;
        __syncwarp();
        if (unit + schedule.step < schedule.total) named_wait<Shape::THREADS>(FREE);
    }
}

template <typename T, typename C, int D, int STAGES, typename Source>
__device__ __forceinline__ void decode(const Args& a, const Source& source) {
    using Shape = DecodeShape<D, STAGES, sizeof(C)>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float2 ends[Shape::WARPS][8];
    const Schedule schedule(a);
    if (threadIdx.x < Shape::WARPS * 32)
        stream_parts<T, C, D, STAGES>(a, source, shared, ends, schedule);
    else
        sum_parts<T, C, D, STAGES>(a, shared, ends, schedule);
}

}  // namespace attention

#define DECODE_KERNEL(TYPE, T, C, D, STAGES, BYTES)                                          \
    static_assert(attention::DecodeShape<D, STAGES, sizeof(C)>::RING == BYTES);              \
    extern "C" __global__ void __launch_bounds__(attention::DecodeShape<D, STAGES>::THREADS) \
        attention_decode_##TYPE##_d##D(attention::Args a) {                                  \
        attention::decode<T, C, D, STAGES>(a, attention::Stored{});                          \
    }                                                                                        \
    extern "C" __global__ void __launch_bounds__(attention::DecodeShape<D, STAGES>::THREADS, \
                                                 D > 128 ? 2 : 3)                            \
        attention_decode_append_##TYPE##_d##D(attention::Args a, attention::Projected p) {   \
        attention::decode<T, C, D, STAGES>(a, p);                                            \
    }
