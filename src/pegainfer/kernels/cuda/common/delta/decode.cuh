// A layer of linear attention behind its projections for rows of one token: convolution, SiLU, l2norm, gates,
// delta rule and gated norm of a value head in one block, with the formulas of conv.cu and delta.cuh.
//
// The value heads of a key head share its q and k, and with them that part of the convolution's state. Each
// of their blocks reads it; the last one that has read it writes the new one, so none waits for another.
#pragma once
#include "delta.cuh"

constexpr int kDecodeThreads = 256, kDecodeWarps = kDecodeThreads / 32;
constexpr int kRowsOfWarp = kKeys / kDecodeWarps;  // of the head's matrix; a lane has four of its 128 columns

__device__ __forceinline__ float4 fused_by(float4 v, float4 by, float4 sum) {
    return {fmaf(v.x, by.x, sum.x), fmaf(v.y, by.y, sum.y), fmaf(v.z, by.z, sum.z), fmaf(v.w, by.w, sum.w)};
}
__device__ __forceinline__ float dot(float4 a, float4 b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// Blocks of (value heads, rows).
template <typename T>
__device__ __forceinline__ void delta_decode(const DeltaDecodeArgs<T>& a) {
    __shared__ float4 parts[3][32];  // q, k, v behind the convolution; a lane has four channels of each
    __shared__ float4 dots[2][kDecodeWarps][32];
    __shared__ bool last_reader;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.x;
    const int group = a.heads / a.key_heads, key_head = a.tiled ? head % a.key_heads : head / group;
    const int keys = a.key_heads * kKeys, channels = 2 * keys + a.heads * kKeys;
    const Row row = row_at(a.rows, blockIdx.y);
    const bool live = row.count == 1 && row.id >= 0, convolves = live && warp < 3;
    const int64_t at = (static_cast<int64_t>(head) * kKeys + warp * kRowsOfWarp) * kKeys + 4 * lane;
    // Nobody writes states between the step's start and this kernel.
    float4 s[kRowsOfWarp] = {};
    if (live && !row.fresh)
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) s[i] = load4(a.delta + row.id * a.delta_entry + at + i * kKeys);
    // Warp 0 has q, warp 1 has k, warp 2 has v.
    const int channel = (warp < 2 ? warp * keys + key_head * kKeys : 2 * keys + head * kKeys) + 4 * lane;
    float4 kept[3] = {}, taps[4] = {};
    if (convolves) {
#pragma unroll
        for (int w = 0; w < 4; w++) taps[w] = load4(a.taps + w * channels + channel);
#pragma unroll
        for (int w = 0; w < 3; w++)
            if (!row.fresh) kept[w] = load4(a.conv + row.id * a.conv_entry + w * channels + channel);
    }
    pdl_wait();
    pdl_launch();
    if (row.count != 1) return;
    T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * kKeys + 4 * lane;
    if (!live) {
        if (warp == 0) store4(out, float4{});
        return;
    }
    const T* x = a.x + row.first * a.x_stride;
    float4 now{};
    if (convolves) {
        now = load4(x + channel);
        float4 y{};
#pragma unroll
        for (int w = 0; w < 3; w++) y = fused_by(kept[w], taps[w], y);
        y = fused_by(now, taps[3], y);
        parts[warp][lane] = {silu(y.x), silu(y.y), silu(y.z), silu(y.w)};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        last_reader = true;
        if (group > 1) {
            int* arrived = a.arrivals + blockIdx.y * a.key_heads + key_head;
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
    const float* q_of = reinterpret_cast<const float*>(parts[0]) + warp * kRowsOfWarp;
    const float* k_of = reinterpret_cast<const float*>(parts[1]) + warp * kRowsOfWarp;
    float4 by_q{}, by_k{};
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; i++) {
        by_q = fused(s[i], q_of[i], by_q);
        by_k = fused(s[i], k_of[i], by_k);
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
    const T* gates = x + channels + a.heads * kKeys;
    const LogGates log =
        log_gates(to_f32(gates[head]), to_f32(gates[a.heads + head]), a.a_log[head], a.dt_bias[head]);
    const float decay = expf(log.log_decay);
    const float4 d = scaled(fused(by_k, -decay * k_norm, parts[2][lane]), log.beta);
    const int save = a.rows.saves[row.first];
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
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; i++) {
        s[i] = fused(d, k_of[i] * k_norm, scaled(s[i], decay));
        store4(a.delta + row.id * a.delta_entry + at + i * kKeys, s[i]);
        if (save >= 0) store4(a.delta + save * a.delta_entry + at + i * kKeys, s[i]);
    }
}
