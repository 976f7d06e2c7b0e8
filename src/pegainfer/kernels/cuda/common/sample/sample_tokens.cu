// op sample_tokens: the draw of ops/draw.py, in three launches: the best score of each chunk; weights, summed
// by chunk or, for rows that top_k or top_p cut, counted by bin; then one block a row finds cut and token.
//
// Where ranks have some of the columns each, a launch after the first sends all of them the best score, and
// the last one adds up counts and weights over the ranks. All numbers are whole, so every rank finds the
// token that one rank would.
#include "ranks.cuh"
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
// Columns here that stand for tokens.
__device__ __forceinline__ int own_tokens(const SampleArgs& a) {
    return max(0, min(a.vocab - a.first, a.columns));
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
    const int row = blockIdx.y, v0 = blockIdx.x * CHUNK, n = min(CHUNK, own_tokens(a) - v0);
    const float* s = scores_of(a, row) + v0;
    u64 best = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const float v = s[i];
        const u64 p = isnan(v) ? NOT_A_NUMBER : place(v, a.first + v0 + i);
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
    const int row = blockIdx.y, v0 = blockIdx.x * CHUNK, n = min(CHUNK, own_tokens(a) - v0);
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

// Exchanges words with the other ranks for the row that a block samples.
class Link {
  public:
    // All threads of the block, once a kernel. The launch is counted as a sum is.
    __device__ __forceinline__ explicit Link(ranks::Control* control) : c_(*copied(control)) {
        number_ = c_.joined + 1;
        if (!c_.alone) ranks::count(control, number_);
    }
    // Sends word i and visits those of the others. One thread a word; each word once before `next`.
    template <typename Visit>
    __device__ __forceinline__ void exchange(int i, u64 word, Visit visit) const {
        if (c_.alone) return;
        const auto tag = static_cast<uint32_t>(number_ * STAGES + stage_);
        const uint4 words = {static_cast<uint32_t>(word), tag, static_cast<uint32_t>(word >> 32), tag};
        for (int j = 1; j < c_.count; j++) {
            const int peer = (c_.rank + j) % c_.count;
            store_words(at(peer, c_.rank) + i, words);
        }
        for (int peer = 0; peer < c_.count; peer++) {
            if (peer == c_.rank) continue;
            const uint4* const from = at(c_.rank, peer) + i;
            ranks::Patience patience;
            uint4 w;
            do {
                w = load_words(from);
            } while ((w.y != tag || w.w != tag) && !patience.ends(c_, peer));
            visit(peer, static_cast<u64>(w.z) << 32 | w.x);
        }
    }
    // All threads call it between exchanges.
    __device__ __forceinline__ void next() { stage_++; }
    __device__ __forceinline__ int rank() const { return c_.alone ? 0 : c_.rank; }
    __device__ __forceinline__ int count() const { return c_.alone ? 1 : c_.count; }

  private:
    static constexpr int STAGES = 64;  // of a launch at most, so that no two words have the same tag

    __device__ __forceinline__ uint4* at(int to, int from) const {
        uint4* const slot = ranks::sampled_slot(c_, c_.peers[to].base, number_, from, blockIdx.x);
        return slot + (stage_ & 1) * ranks::WORDS;
    }

    // In shared memory, since registers are short.
    static __device__ __forceinline__ const ranks::Control* copied(const ranks::Control* control) {
        __shared__ ranks::Control copy;
        static_assert(sizeof(copy) % 4 == 0);
        const auto* const from = reinterpret_cast<const uint32_t*>(control);
        for (int i = threadIdx.x; i < static_cast<int>(sizeof(copy) / 4); i += blockDim.x)
            reinterpret_cast<uint32_t*>(&copy)[i] = from[i];
        __syncthreads();  // every thread has read
        return &copy;
    }

    const ranks::Control& c_;
    int64_t number_;
    int stage_ = 0;
};

// Takes the place of Link where one rank has all columns.
class NoLink {
  public:
    __device__ __forceinline__ explicit NoLink(ranks::Control*) {}
    template <typename Visit>
    __device__ __forceinline__ void exchange(int, u64, Visit) const {}
    __device__ __forceinline__ void next() {}
    __device__ __forceinline__ int rank() const { return 0; }
    __device__ __forceinline__ int count() const { return 1; }
};

// Grid: rows from a.start on. Every rank's best place becomes that of all.

// variant sample_meet: block=32
extern "C" __global__ void __launch_bounds__(32) sample_meet(SampleArgs a) {
    __shared__ u64 scratch[32];
    pdl_wait();
    const Link link(static_cast<ranks::Control*>(a.control));
    pdl_launch();
    const int row = a.start + blockIdx.x;
    u64 best = row_peak(a, row, scratch);
    if (threadIdx.x != 0) return;
    link.exchange(0, best, [&](int, u64 theirs) { best = theirs > best ? theirs : best; });
    a.peaks[static_cast<int64_t>(row) * a.chunks] = best;
}

constexpr int PICK = 1024;  // threads of the last launch
constexpr int EACH_PICK = CHUNK / PICK;
constexpr int LIST = 4096;  // candidates of a bin that fit into shared memory

struct Shared {
    u64 scratch[32];
    u64 list[LIST];                 // places
    u64 weights[256], counts[256];  // by digit
    u64 sums[MAX_CHUNKS];
    u64 found_weight, found_reached, found_count;
    int found, size;
};

// Adds up the digits' counts and weights over the ranks. All threads, behind a barrier.
template <typename L>
__device__ __forceinline__ void add_others(L& link, Shared& sh) {
    if (link.count() == 1) return;
    const int i = threadIdx.x;
    static_assert(ranks::WORDS == 512 && PICK >= 512);
    if (i < 512) {
        u64& own = i < 256 ? sh.weights[i] : sh.counts[i - 256];
        u64 sum = own;
        link.exchange(i, own, [&](int, u64 theirs) { sum += theirs; });
        own = sum;
    }
    link.next();
    __syncthreads();
}

// A row as the searches see it.
struct Row {
    const float* scores;
    float best, cold;
    int columns;  // that stand for tokens
    int first;    // id of the first column
    __device__ __forceinline__ float y(float v) const { return distance(v, best, cold); }
    // visit(score, id) for this thread's share; eight loads are under way at a time.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (int i0 = threadIdx.x; i0 < columns; i0 += 8 * PICK) {
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = i0 + i * PICK < columns ? scores[i0 + i * PICK] : 0.f;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i0 + i * PICK < columns) visit(v[i], first + i0 + i * PICK);
        }
    }
};

