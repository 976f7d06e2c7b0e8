// Experiment: the delta rule of one-token rows with matrices that come and go by bulk copies.
#pragma once
#include "../../common/delta/decode.cuh"
#include "hopper.cuh"

constexpr int kTeams = 2, kTeamThreads = 256;
constexpr int kRingThreads = kTeams * kTeamThreads + 32;

__device__ __forceinline__ uint64_t l2_evict_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, int bytes, uint64_t policy) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to),
                 "r"(from), "r"(bytes), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Value head `part` of the `unit`-th key head of all rows.
struct Item {
    int head, key_head;
    Row row;
    bool exists, live;
    template <typename T>
    __device__ __forceinline__ Item(const DeltaDecodeArgs<T>& a, int unit, int part) {
        exists = unit < a.units;
        live = false;
        if (!exists) return;
        const int index = unit / a.key_heads;
        key_head = unit % a.key_heads;
        head = a.tiled ? part * a.key_heads + key_head : key_head * a.chain + part;
        row = row_at(a.rows, index);
        live = row.count == 1 && row.id >= 0;
    }
};

template <typename T, typename S, int STAGES, bool FIRST_IN, bool FIRST_OUT, bool PROBE, int PIECES>
__device__ __forceinline__ void delta_ring(const DeltaDecodeArgs<T>& a) {
    extern __shared__ __align__(128) char ring[];
    __shared__ float4 parts[kTeams][3][32];
    __shared__ float4 dots[kTeams][2][kDecodeWarps][32];
    __shared__ __align__(8) uint64_t barriers[2 * STAGES];
    constexpr int kBytes = kKeys * kKeys * sizeof(S);
    const uint32_t full = shared_address(barriers), done = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(done + 8 * s, kDecodeWarps);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int workers = kTeams * gridDim.x, mine = kTeams * blockIdx.x;
    const int rounds = mine < a.units ? (a.units - mine + workers - 1) / workers : 0;
    const int team = threadIdx.x / kTeamThreads;
    if (team == kTeams) {  // the warp that copies
        if (threadIdx.x % 32 != 0) return;
        const uint64_t in = FIRST_IN ? l2_evict_first() : l2_evict_normal();
        const uint64_t out = FIRST_OUT ? l2_evict_first() : l2_evict_normal();
        const int count = rounds * kTeams * a.chain;
        const auto item_at = [&](int k) {
            const int step = k / kTeams;
            return Item(a, mine + k % kTeams + step / a.chain * workers, step % a.chain);
        };
        const auto load_item = [&](int k) {
            const Item item = item_at(k);
            const int stage = k % STAGES;
            if (!item.live || item.row.fresh) {
                mbarrier_arrive(full + 8 * stage);
                return;
            }
            mbarrier_arrive_expect(full + 8 * stage, kBytes);
            const char* from = reinterpret_cast<const char*>(
                static_cast<const S*>(a.delta) + item.row.id * a.delta_entry + static_cast<int64_t>(item.head) * kKeys * kKeys);
            for (int p = 0; p < PIECES; p++)
                bulk_load(shared_address(ring) + stage * kBytes + p * (kBytes / PIECES),
                          from + p * (kBytes / PIECES), kBytes / PIECES, full + 8 * stage, in);
        };
        for (int k = 0; k < min(STAGES, count); k++) load_item(k);
        pdl_wait();
        pdl_launch();
        for (int k = 0; k < count; k++) {
            const Item item = item_at(k);
            const int stage = k % STAGES;
            const int save = item.live ? a.rows.saves[item.row.first] : -1;
            mbarrier_wait(done + 8 * stage, k / STAGES & 1);
            if (item.live) {
                const int64_t at = static_cast<int64_t>(item.head) * kKeys * kKeys;
                for (int p = 0; p < PIECES; p++)
                    bulk_store(reinterpret_cast<char*>(static_cast<S*>(a.delta) + item.row.id * a.delta_entry + at) +
                                   p * (kBytes / PIECES),
                               shared_address(ring) + stage * kBytes + p * (kBytes / PIECES),
                               kBytes / PIECES, out);
                if (save >= 0)
                    bulk_store(static_cast<S*>(a.delta) + save * a.delta_entry + at, shared_address(ring) + stage * kBytes,
                               kBytes, out);
                bulk_commit();
            }
            if (k + STAGES < count) {
                bulk_wait_read();
                load_item(k + STAGES);
            }
        }
        bulk_wait();
        return;
    }
    const int thread = threadIdx.x % kTeamThreads, lane = threadIdx.x & 31, warp = thread >> 5;
    const int keys = a.key_heads * kKeys, channels = 2 * keys + a.heads * kKeys;
    bool first = true;
    for (int k = team, unit = mine + team, step = 0; step < rounds * a.chain; step++, k += kTeams) {
        const int part = step % a.chain;
        if (step > 0 && part == 0) unit += workers;
        const Item item(a, unit, part);
        const Row& row = item.row;
        const int head = item.head, key_head = item.key_head, stage = k % STAGES;
        const bool convolves = item.live && (warp == 2 || (warp < 2 && part == 0));
        const int channel = (warp < 2 ? warp * keys + key_head * kKeys : 2 * keys + head * kKeys) + 4 * lane;
        float4 kept[3] = {}, taps[4] = {};
        if (convolves) {
#pragma unroll
            for (int w = 0; w < 4; w++) taps[w] = load4(a.taps + w * channels + channel);
#pragma unroll
            for (int w = 0; w < 3; w++)
                if (!row.fresh) kept[w] = load4(a.conv + row.id * a.conv_entry + w * channels + channel);
        }
        if (first) {
            pdl_wait();
            pdl_launch();
            first = false;
        }
        const T* x = a.x + static_cast<int64_t>(row.first) * a.x_stride;
        float4 now{};
        if (convolves) now = load4(x + channel);
        LogGates log{};
        int save = -1;
        if (item.live) {
            const T* gates = x + channels + a.heads * kKeys;
            log =
                log_gates(to_f32(gates[head]), to_f32(gates[a.heads + head]), a.a_log[head], a.dt_bias[head]);
            save = a.rows.saves[row.first];
        }
        mbarrier_wait(full + 8 * stage, k / STAGES & 1);
        T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * kKeys + 4 * lane;
        if (!item.live) {
            if (item.exists && row.count == 1 && warp == 0) store4(out, float4{});
            __syncwarp();
            if (lane == 0) mbarrier_arrive(done + 8 * stage);
            continue;
        }
        S* const own = reinterpret_cast<S*>(ring + stage * kBytes) + warp * kRowsOfWarp * kKeys + 4 * lane;
        if (!PROBE) {
            if (convolves) {
                float4 y{};
#pragma unroll
                for (int w = 0; w < 3; w++) y = fused_by(kept[w], taps[w], y);
                y = fused_by(now, taps[3], y);
                parts[team][warp][lane] = {silu(y.x), silu(y.y), silu(y.z), silu(y.w)};
            }
            named_wait<kTeamThreads>(1 + team);
            const float4 q = parts[team][0][lane], key = parts[team][1][lane];
            const float qq = warp_sum(dot(q, q)), kk = warp_sum(dot(key, key)), qk = warp_sum(dot(q, key));
            const float q_norm = rsqrtf(static_cast<float>(kKeys)) / sqrtf(qq + a.key_eps);
            const float k_norm = 1.f / sqrtf(kk + a.key_eps);
            const float* q_of = reinterpret_cast<const float*>(parts[team][0]) + warp * kRowsOfWarp;
            const float* k_of = reinterpret_cast<const float*>(parts[team][1]) + warp * kRowsOfWarp;
            float4 by_q{}, by_k{};
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; i++) {
                const float4 s = row.fresh ? float4{} : load4(own + i * kKeys);
                by_q = fused(s, q_of[i], by_q);
                by_k = fused(s, k_of[i], by_k);
            }
            dots[team][0][warp][lane] = by_q;
            dots[team][1][warp][lane] = by_k;
            named_wait<kTeamThreads>(1 + team);
            by_q = by_k = float4{};
#pragma unroll
            for (int w = 0; w < kDecodeWarps; w++) {
                by_q = fused(dots[team][0][w][lane], 1.f, by_q);
                by_k = fused(dots[team][1][w][lane], 1.f, by_k);
            }
            const float decay = expf(log.log_decay);
            const float4 d = scaled(fused(by_k, -decay * k_norm, parts[team][2][lane]), log.beta);
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; i++) {
                const float4 s = row.fresh ? float4{} : load4(own + i * kKeys);
                store4(own + i * kKeys, fused(d, k_of[i] * k_norm, scaled(s, decay)));
            }
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(done + 8 * stage);
            if (warp == 0) {
                const float4 o = fused(d, qk * q_norm * k_norm, scaled(by_q, decay * q_norm));
                const float scale = rsqrtf(warp_sum(dot(o, o)) / kKeys + a.eps);
                const float4 z = load4(x + channels + head * kKeys + 4 * lane), w = load4(a.norm + 4 * lane);
                store4(out, float4{o.x * scale * w.x * silu(z.x), o.y * scale * w.y * silu(z.y),
                                   o.z * scale * w.z * silu(z.z), o.w * scale * w.w * silu(z.w)});
            }
        } else {
#pragma unroll
            for (int i = 0; i < kRowsOfWarp; i++) store4(own + i * kKeys, scaled(load4(own + i * kKeys), 0.5f));
            async_proxy_fence();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(done + 8 * stage);
        }
        if (convolves) {
            const float4 inputs[3] = {kept[1], kept[2], now};
#pragma unroll
            for (int w = 0; w < 3; w++) {
                store4(a.conv + row.id * a.conv_entry + w * channels + channel, inputs[w]);
                if (save >= 0) store4(a.conv + save * a.conv_entry + w * channels + channel, inputs[w]);
            }
        }
        named_wait<kTeamThreads>(1 + team);  // before the next head's values take the place of this one's
    }
}
