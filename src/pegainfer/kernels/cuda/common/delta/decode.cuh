// A layer of linear attention behind its projections for rows of one token: convolution, SiLU, l2norm, gates,
// delta rule and gated norm of a value head in one block, with the formulas of conv.cu and delta.cuh.
//
// The state of a head is 64 KB (32 KB where it is stored as bf16) that are read and written once, so the
// kernel is bound by memory. Blocks stay and take every gridDim.x-th head of a row. While a block works on
// one matrix from registers, each thread's part of the next one is on its way to shared memory: the threads
// read only what they fetched themselves, so that the copies need no barrier.
//
// The value heads of a key head share its q and k, and with them that part of the convolution's state. Where
// there are heads enough for all blocks, one block takes all value heads of a key head in turn. Otherwise
// each of their blocks reads that part of the state, and the last one that has read it writes the new one, so
// that none waits for another.
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

// The order in which a block takes heads: a.chain heads of a key head in turn, then those of a later one.
struct Turn {
    int unit, part = 0;

    __device__ __forceinline__ explicit Turn(int first) : unit(first) {}
    __device__ __forceinline__ void advance(int chain) {
        if (++part == chain) part = 0, unit += gridDim.x;
    }
};

// A head of a row, which a block works on.
struct HeadOfRow {
    int index, head, key_head;  // index: of the row
    Row row;
    bool live;

    template <typename T>
    __device__ __forceinline__ HeadOfRow(const DeltaDecodeArgs<T>& a, const Turn& turn) {
        const int item = turn.unit * a.chain + turn.part, group = a.heads / a.key_heads;
        const int place = item % a.heads;  // the heads of a key head follow each other
        index = item / a.heads, key_head = place / group;
        head = a.tiled ? place % group * a.key_heads + key_head : place;
        row = row_at(a.rows, index);
        live = row.count == 1 && row.id >= 0;
    }
};

__device__ __forceinline__ int64_t matrix_at(const HeadOfRow& item, int lane, int warp) {
    return (static_cast<int64_t>(item.head) * kKeys + warp * kRowsOfWarp) * kKeys + 4 * lane;
}

// L2 policies of matrices. Where each block takes one at most, matrices are evicted first, so that what the
// next kernels read stays in L2 (H200, 16 rows of 32 heads: 21.4 us instead of 23.8). Where blocks take
// several, that is slower (128 rows: 159 us instead of 155), so the policy is the normal one.
__device__ __forceinline__ uint64_t l2_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t l2_normal() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void cp_async16_by(uint32_t dst, const void* src, bool valid, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}
// The same of eight bytes, which go through L1: past it there are only copies of 16.
__device__ __forceinline__ void cp_async8_by(uint32_t dst, const void* src, bool valid, uint64_t policy) {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], 8, %2, %3;" ::"r"(dst), "l"(src),
                 "r"(valid ? 8 : 0), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store4_by(float* p, float4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "l"(policy)
                 : "memory");
}
__device__ __forceinline__ void store4_by(bf16* p, float4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(pack2<bf16>(v.x, v.y)),
                 "r"(pack2<bf16>(v.z, v.w)), "l"(policy)
                 : "memory");
}

// Begins to copy this thread's part of a head's matrix; zeros where the row has none yet.
template <typename S, typename T>
__device__ __forceinline__ void fetch_matrix(const DeltaDecodeArgs<T>& a, const Turn& turn, uint32_t to,
                                             uint64_t policy) {
    if (turn.unit < a.units) {
        const HeadOfRow item(a, turn);
        const bool valid = item.live && !item.row.fresh;
        const S* from = static_cast<const S*>(a.delta);
        if (valid) from += item.row.id * a.delta_entry + matrix_at(item, threadIdx.x & 31, threadIdx.x >> 5);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            constexpr int kBytes = 4 * sizeof(S);
            const S* const source = valid ? from + i * kKeys : from;
            if constexpr (kBytes == 16)
                cp_async16_by(to + i * kDecodeThreads * kBytes, source, valid, policy);
            else
                cp_async8_by(to + i * kDecodeThreads * kBytes, source, valid, policy);
        }
    }
    cp_async_commit();
}

// S: what states are stored as, float or bf16.
template <typename T, typename S = float>
__device__ __forceinline__ void delta_decode(const DeltaDecodeArgs<T>& a) {
    extern __shared__ __align__(16) char matrices[];  // [kRowsOfWarp, kDecodeThreads] of four S
    __shared__ float4 parts[3][32];  // q, k, v behind the convolution; a lane has four channels of each
    __shared__ float4 dots[2][kDecodeWarps][32];
    __shared__ bool last_reader;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = a.heads / a.key_heads;
    const int keys = a.key_heads * kKeys, channels = 2 * keys + a.heads * kKeys;
    S* const fetched = reinterpret_cast<S*>(matrices) + 4 * threadIdx.x;
    const uint64_t policy = a.units <= static_cast<int>(gridDim.x) ? l2_first() : l2_normal();
    Turn turn(blockIdx.x);
    // Nobody writes states between the step's start and this kernel.
    fetch_matrix<S>(a, turn, shared_address(fetched), policy);
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
        fetch_matrix<S>(a, turn, shared_address(fetched), policy);
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
        S* const matrix = static_cast<S*>(a.delta) + matrix_at(item, lane, warp);
#pragma unroll
        for (int i = 0; i < kRowsOfWarp; i++) {
            s[i] = fused(d, k_of[i] * k_norm, scaled(s[i], decay));
            store4_by(matrix + row.id * a.delta_entry + i * kKeys, s[i], policy);
            if (save >= 0) store4(matrix + save * a.delta_entry + i * kKeys, s[i]);
        }
        __syncthreads();  // before the next head's values take the place of this one's in `parts`
    }
}