// One warp finds the digit, from 255 down, at which `reached` plus the digits' own counts or weights gets to
// `need`. It leaves `reached` and `weight` before that digit, and how many share it; where no digit gets
// there, -1 and both behind the last.
__device__ __forceinline__ void find_digit(Shared& sh, bool by_weight, u64 need, u64 reached, u64 weight) {
    const int lane = threadIdx.x, top = 255 - lane * 8;
    if (lane == 0) sh.found = -1;
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
    if (lane == 31) sh.found_reached = reached + own[0], sh.found_weight = weight + own[1];
    __syncwarp();
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

// The bin in which the count or the weight of all up to it reaches `need`, and both before it. Bins are in
// the order of the scores. Ranks add up 256 bins at a time, until it is among them.
__device__ __forceinline__ int find_bin(const SampleArgs& a, int index, bool by_weight, u64 need,
                                        u64& reached, u64& weight, Shared& sh, Link& link) {
    reached = weight = 0;
    for (int base = 0; base < BINS; base += 256) {
        __syncthreads();
        if (threadIdx.x < 256) {
            const int bin = index * BINS + base + 255 - threadIdx.x;
            sh.weights[threadIdx.x] = a.bin_weights[bin], sh.counts[threadIdx.x] = a.bin_counts[bin];
        }
        __syncthreads();
        add_others(link, sh);
        if (threadIdx.x < 32) find_digit(sh, by_weight, need, reached, weight);
        __syncthreads();
        reached = sh.found_reached, weight = sh.found_weight;
        if (sh.found >= 0) return base + 255 - sh.found;
    }
    return 0;  // only where another rank has failed
}

// The same in one pass, two bins a thread.
__device__ __forceinline__ int find_bin(const SampleArgs& a, int index, bool by_weight, u64 need,
                                        u64& reached, u64& weight, Shared& sh, NoLink&) {
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
            sh.found_count = count_before;
        }
        weight_before += w[i], count_before += c[i];
    }
    __syncthreads();
    weight = sh.found_weight;
    reached = by_weight ? weight : sh.found_count;
    return sh.found;
}

