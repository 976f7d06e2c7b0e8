#pragma once
#include "decode.cuh"
template <int KIND>
__device__ __forceinline__ uint64_t policy_of() {
    return KIND == 1 ? l2_evict_first() : KIND == 2 ? l2_evict_last() : 0x1000000000000000ull;
}
__device__ __forceinline__ void cp_async16_hint(uint32_t dst, const void* src, bool valid, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void cp_async8_hint(uint32_t dst, const void* src, bool valid, uint64_t policy) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(valid ? 8 : 0), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store4_hint(float* p, float4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store4_hint(bf16* p, float4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(pack2<bf16>(v.x, v.y)),
                 "r"(pack2<bf16>(v.z, v.w)), "l"(policy)
                 : "memory");
}

template <bool INTER>
__device__ __forceinline__ int64_t hinted_at(const HeadOfRow& item, int lane, int warp) {
    return (static_cast<int64_t>(item.head) * kKeys + warp * (INTER ? 1 : kRowsOfWarp)) * kKeys + 4 * lane;
}

// Begins to copy this thread's part of a head's matrix; zeros where the row has none yet.
template <typename S, bool INTER, typename T>
__device__ __forceinline__ void fetch_hinted(const DeltaDecodeArgs<T>& a, const Turn& turn, uint32_t to,
                                             uint64_t in) {
    if (turn.unit < a.units) {
        const HeadOfRow item(a, turn);
        const bool valid = item.live && !item.row.fresh;
        const S* from = static_cast<const S*>(a.delta);
        if (valid)
            from += item.row.id * a.delta_entry + hinted_at<INTER>(item, threadIdx.x & 31, threadIdx.x >> 5);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            constexpr int kBytes = 4 * sizeof(S);
            const S* const source = valid ? from + i * kKeys * (INTER ? kDecodeWarps : 1) : from;
            if constexpr (kBytes == 16)
                cp_async16_hint(to + i * kDecodeThreads * kBytes, source, valid, in);
            else
                cp_async8_hint(to + i * kDecodeThreads * kBytes, source, valid, in);
        }
    }
    cp_async_commit();
}

