// From logits to tokens. ops/sample.py and ops/draw.py say what each step computes; results are equal to the
// reference's bit for bit, but for log-probabilities.
#include <algorithm>
#include <cmath>

#include "exec.h"

namespace pega {

namespace {

constexpr float kGreedyBelow = 1.0f / (1 << 20);
constexpr int32_t kOk = 0, kNotFinite = 1, kNothingLeft = 2;

// Runs `one` for each of the L rows, a row a chunk.
template <void (*one)(const Exec&, const Instr&, int64_t, const Scratch&)>
void each_row(const void* context, const Phase& p, int64_t row, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    one(e, e.instr(p), row, e.scratch[static_cast<size_t>(thread)]);
}

// adjust_logits

void drop(float* score) {
    if (*score < INFINITY) *score = -INFINITY;  // NaN and +inf stay, for the draw to report
}

void apply_mask(float* s, int64_t vocab, const uint32_t* mask) {
    for (int64_t word = 0; word * 32 < vocab; word++) {
        if (mask[word] == 0xffffffffu) continue;
        const int64_t bits = std::min<int64_t>(32, vocab - word * 32);
        for (int64_t bit = 0; bit < bits; bit++)
            if ((mask[word] >> bit & 1) == 0) drop(s + word * 32 + bit);
    }
}

void ban_completions(float* s, const AdjustLogitsArgs& a, int64_t row, const int32_t* history,
                     int64_t length) {
    const int64_t first = a.banned_starts[row], count = a.banned_lens[row];
    for (int64_t i = first; i < first + count; i++) {
        const int32_t* seq = a.banned_tokens + a.banned_seq_starts[i];
        const int64_t before = a.banned_seq_lens[i] - 1;
        if (before <= length && std::equal(seq, seq + before, history + length - before))
            drop(s + seq[before]);
    }
}

// seen: [vocab] zeros, left as zeros.
void penalise(float* s, const int32_t* history, int64_t length, int64_t prompt, int64_t vocab,
              float repetition, float frequency, float presence, int32_t* seen) {
    constexpr int32_t kVisited = -1;
    const auto known = [&](int32_t id) { return id >= 0 && id < vocab; };  // others name no logit
    for (int64_t i = prompt; i < length; i++)
        if (known(history[i])) seen[history[i]]++;
    for (int64_t i = 0; i < length; i++) {
        const int32_t id = history[i];
        if (!known(id) || seen[id] == kVisited) continue;
        s[id] = s[id] > 0 ? s[id] / repetition : s[id] * repetition;
        if (seen[id] > 0) {
            s[id] -= frequency * static_cast<float>(seen[id]);
            s[id] -= presence;
        }
        seen[id] = kVisited;
    }
    for (int64_t i = 0; i < length; i++)
        if (known(history[i])) seen[history[i]] = 0;
}

void adjust(const Exec&, const Instr& in, int64_t row, const Scratch& scratch) {
    const auto a = in.args<AdjustLogitsArgs>();
    const auto vocab = static_cast<int64_t>(a.vocab_size);
    float* s = a.scores + row * a.V;
    std::memcpy(s, a.logits + row * a.V, static_cast<size_t>(a.V) * 4);
    const int64_t first = a.bias_starts[row], biases = a.bias_lens[row];
    for (int64_t i = first; i < first + biases; i++) s[a.bias_ids[i]] += a.bias_values[i];
    const int32_t mask = a.mask_rows[row];
    if (mask >= 0) apply_mask(s, vocab, a.masks + mask * a.I);
    const int32_t* history = a.history + a.slots[row] * a.X;
    const int64_t length = a.history_lens[row], prompt = a.prompt_lens[row];
    ban_completions(s, a, row, history, length);
    const float repetition = a.repetition_penalty[row], frequency = a.frequency_penalty[row];
    const float presence = a.presence_penalty[row];
    if (repetition != 1 || frequency != 0 || presence != 0)
        penalise(s, history, length, prompt, vocab, repetition, frequency, presence, scratch.seen);
    std::fill(s + vocab, s + a.V, -INFINITY);
}

// sample_tokens

// Philox4x32-10 with key `seed` and counter (draw, 0, 0, 0): its first two words, low half first.
uint64_t random_fraction(uint64_t seed, uint32_t draw) {
    uint32_t c[4] = {draw, 0, 0, 0}, k[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
                                  static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
        std::copy(next, next + 4, c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    return uint64_t{c[1]} << 32 | c[0];
}

uint64_t share_of(uint64_t total, uint64_t fraction) {
    __extension__ typedef unsigned __int128 Wide;
    return static_cast<uint64_t>(static_cast<Wide>(total) * fraction >> 64);
}

constexpr float kNear = 8;  // nats under the best score, where cuts nearly always fall

// A row's scores and weights, and the last token that may be drawn in the order (score descending, id
// ascending). A cut is looked for among the few tokens near the best one, and among all only if it is not
// there. A histogram over scores leaves no more than one bin to be sorted.
class Draw {
  public:
    Draw(const Kernels& kernels, const float* scores, int64_t vocab, float max, const Scratch& s)
        : kernels_(kernels), scores_(scores), vocab_(vocab), max_(max), weights_(s.weights), ids_(s.ids) {}

    void cut(int64_t top_k, float top_p, float temperature) {
        const bool by_count = top_k > 0 && top_k < vocab_, by_mass = top_p < 1;
        if (!by_count && !by_mass) return;
        const auto share = static_cast<uint64_t>(std::max(static_cast<double>(top_p), 0.0) * 0x1p64);
        uint64_t total = by_count ? 0 : kernels_.sum_weights(weights_, vocab_);
        fill_bins(max_ - kNear * temperature);
        const bool here =
            by_count ? found_ >= top_k : mass_found_ >= std::max<uint64_t>(1, share_of(total, share));
        if (!here) fill_bins(-INFINITY);
        if (by_count) total = cut_count(top_k);
        if (by_mass) cut_mass(std::max<uint64_t>(1, share_of(total, share)));
    }

    // The lowest kept id whose inclusive sum of weights, in id order, exceeds fraction · total / 2^64.
    int32_t pick(float min_p, uint64_t fraction) {
        // At most the best token's weight, so that one is kept.
        const auto least =
            static_cast<uint64_t>(min_p > 0 ? std::min(static_cast<double>(min_p), 1.0) * 0x1p40 : 0);
        return score_ == -INFINITY && least == 0 ? pick_of_all(fraction) : pick_of_kept(least, fraction);
    }

  private:
    static constexpr int kBins = 1024;
    static constexpr int64_t kStride = 256;

    int32_t pick_of_all(uint64_t fraction) const {
        uint64_t left = share_of(kernels_.sum_weights(weights_, vocab_), fraction);
        int64_t i = 0;
        for (;; i += kStride) {
            const uint64_t sum = kernels_.sum_weights(weights_ + i, std::min(kStride, vocab_ - i));
            if (sum > left) break;
            left -= sum;
        }
        for (; weights_[i] <= left; i++) left -= weights_[i];
        return static_cast<int32_t>(i);
    }

    int32_t pick_of_kept(uint64_t least, uint64_t fraction) {
        const int64_t near = kernels_.select_at_least(scores_, vocab_, score_, ids_);
        int64_t kept = 0;
        uint64_t total = 0;
        for (int64_t i = 0; i < near; i++) {
            const int32_t id = ids_[i];
            if (weights_[id] < least || (scores_[id] == score_ && id > id_)) continue;
            ids_[kept++] = id;
            total += weights_[id];
        }
        uint64_t left = share_of(total, fraction);
        int64_t i = 0;
        for (; weights_[ids_[i]] <= left; i++) left -= weights_[ids_[i]];
        return ids_[i];
    }

    int bin_of(int32_t id) const {
        const float y = (max_ - scores_[id]) * bins_a_nat_;
        return y < kBins - 1 ? static_cast<int>(y) : kBins - 1;
    }

    // Bins of the tokens that score at least `least`: best first, the last takes what is far off.
    void fill_bins(float least) {
        bins_a_nat_ = std::min(1e6f, (kBins - 2) / std::min(max_ - least, 64.0f));
        found_ = kernels_.select_at_least(scores_, vocab_, least, ids_);
        mass_found_ = 0;
        std::fill(count_, count_ + kBins, 0);
        std::fill(mass_, mass_ + kBins, 0);
        for (int64_t i = 0; i < found_; i++) {
            const int b = bin_of(ids_[i]);
            count_[b]++;
            mass_[b] += weights_[ids_[i]];
            mass_found_ += weights_[ids_[i]];
        }
    }

    bool before(int32_t a, int32_t b) const {
        return scores_[a] > scores_[b] || (scores_[a] == scores_[b] && a < b);
    }

    // Moves the ids of a bin to the front, in no order.
    int32_t* gather(int bin) {
        return std::partition(ids_, ids_ + found_, [&](int32_t id) { return bin_of(id) == bin; });
    }

    void keep_until(int32_t id) {
        id_ = id;
        score_ = scores_[id];
    }

    // Keeps the k best; returns their weight.
    uint64_t cut_count(int64_t k) {
        uint64_t total = 0;
        int bin = 0;
        for (; k > count_[bin]; bin++) {
            k -= count_[bin];
            total += mass_[bin];
        }
        std::nth_element(ids_, ids_ + k - 1, gather(bin),
                         [this](int32_t a, int32_t b) { return before(a, b); });
        for (int64_t i = 0; i < k; i++) total += weights_[ids_[i]];
        keep_until(ids_[k - 1]);
        return total;
    }

    // Keeps the shortest beginning of the order that weighs `need`.
    void cut_mass(uint64_t need) {
        int bin = 0;
        for (; need > mass_[bin]; bin++) need -= mass_[bin];
        std::sort(ids_, gather(bin), [this](int32_t a, int32_t b) { return before(a, b); });
        int64_t i = 0;
        for (; need > weights_[ids_[i]]; i++) need -= weights_[ids_[i]];
        keep_until(ids_[i]);
    }

    const Kernels& kernels_;
    const float* scores_;
    int64_t vocab_;
    float max_, bins_a_nat_ = 0;
    const uint64_t* weights_;
    int32_t* ids_;  // those at hand, found_ of them
    int64_t found_ = 0;
    uint64_t mass_found_ = 0;
    float score_ = -INFINITY;
    int64_t id_ = INT64_MAX;
    int64_t count_[kBins];
    uint64_t mass_[kBins];
};

void sample(const Exec& e, const Instr& in, int64_t row, const Scratch& scratch) {
    const auto a = in.args<SampleTokensArgs>();
    const auto vocab = static_cast<int64_t>(a.vocab_size);
    const float* s = a.scores + row * a.V;
    const float max = e.kernels->maximum(s, vocab), temperature = a.temperature[row];
    int32_t token = 0, status = kOk;
    if (std::isnan(max) || max == INFINITY) {
        status = kNotFinite;
    } else if (max == -INFINITY) {
        status = kNothingLeft;
    } else if (temperature < kGreedyBelow) {
        token = static_cast<int32_t>(std::find(s, s + vocab, max) - s);
    } else {
        constexpr double kLog2E = 1.4426950408889634;
        const auto cold = static_cast<float>(kLog2E / static_cast<double>(temperature));
        e.kernels->draw_weights(s, vocab, max, cold, scratch.weights);
        Draw draw(*e.kernels, s, vocab, max, scratch);
        draw.cut(a.top_k[row], a.top_p[row], temperature);
        const auto nth = static_cast<uint32_t>(a.draws[row]);
        token = draw.pick(a.min_p[row], random_fraction(a.seeds[row], nth));
    }
    a.tokens[row] = token;
    a.status[row] = status;
}

// token_logprobs

// The k best of `count` ids, in order, into `best`. ids ascend.
void find_best(const float* x, const int32_t* ids, int64_t count, int64_t k, int32_t* best) {
    int64_t n = 0;
    for (int64_t i = 0; i < count && k > 0; i++) {
        const float score = x[ids[i]];
        if (n == k && !(score > x[best[n - 1]])) continue;  // equal to the last: it has the higher id
        int64_t at = n < k ? n++ : n - 1;
        for (; at > 0 && score > x[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = ids[i];
    }
}

void logprob(const Exec& e, const Instr& in, int64_t row, const Scratch& scratch) {
    const auto a = in.args<TokenLogprobsArgs>();
    const auto vocab = static_cast<int64_t>(a.vocab_size);
    const int64_t most = a.K;
    float* logprobs = a.logprobs + row;
    int32_t* rank = a.ranks + row;
    int32_t* top_ids = a.top_ids + row * most;
    float* top_logprobs = a.top_logprobs + row * most;
    const float* x = a.logits + row * a.V;
    const int64_t target = a.targets[row], wanted = a.top_lens[row];
    *logprobs = 0;
    *rank = 0;
    std::fill(top_ids, top_ids + most, -1);
    std::fill(top_logprobs, top_logprobs + most, 0.0f);
    if (wanted < 0) return;
    const float max = e.kernels->maximum(x, vocab);
    if (!std::isfinite(max) || target < 0 || target >= vocab) {
        *logprobs = NAN;
        return;
    }
    const double sum = std::log(static_cast<double>(e.kernels->sum_exp(x, vocab, max)));
    const auto logp = [&](int64_t i) { return static_cast<float>(static_cast<double>(x[i]) - max - sum); };
    int64_t ahead = e.kernels->select_at_least(x, vocab, x[target], scratch.ids);
    for (int64_t i = ahead - 1; i >= 0 && scratch.ids[i] >= target; i--)
        ahead -= x[scratch.ids[i]] == x[target];
    *logprobs = logp(target);
    *rank = static_cast<int32_t>(1 + ahead);
    const int64_t k = std::min({wanted, most, vocab});
    int64_t near = e.kernels->select_at_least(x, vocab, max - kNear, scratch.ids);
    if (near < k) near = e.kernels->select_at_least(x, vocab, -INFINITY, scratch.ids);
    find_best(x, scratch.ids, near, k, top_ids);
    for (int64_t i = 0; i < k; i++) top_logprobs[i] = logp(top_ids[i]);
}

void append(const void* context, const Phase& p, int64_t, int) {
    const auto a = static_cast<const Exec*>(context)->instr(p).args<AppendTokensArgs>();
    for (int64_t row = 0; row < a.L; row++) {
        const int64_t at = a.history_lens[row];
        if (at < a.X) a.history[a.slots[row] * a.X + at] = a.tokens[row];
    }
}

bool check_adjust(Exec& e, const AdjustLogitsArgs& a) {
    for (int64_t row = 0; row < a.L; row++) {
        const int32_t length = a.history_lens[row], prompt = a.prompt_lens[row];
        if (length < 0 || length > a.X || prompt < 0 || prompt > length || a.mask_rows[row] >= a.E)
            return e.fail(
                "adjust_logits: row %lld: expected %d prompt tokens among %d known in %lld, mask %d in %lld",
                static_cast<long long>(row), prompt, length, static_cast<long long>(a.X), a.mask_rows[row],
                static_cast<long long>(a.E));
    }
    if (a.E > 0 && static_cast<double>(a.I) * 32 < a.vocab_size)
        return e.fail("adjust_logits: masks: expected a bit for each of %lld ids, got %lld words",
                      static_cast<long long>(a.vocab_size), static_cast<long long>(a.I));
    for (int64_t i = 0; i < a.O; i++)
        if (a.banned_seq_lens[i] < 1)
            return e.fail("adjust_logits: banned_seq_lens[%lld]: expected at least 1, got %d",
                          static_cast<long long>(i), a.banned_seq_lens[i]);
    return e.check_spans("adjust_logits: biases", a.bias_starts, a.bias_lens, a.L, a.J) &&
           e.check_indices("adjust_logits: bias_ids", a.bias_ids, a.J, a.V) &&
           e.check_spans("adjust_logits: banned sequences of rows", a.banned_starts, a.banned_lens, a.L,
                         a.O) &&
           e.check_spans("adjust_logits: banned sequences", a.banned_seq_starts, a.banned_seq_lens, a.O,
                         a.U) &&
           e.check_indices("adjust_logits: banned_tokens", a.banned_tokens, a.U, a.V) &&
           e.check_indices("adjust_logits: slots", a.slots, a.L, a.Z);
}

}  // namespace

bool plan_sample(Exec& e, const Instr& in) {
    switch (in.op) {
        case kAdjustLogits: {
            const auto a = in.args<AdjustLogitsArgs>();
            if (!check_adjust(e, a)) return false;
            e.add_phase(in, each_row<adjust>, a.L);
            return true;
        }
        case kSampleTokens:
            e.add_phase(in, each_row<sample>, in.args<SampleTokensArgs>().L);
            return true;
        case kTokenLogprobs:
            e.add_phase(in, each_row<logprob>, in.args<TokenLogprobsArgs>().L);
            return true;
        default: {
            const auto a = in.args<AppendTokensArgs>();
            if (!e.check_indices("append_tokens: slots", a.slots, a.L, a.Z)) return false;
            e.add_phase(in, append, a.L > 0 ? 1 : 0);
            return true;
        }
    }
}

}  // namespace pega
