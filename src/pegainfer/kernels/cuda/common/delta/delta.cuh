// The gated delta rule of one value head (ops/delta.py): S ← e^g S; S ← S + k (β (v - Sᵀ k))ᵀ; out = Sᵀ q.
//
// With S as it was before the token, Sᵀ k and Sᵀ q come from one pass over it:
//   d = β (v - e^g Sᵀ k),   out = e^g Sᵀ q + (k · q) d,   S ← e^g S + k dᵀ.
#pragma once
#include "reduce.cuh"
#include "rows.cuh"

// What a head does with a token before anything is read of its state. LogGates: g and β; Gates: e^g and β.
struct LogGates {
    float log_decay, beta;
};
struct Gates {
    float decay, beta;
};
__device__ __forceinline__ LogGates log_gates(float a, float b, float a_log, float dt_bias) {
    const float dt = a + dt_bias;
    // From 20 on softplus is its argument to the last bit.
    const float step = dt > 20.f ? dt : log1pf(expf(dt));
    return {-expf(a_log) * step, 1.f / (1.f + expf(-b))};
}
template <typename T>
__device__ __forceinline__ LogGates log_gates_of(const DeltaArgs<T>& a, int64_t token, int head) {
    const int64_t at = token * a.gate_stride + head;
    return log_gates(to_f32(a.a[at]), to_f32(a.b[at]), a.a_log[head], a.dt_bias[head]);
}
template <typename T>
__device__ __forceinline__ Gates gates_of(const DeltaArgs<T>& a, int64_t token, int head) {
    const LogGates gates = log_gates_of(a, token, head);
    return {expf(gates.log_decay), gates.beta};
}

template <typename T>
__device__ __forceinline__ const T* query_at(const DeltaArgs<T>& a, int64_t token, int head) {
    const int key_head = a.tiled ? head % a.key_heads : head / (a.heads / a.key_heads);
    return a.qkv + token * a.channels + key_head * a.key_dim;
}
template <typename T>
__device__ __forceinline__ const T* value_at(const DeltaArgs<T>& a, int64_t token, int head) {
    return a.qkv + token * a.channels + 2 * a.key_heads * a.key_dim + head * a.value_dim;
}

// The layer's states, stored as S: float or bf16.
template <typename S, typename T>
__device__ __forceinline__ S* states_of(const DeltaArgs<T>& a) {
    return static_cast<S*>(a.pool);
}

constexpr int kKeys = 128;     // channels of a key head in the kernels for one size
constexpr int kColumns = 32;   // of the state, that a block of them has
constexpr int kThreads = 128;  // of a block

__device__ __forceinline__ float4 scaled(float4 v, float f) {
    return {v.x * f, v.y * f, v.z * f, v.w * f};
}
__device__ __forceinline__ float4 fused(float4 v, float f, float4 sum) {
    return {fmaf(v.x, f, sum.x), fmaf(v.y, f, sum.y), fmaf(v.z, f, sum.z), fmaf(v.w, f, sum.w)};
}
__device__ __forceinline__ float4 sum_over(float4 v, int offset) {
    return {v.x + __shfl_xor_sync(~0u, v.x, offset), v.y + __shfl_xor_sync(~0u, v.y, offset),
            v.z + __shfl_xor_sync(~0u, v.z, offset), v.w + __shfl_xor_sync(~0u, v.w, offset)};
}
template <typename T>
__device__ __forceinline__ float4 load4(const T* p) {
    auto v = load<T, 4>(p);
    return {to_f32(v.v[0]), to_f32(v.v[1]), to_f32(v.v[2]), to_f32(v.v[3])};
}
template <typename T>
__device__ __forceinline__ void store4(T* p, float4 v) {
    Vec<T, 4> to{{from_f32<T>(v.x), from_f32<T>(v.y), from_f32<T>(v.z), from_f32<T>(v.w)}};
    store(p, to);
}

