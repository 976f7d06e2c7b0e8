// op route_experts: the K best experts of each token in ascending order, and the weights of their results.
//
// A warp takes a token: its scores and ranks lie in shared memory, N floats each. Without a bias the logits
// themselves are the ranks, as equal scores of different logits would tie by rounding. NaN ranks last; of
// equals the lower number wins. K is at most 32: lane j keeps the j-th choice.
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

using route::Args;

namespace {

constexpr int WARPS = 4;

struct Best {
    float value;
    int index;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    if (b.index < 0) return a;
    if (a.index < 0 || b.value > a.value || (b.value == a.value && b.index < a.index)) return b;
    return a;
}

__device__ __forceinline__ Best warp_best(Best b) {
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) {
        const Best other = {__shfl_xor_sync(~0u, b.value, offset), __shfl_xor_sync(~0u, b.index, offset)};
        b = better(b, other);
    }
    return b;
}

// Writes scores[e] and rank[e] of one token.
__device__ __forceinline__ void score(const Args& a, const float* logits, float* scores, float* rank,
                                      int lane) {
    float most = -INFINITY, sum = 0;
    for (int e = lane; e < a.n; e += 32) most = fmaxf(most, logits[e]);
    most = warp_max(most);
    for (int e = lane; e < a.n; e += 32) {
        scores[e] = a.sigmoid ? 1.f / (1.f + expf(-logits[e])) : expf(logits[e] - most);
        sum += scores[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < a.n; e += 32) {
        if (!a.sigmoid) scores[e] /= sum;
        const float r = a.bias != nullptr ? scores[e] + a.bias[e] : logits[e];
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

// Leaves 1 in open[e] for experts of the kept groups, 0 for others.
__device__ __forceinline__ void open_groups(const Args& a, const float* rank, int* open, int lane) {
    const bool all = a.kept_groups >= a.groups;
    const int each = a.n / a.groups;
    for (int e = lane; e < a.n; e += 32) open[e] = all;
    __syncwarp();
    for (int kept = 0; !all && kept < a.kept_groups; kept++) {
        Best best = {0, -1};
        for (int g = lane; g < a.groups; g += 32)
            if (!open[g * each]) best = better(best, {merit(a, rank + g * each, each), g});
        best = warp_best(best);
        for (int i = lane; i < each; i += 32) open[best.index * each + i] = 1;
        __syncwarp();
    }
}

}  // namespace

// variant route_experts: dtype=f32
extern "C" __global__ void __launch_bounds__(WARPS * 32) route_experts(const Args a) {
    extern __shared__ float shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = blockIdx.x * WARPS + warp;
    pdl_wait();
    pdl_launch();
    if (token >= a.tokens) return;
    float *scores = shared + warp * 3 * a.n, *rank = scores + a.n;
    int* open = reinterpret_cast<int*>(rank + a.n);
    score(a, a.logits + static_cast<int64_t>(token) * a.n, scores, rank, lane);
    open_groups(a, rank, open, lane);
    int mine = a.n;  // lane j: the j-th choice
    for (int j = 0; j < a.k; j++) {
        Best best = {0, -1};
        for (int e = lane; e < a.n; e += 32)
            if (open[e]) best = better(best, {rank[e], e});
        best = warp_best(best);
        if (lane == j) mine = best.index;
        if (lane == 0) open[best.index] = 0;
        __syncwarp();
    }
    int place = 0;  // of my choice among the others in ascending order
    for (int j = 0; j < a.k; j++) place += __shfl_sync(~0u, mine, j) < mine;
    const float own = lane < a.k ? scores[mine] : 0.f;
    float sum = 0;
    for (int p = 0; p < a.k; p++) {  // in the order of experts, whatever their scores
        const unsigned who = __ballot_sync(~0u, lane < a.k && place == p);
        sum += __shfl_sync(~0u, own, __ffs(who) - 1);
    }
    if (lane < a.k) {
        const int64_t at = static_cast<int64_t>(token) * a.k + place;
        a.experts[at] = mine;
        a.gates[at] = (a.renormalize ? own / (sum + 1e-20f) : own) * a.scale;
    }
}
