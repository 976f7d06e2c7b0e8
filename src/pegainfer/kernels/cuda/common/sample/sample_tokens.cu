// op sample_tokens: the draw of ops/draw.py, in three launches: the best score of each chunk; weights, summed
// by chunk or, for rows that top_k or top_p cut, counted by bin; then one block a row finds cut and token.
#include "arguments.cuh"
#include "sample.cuh"

using namespace sample;

__device__ __forceinline__ bool is_cut(const SampleArgs& a, int row) {
    return (a.top_k[row] > 0 && a.top_k[row] < a.vocab) || a.top_p[row] < 1.f;
}
__device__ __forceinline__ const float* scores_of(const SampleArgs& a, int row) {
    return (a.plain && a.plain[row] ? a.logits : a.scores) + static_cast<int64_t>(row) * a.columns;
}
__device__ __forceinline__ u64 least_weight(const SampleArgs& a, int row) {
    return static_cast<u64>(static_cast<double>(a.min_p[row]) * 1099511627776.0);
}
// The row's best place; NOT_A_NUMBER wins over all.
__device__ __forceinline__ u64 row_peak(const SampleArgs& a, int row, u64* scratch) {
    u64 best = 0;
    for (int i = threadIdx.x; i < a.chunks; i += blockDim.x) {
        const u64 p = a.peaks[static_cast<int64_t>(row) * a.chunks + i];
        best = p > best ? p : best;
    }
    return block_max(best, scratch);
}

// variant sample_peaks: chunk=4096 block=256
extern "C" __global__ void __launch_bounds__(THREADS) sample_peaks(SampleArgs a) {
    __shared__ u64 scratch[32];
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y, v0 = blockIdx.x * CHUNK, n = min(CHUNK, a.vocab - v0);
    const float* s = scores_of(a, row) + v0;
    u64 best = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const float v = s[i];
        const u64 p = isnan(v) ? NOT_A_NUMBER : place(v, v0 + i);
        best = p > best ? p : best;
    }
    best = block_max(best, scratch);
    if (threadIdx.x == 0) a.peaks[static_cast<int64_t>(row) * a.chunks + blockIdx.x] = best;
    if (!is_cut(a, row)) return;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < BINS; i += a.chunks * THREADS)
        a.bin_weights[row * BINS + i] = 0, a.bin_counts[row * BINS + i] = 0;
}

// variant sample_weigh: chunk=4096 block=256
extern "C" __global__ void __launch_bounds__(THREADS) sample_weigh(SampleArgs a) {
    __shared__ u64 scratch[32], weights[BINS];
    __shared__ uint32_t counts[BINS];
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y, v0 = blockIdx.x * CHUNK, n = min(CHUNK, a.vocab - v0);
    const float temperature = a.temperature[row];
    if (temperature < GREEDY_BELOW) return;
    const u64 peak = row_peak(a, row, scratch);
    if (peak == NOT_A_NUMBER) return;
    const float best = place_value(peak), cold = coldness(temperature);
    if (isinf(best)) return;
    const float* s = scores_of(a, row) + v0;
    if (!is_cut(a, row)) {
        const u64 least = least_weight(a, row);
        u64 sum = 0;
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const u64 w = weight_of(distance(s[i], best, cold));
            sum += w >= least ? w : 0;
        }
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) a.sums[static_cast<int64_t>(row) * a.chunks + blockIdx.x] = sum;
        return;
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) weights[i] = 0, counts[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const float y = distance(s[i], best, cold);
        const u64 w = weight_of(y);
        atomicAdd(&counts[bin_of(y)], 1);
        if (w) atomicAdd(&weights[bin_of(y)], w);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        if (counts[i]) atomicAdd(&a.bin_counts[row * BINS + i], counts[i]);
        if (weights[i]) atomicAdd(&a.bin_weights[row * BINS + i], weights[i]);
    }
}

constexpr int PICK = 1024;  // threads of the last launch
constexpr int EACH_PICK = CHUNK / PICK;
constexpr int LIST = 4096;  // candidates of a bin that fit into shared memory

struct Shared {
    u64 scratch[32];
    u64 list[LIST];  // places
    u64 weights[256];
    uint32_t counts[256];
    u64 sums[MAX_CHUNKS];
    u64 found_weight, found_reached, found_place;
    uint32_t found_count;
    int found, size;
};