// Rows of one token: a block has kColumns columns of a head's state in registers, reads and writes them once.
// A warp has 32 of the 128 rows; lane l four columns from 4 (l % 8) on, of every fourth row from l / 8 on.
template <typename T, typename S = float>
__device__ __forceinline__ void delta_step(const DeltaArgs<T>& a) {
    __shared__ float q[kKeys], k[kKeys], sums[kThreads / 32][3];
    __shared__ float4 dots[2][kThreads / 32][kColumns / 4];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y;
    const int column = blockIdx.x * kColumns + lane % 8 * 4, first = warp * 32 + lane / 8;
    const Row row = row_at(a.rows, blockIdx.z);
    const bool live = row.count == 1 && row.id >= 0;
    const int64_t at = (static_cast<int64_t>(head) * kKeys + first) * a.value_dim + column;
    S* const pool = states_of<S>(a);
    float4 s[8] = {};
    if (live && !row.fresh)  // nobody writes the state between the step's start and this kernel
#pragma unroll
        for (int i = 0; i < 8; i++)
            s[i] = load4(pool + row.id * a.entry + at + static_cast<int64_t>(4 * i) * a.value_dim);
    pdl_wait();
    pdl_launch();
    if (row.count != 1) return;
    T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * a.value_dim + column;
    const bool writes = warp == 0 && lane < 8;  // of the threads that have the same columns
    if (!live) {
        if (writes) store4(out, float4{});
        return;
    }
    const T* query = query_at(a, row.first, head);
    {
        const float qi = to_f32(query[threadIdx.x]);
        const float ki = to_f32(query[a.key_heads * kKeys + threadIdx.x]);
        q[threadIdx.x] = qi;
        k[threadIdx.x] = ki;
        const float qq = warp_sum(qi * qi), kk = warp_sum(ki * ki), qk = warp_sum(qi * ki);
        if (lane == 0) {
            sums[warp][0] = qq;
            sums[warp][1] = kk;
            sums[warp][2] = qk;
        }
    }
    __syncthreads();
    float4 by_q{}, by_k{};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        by_q = fused(s[i], q[first + 4 * i], by_q);
        by_k = fused(s[i], k[first + 4 * i], by_k);
    }
    by_q = sum_over(sum_over(by_q, 8), 16);
    by_k = sum_over(sum_over(by_k, 8), 16);
    if (lane < 8) {
        dots[0][warp][lane] = by_q;
        dots[1][warp][lane] = by_k;
    }
    __syncthreads();
    float total[3] = {};
    by_q = by_k = float4{};
#pragma unroll
    for (int w = 0; w < kThreads / 32; w++) {
#pragma unroll
        for (int i = 0; i < 3; i++) total[i] += sums[w][i];
        by_q = fused(dots[0][w][lane % 8], 1.f, by_q);
        by_k = fused(dots[1][w][lane % 8], 1.f, by_k);
    }
    const float q_norm = a.scale / sqrtf(total[0] + a.eps), k_norm = 1.f / sqrtf(total[1] + a.eps);
    const Gates g = gates_of(a, row.first, head);
    const float4 v = load4(value_at(a, row.first, head) + column);
    const float4 d = scaled(fused(by_k, -g.decay * k_norm, v), g.beta);
    if (writes) store4(out, fused(d, total[2] * q_norm * k_norm, scaled(by_q, g.decay * q_norm)));
    const int save = a.rows.saves[row.first];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        s[i] = fused(d, k[first + 4 * i] * k_norm, scaled(s[i], g.decay));
        const int64_t place = at + static_cast<int64_t>(4 * i) * a.value_dim;
        store4(pool + row.id * a.entry + place, s[i]);
        if (save >= 0) store4(pool + save * a.entry + place, s[i]);
    }
}

constexpr int kGroup = 16;  // tokens whose q, k and gates a block prepares together

