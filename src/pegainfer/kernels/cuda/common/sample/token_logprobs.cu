// op token_logprobs: log_softmax of chosen tokens and of the best few, in two launches: each chunk's maximum,
// sum, best candidates and how many precede the target; then one block a row merges them in the chunks'
// order.
#include "arguments.cuh"
#include "sample.cuh"

using namespace sample;

// variant logprob_parts: chunk=4096 block=256
extern "C" __global__ void __launch_bounds__(THREADS) logprob_parts(LogprobArgs a) {
    __shared__ u64 scratch[32];
    __shared__ float sums[32];
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y, v0 = blockIdx.x * CHUNK, wanted = a.top_lens[row];
    if (wanted < 0) return;
    const float* x = a.logits + static_cast<int64_t>(row) * a.columns;
    const int64_t part = static_cast<int64_t>(row) * a.chunks + blockIdx.x;
    float v[EACH];
    u64 best = 0;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int id = v0 + i * THREADS + threadIdx.x;
        v[i] = id < a.vocab ? x[id] : -INFINITY;
        bad |= isnan(v[i]);
        const u64 p = id < a.vocab ? place(v[i], id) : 0;
        best = p > best ? p : best;
    }
    bad = __syncthreads_or(bad);
    const u64 target = place(x[a.targets[row]], a.targets[row]), top = block_max(best, scratch);
    const float peak = place_value(top), base = isinf(peak) ? 0.f : peak;
    float sum = 0;
    int before = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int id = v0 + i * THREADS + threadIdx.x;
        sum += expf(v[i] - base);
        before += id < a.vocab && place(v[i], id) > target;
    }
    sum = block_sum(sum, sums);
    before = block_reduce(before, 0, reinterpret_cast<int*>(sums), [](int p, int q) { return p + q; });
    if (threadIdx.x == 0) a.parts[part] = make_float2(bad ? NAN : peak, sum), a.before[part] = before;
    // The best candidates, one a round; only the thread that held the last one looks for its next.
    u64 found = top;
    for (int j = 0; j < min(wanted, a.k); j++) {
        if (threadIdx.x == 0) a.best[part * a.k + j] = found;
        if (best == found) {
            best = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int id = v0 + i * THREADS + threadIdx.x;
                const u64 p = id < a.vocab ? place(v[i], id) : 0;
                if (p < found && p > best) best = p;
            }
        }
        found = block_max(best, scratch);
    }
}

// variant logprob_merge: block=256
extern "C" __global__ void __launch_bounds__(MAX_CHUNKS) logprob_merge(LogprobArgs a) {
    __shared__ u64 scratch[32];
    __shared__ double sums[32];
    __shared__ float tops[32];
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.x, tid = threadIdx.x, wanted = a.top_lens[row];
    for (int j = tid; j < a.k; j += MAX_CHUNKS)
        a.top_ids[row * a.k + j] = -1, a.top_logprobs[row * a.k + j] = 0;
    __syncthreads();
    if (wanted < 0) {
        if (tid == 0) a.logprobs[row] = 0, a.ranks[row] = 0;
        return;
    }
    const int64_t part = static_cast<int64_t>(row) * a.chunks + tid;
    const bool mine = tid < a.chunks;
    const float2 own = mine ? a.parts[part] : make_float2(-INFINITY, 0.f);
    const bool bad = __syncthreads_or(isnan(own.x));
    const float top = block_reduce(own.x, -INFINITY, tops, [](float p, float q) { return fmaxf(p, q); });
    if (bad || isinf(top) || a.targets[row] >= a.vocab) {
        if (tid == 0) a.logprobs[row] = NAN, a.ranks[row] = 0;
        return;
    }
    // A chunk of -inf alone has been summed against 0: its sum is 0.
    const double share = own.x == -INFINITY ? 0.0 : own.y * exp(static_cast<double>(own.x) - top);
    const double sum = block_reduce(share, 0.0, sums, [](double p, double q) { return p + q; });
    const int before = block_reduce(mine ? a.before[part] : 0, 0, reinterpret_cast<int*>(tops),
                                    [](int p, int q) { return p + q; });
    const double base = static_cast<double>(top) + log(sum);
    if (tid == 0) {
        const int target = a.targets[row];
        a.logprobs[row] = static_cast<float>(a.logits[static_cast<int64_t>(row) * a.columns + target] - base);
        a.ranks[row] = before + 1;
    }
    int next = 0;  // of this thread's chunk
    const int limit = min(wanted, a.k);
    for (int j = 0; j < min(limit, a.vocab); j++) {
        const u64 head = mine && next < limit ? a.best[part * a.k + next] : 0;
        const u64 found = block_max(head, scratch);
        if (found == head && mine) next++;
        if (tid == 0) {
            a.top_ids[row * a.k + j] = place_id(found);
            a.top_logprobs[row * a.k + j] = static_cast<float>(place_value(found) - base);
        }
    }
}