// A row as the searches see it.
struct Row {
    const float* scores;
    float best, cold;
    int vocab;
    __device__ __forceinline__ float y(float v) const { return distance(v, best, cold); }
    // visit(score, id) for this thread's share; eight loads are under way at a time.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (int i0 = threadIdx.x; i0 < vocab; i0 += 8 * PICK) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = i0 + i * PICK < vocab ? scores[i0 + i * PICK] : 0.f;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i0 + i * PICK < vocab) visit(v[i], i0 + i * PICK);
        }
    }
};

// One warp finds the digit, from 255 down, at which `reached` plus the digits' own counts or weights gets to
// `need`. All lanes know the result: `reached` and `weight` before that digit, and how many share it.
__device__ __forceinline__ void find_digit(Shared& sh, bool by_weight, u64 need, u64 reached, u64 weight) {
    const int lane = threadIdx.x, top = 255 - lane * 8;
    u64 own[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        own[0] += by_weight ? sh.weights[top - i] : sh.counts[top - i], own[1] += sh.weights[top - i];
    u64 sums[2] = {own[0], own[1]};
#pragma unroll
    for (int o = 1; o < 32; o <<= 1)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u64 below = __shfl_up_sync(~0u, sums[i], o);
            if (lane >= o) sums[i] += below;
        }
    reached += sums[0] - own[0], weight += sums[1] - own[1];
    if (reached >= need || reached + own[0] < need) return;
    for (int digit = top; digit > top - 8; digit--) {
        const u64 step = by_weight ? sh.weights[digit] : sh.counts[digit];
        if (reached + step >= need) {
            sh.found = digit, sh.found_reached = reached, sh.found_weight = weight,
            sh.found_count = sh.counts[digit];
            return;
        }
        reached += step, weight += sh.weights[digit];
    }
}

// The first place in the order (best first) at which the count or the weight of all up to it reaches `need`;
// the weight of all up to it goes to `weight`. `by_weight` says which of the two; need ≥ 1 and is reached.
__device__ u64 find_cut(const SampleArgs& a, const Row& row, int index, bool by_weight, u64 need, u64& weight,
                        Shared& sh) {
    // The bin: bins are in the order of the scores. Two bins a thread.
    u64 w[2], c[2], total;
    for (int i = 0; i < 2; i++) {
        w[i] = a.bin_weights[index * BINS + 2 * threadIdx.x + i];
        c[i] = a.bin_counts[index * BINS + 2 * threadIdx.x + i];
    }
    u64 weight_before = block_exclusive_scan(w[0] + w[1], sh.scratch, total);
    u64 count_before = block_exclusive_scan(c[0] + c[1], sh.scratch, total);
    for (int i = 0; i < 2; i++) {
        const u64 before = by_weight ? weight_before : count_before, own = by_weight ? w[i] : c[i];
        if (before < need && before + own >= need) {
            sh.found = 2 * threadIdx.x + i;
            sh.found_weight = weight_before;
            sh.found_count = static_cast<uint32_t>(count_before);
            sh.size = 0;
        }
        weight_before += w[i], count_before += c[i];
    }
    __syncthreads();
    const int bin = sh.found;
    weight = sh.found_weight;
    u64 reached = by_weight ? weight : sh.found_count;
    // Its members, in any order: in shared memory where they fit, else looked up again in every pass.
    const bool fits = a.bin_counts[index * BINS + bin] <= LIST;
    if (fits) {
        row.each([&](float v, int id) {
            if (bin_of(row.y(v)) == bin) sh.list[atomicAdd(&sh.size, 1)] = place(v, id);
        });
        __syncthreads();
    }
    auto each = [&](auto visit) {
        if (fits) {
            for (int i = threadIdx.x; i < sh.size; i += PICK) visit(sh.list[i]);
        } else {
            row.each([&](float v, int id) {
                if (bin_of(row.y(v)) == bin) visit(place(v, id));
            });
        }
    };
    // Radix selection, eight bits of the place at a time from the top, until one member is left.
    u64 prefix = 0, mask = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        __syncthreads();
        if (threadIdx.x < 256) sh.weights[threadIdx.x] = 0, sh.counts[threadIdx.x] = 0;
        __syncthreads();
        each([&](u64 p) {
            if ((p & mask) != prefix) return;
            const int digit = static_cast<int>(p >> shift & 255);
            const u64 own = weight_of(row.y(place_value(p)));
            atomicAdd(&sh.counts[digit], 1);
            if (own) atomicAdd(&sh.weights[digit], own);
        });
        __syncthreads();
        if (threadIdx.x < 32) find_digit(sh, by_weight, need, reached, weight);
        __syncthreads();
        prefix |= static_cast<u64>(sh.found) << shift;
        mask |= 255ull << shift;
        reached = sh.found_reached, weight = sh.found_weight;
        if (sh.found_count == 1) break;
    }
    each([&](u64 p) {
        if ((p & mask) == prefix) sh.found_place = p;
    });
    __syncthreads();
    const u64 cut = sh.found_place;
    weight += weight_of(row.y(place_value(cut)));
    __syncthreads();
    return cut;
}