// Rows of several tokens, one token after the other. A warp has eight columns of a head's state to itself, so
// that no token waits for another warp; lane l four columns from 4 (l % 2) on, of every sixteenth row from l
// / 2 on.
template <typename T>
__device__ __forceinline__ void delta_sequence(const DeltaArgs<T>& a) {
    __shared__ float q[kGroup][kKeys], k[kGroup][kKeys];
    __shared__ float products[kGroup];
    __shared__ Gates gates[kGroup];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y;
    const int column = blockIdx.x * kColumns + warp * 8 + lane % 2 * 4, first = lane / 2;
    pdl_wait();
    pdl_launch();
    const Row row = row_at(a.rows, blockIdx.z);
    if (row.count < 2) return;
    T* out = a.out + (static_cast<int64_t>(row.first) * a.heads + head) * a.value_dim + column;
    const int64_t stride = static_cast<int64_t>(a.heads) * a.value_dim;
    if (row.id < 0) {
        for (int t = 0; lane < 2 && t < row.count; t++) store4(out + t * stride, float4{});
        return;
    }
    const int64_t at = (static_cast<int64_t>(head) * kKeys + first) * a.value_dim + column;
    const int64_t step = 16 * static_cast<int64_t>(a.value_dim);
    float* const pool = states_of<float>(a);
    float4 s[8] = {};
    if (!row.fresh)
#pragma unroll
        for (int i = 0; i < 8; i++) s[i] = load4(pool + row.id * a.entry + at + i * step);
    for (int begin = 0; begin < row.count; begin += kGroup) {
        const int count = min(kGroup, row.count - begin);
        __syncthreads();  // all have done with the group before
        for (int t = warp; t < count; t += kThreads / 32) {
            const int64_t token = row.first + begin + t;
            const T* query = query_at(a, token, head);
            const float4 qi = load4(query + 4 * lane), ki = load4(query + a.key_heads * kKeys + 4 * lane);
            const float qq = warp_sum(qi.x * qi.x + qi.y * qi.y + qi.z * qi.z + qi.w * qi.w);
            const float kk = warp_sum(ki.x * ki.x + ki.y * ki.y + ki.z * ki.z + ki.w * ki.w);
            const float qk = warp_sum(qi.x * ki.x + qi.y * ki.y + qi.z * ki.z + qi.w * ki.w);
            const float q_norm = a.scale / sqrtf(qq + a.eps), k_norm = 1.f / sqrtf(kk + a.eps);
            store4(&q[t][4 * lane], scaled(qi, q_norm));
            store4(&k[t][4 * lane], scaled(ki, k_norm));
            if (lane == 0) {
                products[t] = qk * q_norm * k_norm;
                gates[t] = gates_of(a, token, head);
            }
        }
        __syncthreads();
        for (int t = 0; t < count; t++) {
            const int token = row.first + begin + t;
            const float4 v = load4(value_at(a, token, head) + column);
            const int save = a.rows.saves[token];
            float4 by_q{}, by_k{};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                by_q = fused(s[i], q[t][first + 16 * i], by_q);
                by_k = fused(s[i], k[t][first + 16 * i], by_k);
            }
#pragma unroll
            for (int o = 2; o < 32; o *= 2) {
                by_q = sum_over(by_q, o);
                by_k = sum_over(by_k, o);
            }
            const Gates g = gates[t];
            const float4 d = scaled(fused(by_k, -g.decay, v), g.beta);
            if (lane < 2) store4(out + (begin + t) * stride, fused(d, products[t], scaled(by_q, g.decay)));
#pragma unroll
            for (int i = 0; i < 8; i++) s[i] = fused(d, k[t][first + 16 * i], scaled(s[i], g.decay));
            if (save >= 0)
#pragma unroll
                for (int i = 0; i < 8; i++) store4(pool + save * a.entry + at + i * step, s[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) store4(pool + row.id * a.entry + at + i * step, s[i]);
}

// Heads of any size and rows of any length, a column of the state a thread, in memory: the slow form. Dynamic
// shared memory: 2 K floats.
template <typename T>
__device__ __forceinline__ void delta_any(const DeltaArgs<T>& a) {
    extern __shared__ float shared[];
    float *q = shared, *k = shared + a.key_dim;
    const int lane = threadIdx.x, head = blockIdx.y, column = blockIdx.x * 32 + lane;
    pdl_wait();
    pdl_launch();
    const Row row = row_at(a.rows, blockIdx.z);
    const bool mine = column < a.value_dim;
    const int64_t at = static_cast<int64_t>(head) * a.key_dim * a.value_dim + column;
    float *const pool = states_of<float>(a), *const s = pool + row.id * a.entry + at;
    for (int t = 0; t < row.count; t++) {
        const int64_t token = row.first + t;
        T* out = a.out + (token * a.heads + head) * a.value_dim + column;
        if (row.id < 0) {
            if (mine) *out = from_f32<T>(0.f);
            continue;
        }
        const T *query = query_at(a, token, head), *key = query + a.key_heads * a.key_dim;
        float qq = 0, kk = 0, qk = 0;
        for (int i = lane; i < a.key_dim; i += 32) {
            const float qi = to_f32(query[i]), ki = to_f32(key[i]);
            qq += qi * qi;
            kk += ki * ki;
            qk += qi * ki;
        }
        const float q_norm = a.scale / sqrtf(warp_sum(qq) + a.eps),
                    k_norm = 1.f / sqrtf(warp_sum(kk) + a.eps);
        qk = warp_sum(qk) * q_norm * k_norm;
        __syncwarp();
        for (int i = lane; i < a.key_dim; i += 32) {
            q[i] = to_f32(query[i]) * q_norm;
            k[i] = to_f32(key[i]) * k_norm;
        }
        __syncwarp();
        if (!mine) continue;
        const bool zeros = row.fresh && t == 0;
        const Gates g = gates_of(a, token, head);
        float by_q = 0, by_k = 0;
        for (int i = 0; !zeros && i < a.key_dim; i++) {
            const float si = s[static_cast<int64_t>(i) * a.value_dim];
            by_q = fmaf(si, q[i], by_q);
            by_k = fmaf(si, k[i], by_k);
        }
        const float d = g.beta * (to_f32(value_at(a, token, head)[column]) - g.decay * by_k);
        *out = from_f32<T>(g.decay * by_q + qk * d);
        const int save = a.rows.saves[token];
        for (int i = 0; i < a.key_dim; i++) {
            const int64_t place = static_cast<int64_t>(i) * a.value_dim;
            const float si = fmaf(k[i], d, zeros ? 0.f : g.decay * s[place]);
            s[place] = si;
            if (save >= 0) pool[save * a.entry + at + place] = si;
        }
    }
}
