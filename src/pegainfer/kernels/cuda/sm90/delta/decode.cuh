// A layer of linear attention behind its projections for many rows of one token, on Hopper: the formulas are
// those of common/delta/decode.cuh.
//
// The matrix of a value head is read and written once, so the kernel is bound by memory. One block an SM
// holds a ring of matrices. A warp copies them in and, where they were updated in place, out again by TMA, so
// that both directions are always in flight; teams of eight warps take the matrices in turn.
//
// Under load some SMs get more of the memory's bandwidth than others. So blocks claim heads one by one from a
// counter; only the first of them, which are fetched before the launch ahead has ended, are fixed.
#pragma once
#include "../../common/delta/decode.cuh"
#include "hopper.cuh"

constexpr int kTeams = 2, kTeamThreads = 256;
constexpr int kRingThreads = kTeams * kTeamThreads + 32;
constexpr int kRingStages = 3;
constexpr int kMatrix = kKeys * kKeys, kMatrixBytes = kMatrix * 4;
// Of a launch's counters: heads claimed beyond the fixed ones, blocks that have ended, and from kReaders on
// the teams that have read the convolution's state of each row's key heads.
constexpr int kClaimed = 0, kEnded = 1, kReaders = 32;

__device__ __forceinline__ void bulk_store(void* to, uint32_t from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until shared memory that this thread's copies read may be written again.
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// A value head of a row.
struct Item {
    int index, head, key_head;  // index: of the row
    Row row;
    bool live;

    template <typename T>
    __device__ __forceinline__ Item(const DeltaDecodeArgs<T>& a, int number) {
        const int group = a.heads / a.key_heads, place = number % a.heads;
        index = number / a.heads, key_head = place / group;
        head = a.tiled ? place % group * a.key_heads + key_head : place;
        row = row_at(a.rows, index);
        live = row.count == 1 && row.id >= 0;
    }
};

// The mbarriers say that a stage's head is known, that its matrix is there, and that it was updated.
struct Ring {
    uint64_t known[kRingStages], full[kRingStages], done[kRingStages];
    int number[kRingStages];  // of the stage's head among those of all rows, a.units where none is left
};

// The warp that copies: one lane of it.
template <typename T>
__device__ __forceinline__ void copy_matrices(const DeltaDecodeArgs<T>& a, Ring& ring, uint32_t matrices) {
    const uint32_t known = shared_address(ring.known), full = shared_address(ring.full),
                   done = shared_address(ring.done);
    float* const pool = static_cast<float*>(a.delta);
    int end = 1 << 30;  // the first place in the sequence of heads that has none
    int claim = 0;
    const auto publish = [&](int k) {
        const int stage = k % kRingStages;
        int number = blockIdx.x + k * gridDim.x;
        if (k >= kRingStages) {
            number = claim + kRingStages * gridDim.x;
            if (number < a.units) claim = atomicAdd(a.arrivals + kClaimed, 1);  // used at the next call
        }
        if (number >= a.units) {
            number = a.units;
            end = min(end, k);
        }
        ring.number[stage] = number;
        mbarrier_arrive(known + 8 * stage);
        if (number == a.units) return;
        const Item item(a, number);
        if (!item.live || item.row.fresh) {
            mbarrier_arrive(full + 8 * stage);
            return;
        }
        mbarrier_arrive_expect(full + 8 * stage, kMatrixBytes);
        bulk_load(matrices + stage * kMatrixBytes,
                  pool + item.row.id * a.delta_entry + static_cast<int64_t>(item.head) * kMatrix,
                  kMatrixBytes, full + 8 * stage, l2_normal());
    };
    for (int k = 0; k < kRingStages; k++) publish(k);
    pdl_wait();
    pdl_launch();
    claim = atomicAdd(a.arrivals + kClaimed, 1);
    for (int k = 0; k < end; k++) {
        const int stage = k % kRingStages;
        const Item item(a, ring.number[stage]);
        const int save = item.live ? a.rows.saves[item.row.first] : -1;
        mbarrier_wait(done + 8 * stage, k / kRingStages & 1);
        if (item.live) {
            const int64_t at = static_cast<int64_t>(item.head) * kMatrix;
            bulk_store(pool + item.row.id * a.delta_entry + at, matrices + stage * kMatrixBytes,
                       kMatrixBytes);
            if (save >= 0)
                bulk_store(pool + save * a.delta_entry + at, matrices + stage * kMatrixBytes, kMatrixBytes);
            bulk_commit();
        }
        if (k + kRingStages < end + kTeams) {  // each team must learn where the end is
            bulk_wait_read();
            publish(k + kRingStages);
        }
    }
    bulk_wait();
    if (atomicAdd(a.arrivals + kEnded, 1) == static_cast<int>(gridDim.x) - 1) {
        a.arrivals[kClaimed] = 0;
        a.arrivals[kEnded] = 0;
    }
}

template <typename T>
__device__ __forceinline__ void delta_decode_ring(const DeltaDecodeArgs<T>& a) {
    extern __shared__ __align__(128) char shared[];
    __shared__ Ring ring;
    __shared__ float4 parts_of[kTeams][3][32];  // as in delta_decode
    __shared__ float4 dots_of[kTeams][2][kDecodeWarps][32];
    __shared__ bool last_reader_of[kTeams];
    const uint32_t known = shared_address(ring.known), full = shared_address(ring.full),
                   done = shared_address(ring.done);
    if (threadIdx.x == 0) {
        for (int s = 0; s < kRingStages; s++) {
            mbarrier_init(known + 8 * s, 1);
            mbarrier_init(full + 8 * s, 1);
            mbarrier_init(done + 8 * s, kDecodeWarps);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    const int team = threadIdx.x / kTeamThreads, thread = threadIdx.x % kTeamThreads;
    if (team == kTeams) {
        if (thread == 0) copy_matrices(a, ring, shared_address(shared));
        return;
    }
    const int lane = threadIdx.x & 31, warp = thread >> 5, group = a.heads / a.key_heads;
    const int keys = a.key_heads * kKeys, channels = 2 * keys + a.heads * kKeys;
    float4(&parts)[3][32] = parts_of[team];
    float4(&dots)[2][kDecodeWarps][32] = dots_of[team];
    for (int k = team;; k += kTeams) {
        const int stage = k % kRingStages;
        mbarrier_wait(known + 8 * stage, k / kRingStages & 1);
        const int number = ring.number[stage];
        if (number == a.units) break;
        const Item item(a, number);
        const Row& row = item.row;
        const int head = item.head, key_head = item.key_head;
        const bool convolves = item.live && warp < 3;
        const int channel = (warp < 2 ? warp * keys + key_head * kKeys : 2 * keys + head * kKeys) + 4 * lane;
        float4 kept[3] = {}, taps[4] = {};
        if (convolves) {
#pragma unroll
            for (int w = 0; w < 4; w++) taps[w] = load4(a.taps + w * channels + channel);
#pragma unroll
            for (int w = 0; w < 3; w++)
                if (!row.fresh) kept[w] = load4(a.conv + row.id * a.conv_entry + w * channels + channel);
        }
        if (k == team) {
            pdl_wait();
            pdl_launch();
        }
        const T* x = a.x + static_cast<int64_t>(row.first) * a.x_stride;
        float4 now{};
        LogGates log{};
        int save = -1;
        if (item.live) {
            if (convolves) now = load4(x + channel);
            const T* gates = x + channels + a.heads * kKeys;
            log =
                log_gates(to_f32(gates[head]), to_f32(gates[a.heads + head]), a.a_log[head], a.dt_bias[head]);
            save = a.rows.saves[row.first];
        }
        T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * kKeys + 4 * lane;
        if (!item.live) {
            if (row.count == 1 && warp == 0) store4(out, float4{});
            mbarrier_wait(full + 8 * stage, k / kRingStages & 1);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(done + 8 * stage);
            continue;
        }
        if (convolves) {
            float4 y{};
#pragma unroll
            for (int w = 0; w < 3; w++) y = fused_by(kept[w], taps[w], y);
            y = fused_by(now, taps[3], y);
            parts[warp][lane] = {silu(y.x), silu(y.y), silu(y.z), silu(y.w)};
        }
        named_wait<kTeamThreads>(1 + team);
        if (thread == 0) {
            bool last = true;
            if (group > 1) {
                int* readers = a.arrivals + kReaders + item.index * a.key_heads + key_head;
                __threadfence();  // what this team has read comes before its arrival
                last = atomicAdd(readers, 1) == group - 1;
                if (last) {
                    *readers = 0;
                    __threadfence();
                }
            }
            last_reader_of[team] = last;
        }
        const float4 q = parts[0][lane], key = parts[1][lane];
        const float qq = warp_sum(dot(q, q)), kk = warp_sum(dot(key, key)), qk = warp_sum(dot(q, key));
        const float q_norm = rsqrtf(static_cast<float>(kKeys)) / sqrtf(qq + a.key_eps);
        const float k_norm = 1.f / sqrtf(kk + a.key_eps);
        const float* q_of = reinterpret_cast<const float*>(parts[0]) + warp * kRowsOfWarp;
        const float* k_of = reinterpret_cast<const float*>(parts[1]) + warp * kRowsOfWarp;
        mbarrier_wait(full + 8 * stage, k / kRingStages & 1);
        float* const own =
            reinterpret_cast<float*>(shared) + stage * kKeys * kKeys + warp * kRowsOfWarp * kKeys + 4 * lane;
        float4 by_q{}, by_k{};
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            const float4 s = row.fresh ? float4{} : load4(own + i * kKeys);
            by_q = fused(s, q_of[i], by_q);
            by_k = fused(s, k_of[i], by_k);
        }
        dots[0][warp][lane] = by_q;
        dots[1][warp][lane] = by_k;
        named_wait<kTeamThreads>(1 + team);
        by_q = by_k = float4{};
#pragma unroll
        for (int w = 0; w < kDecodeWarps; w++) {
            by_q = fused(dots[0][w][lane], 1.f, by_q);
            by_k = fused(dots[1][w][lane], 1.f, by_k);
        }
        const float decay = expf(log.log_decay);
        const float4 d = scaled(fused(by_k, -decay * k_norm, parts[2][lane]), log.beta);
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
        if (convolves && (warp == 2 || last_reader_of[team])) {
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