// Philox4x32-10: the low 64 bits of the first block for key (seed) and counter (draw, 0, 0, 0).
__device__ __forceinline__ u64 random_fraction(u64 seed, uint32_t draw) {
    uint32_t c0 = draw, c1 = 0, c2 = 0, c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = seed >> 32;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return static_cast<u64>(c1) << 32 | c0;
}

// variant sample_pick: block=1024
extern "C" __global__ void __launch_bounds__(PICK) sample_pick(SampleArgs a) {
    extern __shared__ __align__(16) uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    pdl_wait();
    pdl_launch();
    const int index = blockIdx.x, tid = threadIdx.x;
    const u64 peak = row_peak(a, index, sh.scratch);
    const float best = place_value(peak), temperature = a.temperature[index];
    const int status = peak == NOT_A_NUMBER || best == INFINITY ? 1 : best == -INFINITY ? 2 : 0;
    if (status || temperature < GREEDY_BELOW) {
        if (tid == 0) a.tokens[index] = status ? 0 : place_id(peak), a.status[index] = status;
        return;
    }
    const Row row = {scores_of(a, index), best, coldness(temperature), a.vocab};
    const u64 least = least_weight(a, index);
    u64 cut = 0;  // the last place that is kept
    if (is_cut(a, index)) {
        const int top_k = a.top_k[index];
        u64 total;
        if (top_k > 0 && top_k < a.vocab) {
            cut = find_cut(a, row, index, false, top_k, total, sh);
        } else {
            const u64* w = a.bin_weights + index * BINS + 2 * tid;
            total = block_sum(w[0] + w[1], sh.scratch);
        }
        if (a.top_p[index] < 1.f) {
            const double p = fmax(static_cast<double>(a.top_p[index]), 0.0) * 18446744073709551616.0;
            const u64 need = __umul64hi(static_cast<u64>(p), total);
            u64 ignored;
            cut = find_cut(a, row, index, true, need ? need : 1, ignored, sh);
        }
    }
    auto kept_weight = [&](float v, int id) -> u64 {
        if (place(v, id) < cut) return 0;
        const u64 w = weight_of(row.y(v));
        return w >= least ? w : 0;
    };
    for (int i = tid; i < a.chunks; i += PICK)
        sh.sums[i] = is_cut(a, index) ? 0 : a.sums[static_cast<int64_t>(index) * a.chunks + i];
    __syncthreads();
    if (is_cut(a, index)) {
        row.each([&](float v, int id) {
            const u64 w = kept_weight(v, id);  // few are kept
            if (w) atomicAdd(&sh.sums[id / CHUNK], w);
        });
        __syncthreads();
    }
    // The lowest kept id whose inclusive sum, in id order, exceeds the random fraction of the total.
    if (tid == 0) {
        u64 total = 0, before = 0;
        for (int i = 0; i < a.chunks; i++) total += sh.sums[i];
        const u64 fraction = random_fraction(a.seeds[index], static_cast<uint32_t>(a.draws[index]));
        const u64 threshold = __umul64hi(fraction, total);
        int chunk = 0;
        while (chunk < a.chunks - 1 && before + sh.sums[chunk] <= threshold) before += sh.sums[chunk++];
        sh.found = chunk, sh.found_weight = threshold - before;
    }
    __syncthreads();
    const u64 threshold = sh.found_weight;
    const int id0 = sh.found * CHUNK + tid * EACH_PICK;
    u64 w[EACH_PICK], sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH_PICK; i++) {
        w[i] = id0 + i < a.vocab ? kept_weight(row.scores[id0 + i], id0 + i) : 0;
        sum += w[i];
    }
    u64 before = block_exclusive_scan(sum, sh.scratch, total);
#pragma unroll
    for (int i = 0; i < EACH_PICK; i++) {
        if (before <= threshold && before + w[i] > threshold) a.tokens[index] = id0 + i, a.status[index] = 0;
        before += w[i];
    }
}
