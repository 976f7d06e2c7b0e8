// The K best experts of a token, by one warp.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace route {

// Numbers in the order of floats, so that one reduction finds the greatest; 0 is below all. -0 equals 0.
__device__ __forceinline__ uint32_t ordered(float v) {
    const uint32_t bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Of this warp's entries: the index of the greatest, of equals the lowest. Each lane offers its own best.
__device__ __forceinline__ int best_of_warp(uint32_t value, int index) {
    const uint32_t most = __reduce_max_sync(~0u, value);
    return static_cast<int>(__reduce_min_sync(~0u, value == most ? static_cast<uint32_t>(index) : ~0u));
}

// Writes scores[e] and rank[e]. Without a bias the logits themselves are the ranks, as equal scores of
// different logits would tie by rounding. NaN ranks last.
__device__ __forceinline__ void score(const Args& a, const float* logits, float* scores, float* rank,
                                      int lane) {
    float most = -INFINITY, sum = 0;
    for (int e = lane; e < a.n; e += 32) {
        rank[e] = __ldcg(logits + e);  // past L1: another block may have written them
        most = fmaxf(most, rank[e]);
    }
    most = warp_max(most);
    for (int e = lane; e < a.n; e += 32) {
        scores[e] = a.sigmoid ? 1.f / (1.f + expf(-rank[e])) : expf(rank[e] - most);
        sum += scores[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < a.n; e += 32) {
        if (!a.sigmoid) scores[e] /= sum;
        const float r = a.bias != nullptr ? scores[e] + a.bias[e] : rank[e];
        rank[e] = isnan(r) ? -INFINITY : r;
    }
    __syncwarp();
}

// A group is as good as its best rank, or with a bias as the sum of its two best.
__device__ __forceinline__ float merit(const Args& a, const float* rank, int each) {
    float first = rank[0], second = -INFINITY;
    for (int i = 1; i < each; i++) {
        second = fmaxf(second, fminf(first, rank[i]));
        first = fmaxf(first, rank[i]);
    }
    return a.bias != nullptr && each > 1 ? first + second : first;
}

// keys[e] = the ordered rank of experts in the kept groups, 0 of others.
__device__ __forceinline__ void open_groups(const Args& a, const float* rank, uint32_t* keys, int lane) {
    const bool all = a.kept_groups >= a.groups;
    const int each = a.n / a.groups;
    for (int e = lane; e < a.n; e += 32) keys[e] = all ? ordered(rank[e]) : 0;
    __syncwarp();
    for (int kept = 0; !all && kept < a.kept_groups; kept++) {
        uint32_t most = 0;
        int index = 0;
        for (int g = lane; g < a.groups; g += 32) {
            const uint32_t key = keys[g * each] ? 0 : ordered(merit(a, rank + g * each, each));
            if (key > most) most = key, index = g;
        }
        const int group = best_of_warp(most, index);
        for (int i = lane; i < each; i += 32) keys[group * each + i] = ordered(rank[group * each + i]);
        __syncwarp();
    }
}

// One of a token's experts, in a lane below K.
struct Chosen {
    int expert;
    float gate;
    int place;  // among the token's choices in ascending order
};

// The place and the gate of each lane's choice, from its score.
__device__ __forceinline__ Chosen weigh(const Args& a, int expert, float score) {
    const int lane = threadIdx.x & 31;
    int place = 0;
    for (int j = 0; j < a.k; j++) place += __shfl_sync(~0u, expert, j) < expert;
    const float own = lane < a.k ? score : 0.f;
    float sum = 0;
    for (int p = 0; a.renormalize && p < a.k; p++) {  // in the order of experts, whatever their scores
        const unsigned who = __ballot_sync(~0u, lane < a.k && place == p);
        sum += __shfl_sync(~0u, own, __ffs(who) - 1);
    }
    return {expert, (a.renormalize ? own / (sum + 1e-20f) : own) * a.scale, place};
}

// Routes one token. K is at most 32: lane j keeps the j-th choice. scores, rank, keys: N each, this warp's.
__device__ __forceinline__ void route_token(const Args& a, int token, float* scores, float* rank,
                                            uint32_t* keys) {
    const int lane = threadIdx.x & 31;
    score(a, a.logits + static_cast<int64_t>(token) * a.n, scores, rank, lane);
    open_groups(a, rank, keys, lane);
    int mine = a.n;
    for (int j = 0; j < a.k; j++) {
        uint32_t most = 0;
        int index = 0;
        for (int e = lane; e < a.n; e += 32)
            if (keys[e] > most) most = keys[e], index = e;
        const int best = best_of_warp(most, index);
        if (lane == j) mine = best;
        if (lane == 0) keys[best] = 0;
        __syncwarp();
    }
    const Chosen chosen = weigh(a, mine, lane < a.k ? scores[mine] : 0.f);
    if (lane < a.k) {
        const int64_t at = static_cast<int64_t>(token) * a.k + chosen.place;
        a.experts[at] = mine;
        a.gates[at] = chosen.gate;
    }
    __syncwarp();
}

// The same in registers, for a router without groups and up to 32 R experts. score: the logits of the lane's
// experts lane, lane + 32 …, and -inf behind the last.
template <int R>
__device__ __forceinline__ Chosen choose(const Args& a, float (&score)[R]) {
    const int lane = threadIdx.x & 31;
    float most = -INFINITY, sum = 0;
    uint32_t keys[R];
#pragma unroll
    for (int r = 0; r < R; r++) most = fmaxf(most, score[r]);
    most = warp_max(most);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int e = r * 32 + lane;
        const float logit = score[r];
        score[r] = a.sigmoid ? 1.f / (1.f + expf(-logit)) : expf(logit - most);
        sum += e < a.n ? score[r] : 0.f;
        float rank = logit;
        if (a.bias != nullptr && e < a.n) rank = score[r] + a.bias[e];
        keys[r] = e < a.n ? ordered(isnan(rank) ? -INFINITY : rank) : 0;
    }
    sum = warp_sum(sum);
    int mine = a.n;
    float own = 0;
    for (int j = 0; j < a.k; j++) {
        uint32_t key = 0;
        int index = 0;
#pragma unroll
        for (int r = 0; r < R; r++)
            if (keys[r] > key) key = keys[r], index = r * 32 + lane;
        const int best = best_of_warp(key, index);
        float of_best = 0;
#pragma unroll
        for (int r = 0; r < R; r++)
            if (r * 32 + lane == best) keys[r] = 0, of_best = score[r];
        of_best = __shfl_sync(~0u, of_best, best & 31);
        if (lane == j) mine = best, own = of_best;
    }
    return weigh(a, mine, a.sigmoid ? own : own / sum);
}

}  // namespace route