// S: what states are stored as, float or bf16.
template <typename T, int IN, int OUT, bool INTER, typename S = float>
__device__ __forceinline__ void delta_hinted(const DeltaDecodeArgs<T>& a) {
    constexpr int kStep = INTER ? kDecodeWarps : 1;
    extern __shared__ __align__(16) char matrices[];  // [kRowsOfWarp, kDecodeThreads] of four S
    __shared__ float4 parts[3][32];  // q, k, v behind the convolution; a lane has four channels of each
    __shared__ float4 dots[2][kDecodeWarps][32];
    __shared__ bool last_reader;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = a.heads / a.key_heads;
    const int keys = a.key_heads * kKeys, channels = 2 * keys + a.heads * kKeys;
    S* const fetched = reinterpret_cast<S*>(matrices) + 4 * threadIdx.x;
    Turn turn(blockIdx.x);
    const uint64_t in = policy_of<IN>();
    const uint64_t outp = policy_of<OUT>();
    // Nobody writes states between the step's start and this kernel.
    fetch_hinted<S, INTER>(a, turn, shared_address(fetched), in);
#pragma unroll 1
    for (bool first = true; turn.unit < a.units; first = false) {
        const HeadOfRow item(a, turn);
        const Row& row = item.row;
        const int head = item.head, key_head = item.key_head;
        // Warp 0 has q, warp 1 has k, warp 2 has v. The first head's q and k stay for the others of its
        // chain.
        const bool convolves = item.live && (warp == 2 || (warp < 2 && turn.part == 0));
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
        }
        // What is small is requested before the wait for the matrix.
        const T* x = a.x + row.first * a.x_stride;
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
        cp_async_wait<0>();
        float4 s[kRowsOfWarp];
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) s[i] = load4(fetched + 4 * i * kDecodeThreads);
        turn.advance(a.chain);
        fetch_hinted<S, INTER>(a, turn, shared_address(fetched), in);
        if (row.count != 1) continue;
        T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * kKeys + 4 * lane;
        if (!item.live) {
            if (warp == 0) store4(out, float4{});
            continue;
        }
        if (convolves) {
            float4 y{};
#pragma unroll
            for (int w = 0; w < 3; w++) y = fused_by(kept[w], taps[w], y);
            y = fused_by(now, taps[3], y);
            parts[warp][lane] = {silu(y.x), silu(y.y), silu(y.z), silu(y.w)};
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            last_reader = true;
            if (group > a.chain) {
                int* arrived = a.arrivals + item.index * a.key_heads + key_head;
                __threadfence();  // what this block has read comes before its arrival
                last_reader = atomicAdd(arrived, 1) == group - 1;
                if (last_reader) {
                    *arrived = 0;
                    __threadfence();
                }
            }
        }
        const float4 q = parts[0][lane], k = parts[1][lane];
        const float qq = warp_sum(dot(q, q)), kk = warp_sum(dot(k, k)), qk = warp_sum(dot(q, k));
        const float q_norm = rsqrtf(static_cast<float>(kKeys)) / sqrtf(qq + a.key_eps);
        const float k_norm = 1.f / sqrtf(kk + a.key_eps);
        const float* q_of = reinterpret_cast<const float*>(parts[0]) + warp * (INTER ? 1 : kRowsOfWarp);
        const float* k_of = reinterpret_cast<const float*>(parts[1]) + warp * (INTER ? 1 : kRowsOfWarp);
        float4 by_q{}, by_k{};
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            by_q = fused(s[i], q_of[i * kStep], by_q);
            by_k = fused(s[i], k_of[i * kStep], by_k);
        }
        dots[0][warp][lane] = by_q;
        dots[1][warp][lane] = by_k;
        __syncthreads();
        by_q = by_k = float4{};
#pragma unroll
        for (int w = 0; w < kDecodeWarps; w++) {
            by_q = fused(dots[0][w][lane], 1.f, by_q);
            by_k = fused(dots[1][w][lane], 1.f, by_k);
        }
        const float decay = expf(log.log_decay);
        const float4 d = scaled(fused(by_k, -decay * k_norm, parts[2][lane]), log.beta);
        if (warp == 0) {
            const float4 o = fused(d, qk * q_norm * k_norm, scaled(by_q, decay * q_norm));
            const float scale = rsqrtf(warp_sum(dot(o, o)) / kKeys + a.eps);
            const float4 z = load4(x + channels + head * kKeys + 4 * lane), w = load4(a.norm + 4 * lane);
            store4(out, float4{o.x * scale * w.x * silu(z.x), o.y * scale * w.y * silu(z.y),
                               o.z * scale * w.z * silu(z.z), o.w * scale * w.w * silu(z.w)});
        }
        if (convolves && (warp == 2 || last_reader)) {
            const float4 inputs[3] = {kept[1], kept[2], now};
#pragma unroll
            for (int w = 0; w < 3; w++) {
                store4(a.conv + row.id * a.conv_entry + w * channels + channel, inputs[w]);
                if (save >= 0) store4(a.conv + save * a.conv_entry + w * channels + channel, inputs[w]);
            }
        }
        S* const matrix = static_cast<S*>(a.delta) + hinted_at<INTER>(item, lane, warp);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            s[i] = fused(d, k_of[i * kStep] * k_norm, scaled(s[i], decay));
            store4_hint(matrix + row.id * a.delta_entry + i * kStep * kKeys, s[i], outp);
            if (save >= 0) store4(matrix + save * a.delta_entry + i * kStep * kKeys, s[i]);
        }
        __syncthreads();  // before the next head's values take the place of this one's in `parts`
    }
}