// The last token that is kept: its bin, and as many of its place's upper bits as tell it from the bin's
// others.
struct Cut {
    int bin = BINS;
    u64 place = 0;

    __device__ __forceinline__ bool keeps(int of, u64 at) const {
        return of < bin || (of == bin && at >= place);
    }
};

// The first token in the order (best first) at which the count or the weight of all up to it reaches `need`;
// the weight of all up to it goes to `weight`. `by_weight` says which of the two; need ≥ 1 and is reached.
template <typename L>
__device__ Cut find_cut(const SampleArgs& a, const Row& row, int index, bool by_weight, u64 need, u64& weight,
                        Shared& sh, L& link) {
    u64 reached;
    const int bin = find_bin(a, index, by_weight, need, reached, weight, sh, link);
    __syncthreads();
    if (threadIdx.x == 0) sh.size = 0;
    __syncthreads();
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
            atomicAdd(&sh.counts[digit], 1ull);
            if (own) atomicAdd(&sh.weights[digit], own);
        });
        __syncthreads();
        add_others(link, sh);
        if (threadIdx.x < 32) find_digit(sh, by_weight, need, reached, weight);
        __syncthreads();
        if (sh.found < 0) break;  // only where another rank has failed
        prefix |= static_cast<u64>(sh.found) << shift;
        mask |= 255ull << shift;
        reached = sh.found_reached, weight = sh.found_weight;
        if (sh.found_count == 1) break;
    }
    weight += sh.weights[max(sh.found, 0)];  // of the one member that is left
    __syncthreads();
    return {bin, prefix};
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

// In chunk sh.found: the column at which the inclusive sum of weights exceeds sh.found_weight; its id + 1
// goes to sh.size.
template <typename Weight>
__device__ __forceinline__ void find_token(const SampleArgs& a, Shared& sh, Weight weight) {
    const u64 threshold = sh.found_weight;
    const int column = sh.found * CHUNK + threadIdx.x * EACH_PICK;
    u64 w[EACH_PICK], sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH_PICK; i++) {
        w[i] = weight(column + i);
        sum += w[i];
    }
    u64 before = block_exclusive_scan(sum, sh.scratch, total);
#pragma unroll
    for (int i = 0; i < EACH_PICK; i++) {
        if (before <= threshold && before + w[i] > threshold) sh.size = a.first + column + i + 1;
        before += w[i];
    }
}

template <typename L>
__device__ __forceinline__ void pick(const SampleArgs& a) {
    extern __shared__ __align__(16) uint8_t raw[];
    Shared& sh = *reinterpret_cast<Shared*>(raw);
    pdl_wait();
    L link(static_cast<ranks::Control*>(a.control));
    pdl_launch();
    const int index = a.start + blockIdx.x, tid = threadIdx.x;
    const u64 peak = row_peak(a, index, sh.scratch);
    const float best = place_value(peak), temperature = a.temperature[index];
    const int status = peak == NOT_A_NUMBER || best == INFINITY ? 1 : best == -INFINITY ? 2 : 0;
    if (status || temperature < GREEDY_BELOW) {
        if (tid == 0) a.tokens[index] = status ? 0 : place_id(peak), a.status[index] = status;
        return;
    }
    const Row row = {scores_of(a, index), best, coldness(temperature), own_tokens(a), a.first};
    const u64 least = least_weight(a, index);
    Cut cut;
    if (is_cut(a, index)) {
        const int top_k = a.top_k[index];
        u64 total;
        if (top_k > 0 && top_k < a.vocab) {
            cut = find_cut(a, row, index, false, top_k, total, sh, link);
        } else {
            const u64* w = a.bin_weights + index * BINS + 2 * tid;
            total = block_sum(w[0] + w[1], sh.scratch);
            if (tid == 0) {
                link.exchange(0, total, [&](int, u64 theirs) { total += theirs; });
                sh.found_weight = total;
            }
            link.next();
            __syncthreads();
            total = sh.found_weight;
            __syncthreads();
        }
        if (a.top_p[index] < 1.f) {
            const double p = fmax(static_cast<double>(a.top_p[index]), 0.0) * 18446744073709551616.0;
            const u64 need = __umul64hi(static_cast<u64>(p), total);
            u64 ignored;
            cut = find_cut(a, row, index, true, need ? need : 1, ignored, sh, link);
        }
    }
    auto kept_weight = [&](float v, int id) -> u64 {
        const float y = row.y(v);
        if (!cut.keeps(bin_of(y), place(v, id))) return 0;
        const u64 w = weight_of(y);
        return w >= least ? w : 0;
    };
    for (int i = tid; i < a.chunks; i += PICK)
        sh.sums[i] = is_cut(a, index) ? 0 : a.sums[static_cast<int64_t>(index) * a.chunks + i];
    __syncthreads();
    if (is_cut(a, index)) {
        row.each([&](float v, int id) {
            const u64 w = kept_weight(v, id);  // few are kept
            if (w) atomicAdd(&sh.sums[(id - row.first) / CHUNK], w);
        });
        __syncthreads();
    }
    // The lowest kept id whose inclusive sum, in id order, exceeds the random fraction of the total. Ranks
    // have ascending ids, so one of them has it.
    if (tid == 0) {
        u64 own = 0, total, lower = 0, before = 0;
        for (int i = 0; i < a.chunks; i++) own += sh.sums[i];
        total = own;
        link.exchange(0, own, [&](int peer, u64 theirs) {
            total += theirs;
            lower += peer < link.rank() ? theirs : 0;
        });
        const u64 fraction = random_fraction(a.seeds[index], static_cast<uint32_t>(a.draws[index]));
        const u64 threshold = __umul64hi(fraction, total) - lower;  // wraps where a lower rank has it
        int chunk = 0;
        while (chunk < a.chunks - 1 && before + sh.sums[chunk] <= threshold) before += sh.sums[chunk++];
        sh.found = threshold < own ? chunk : -1, sh.found_weight = threshold - before;
        sh.size = 0;
    }
    link.next();
    __syncthreads();
    if (sh.found >= 0)
        find_token(a, sh, [&](int column) {
            return column < row.columns ? kept_weight(row.scores[column], row.first + column) : 0;
        });
    __syncthreads();
    if (tid == 0) {
        u64 token = sh.size;  // id + 1 on the rank that has it, 0 on others
        link.exchange(0, token, [&](int, u64 theirs) { token = theirs > token ? theirs : token; });
        const bool is_id = token > 0 && token <= static_cast<u64>(a.vocab);  // unless a rank has failed
        a.tokens[index] = is_id ? static_cast<int>(token) - 1 : 0, a.status[index] = 0;
    }
}

// variant sample_pick: block=1024
extern "C" __global__ void __launch_bounds__(PICK) sample_pick(SampleArgs a) {
    pick<NoLink>(a);
}
// variant sample_pick_ranks: block=1024
extern "C" __global__ void __launch_bounds__(PICK) sample_pick_ranks(SampleArgs a) {
    pick<Link>(a);
}
