#include "exec.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>

#include "multiply.h"

namespace pega {

namespace {

constexpr int64_t kSmallValues = 8192;  // up to so many values a thread prepares rows for itself: no barrier
constexpr int kPhasesAnInstr = 4;

bool plan(Exec& e, const Instr& in) {
    switch (in.op) {
        case kLinear:
        case kLinearResidual:
        case kQkvNormRopeAppend:
        case kGateUpSwiglu:
        case kLmHead:
            return plan_linear(e, in);
        case kAttention:
        case kLatentAttention:
            return plan_attention(e, in);
        case kHeadLinear:
        case kLatentAppend:
            return plan_latent(e, in);
        case kAdjustLogits:
        case kSampleTokens:
        case kAppendTokens:
        case kTokenLogprobs:
            return plan_sample(e, in);
        case kCausalConvSilu:
        case kGatedDeltaRule:
            return plan_recurrent(e, in);
        case kRouteExperts:
        case kExpertGateUp:
        case kExpertDown:
        case kLocalExperts:
            return plan_moe(e, in);
        case kLoraShrink:
        case kLoraLookup:
        case kLoraExpand:
            return plan_lora(e, in);
        case kReduceResidual:
            return plan_reduce(e, in);
        default:
            return plan_rows(e, in);
    }
}

void grow(int64_t& have, int64_t want) {
    have = std::max(have, want);
}

void widen_rows(Limits& l, int64_t tokens, int64_t width) {
    grow(l.tokens, tokens);
    grow(l.width, width);
}

void widen_slots(Limits& l, int64_t slots, int64_t experts, int64_t width) {
    grow(l.slots, slots);
    grow(l.slot_width, width);
    grow(l.experts, experts);
    grow(l.expert_blocks, most_expert_blocks(slots, experts));
}

// Segments that a split call may have: it is split only where there are few units for the threads.
int64_t most_segments(int threads, int64_t context) {
    return 2 * threads * ((context + kSegment - 1) / kSegment);
}

void widen(Limits& l, const Instr& in, int threads) {
    switch (in.op) {
        case kLinear: {
            const auto a = in.args<LinearArgs>();
            return widen_rows(l, a.T, a.K);
        }
        case kLinearResidual: {
            const auto a = in.args<LinearResidualArgs>();
            return widen_rows(l, a.T, a.K);
        }
        case kGateUpSwiglu: {
            const auto a = in.args<GateUpSwigluArgs>();
            return widen_rows(l, a.T, a.M);
        }
        case kLmHead: {
            const auto a = in.args<LmHeadArgs>();
            return widen_rows(l, a.L, a.M);
        }
        case kQkvNormRopeAppend: {
            const auto a = in.args<QkvNormRopeAppendArgs>();
            grow(l.head_dim, a.D);
            return widen_rows(l, a.T, a.M);
        }
        case kAttention: {
            const auto a = in.args<AttentionArgs>();
            grow(l.tokens, a.T);
            grow(l.head_dim, a.D);
            grow(l.rows, a.R);
            return grow(l.segments, most_segments(threads, a.W * a.S));
        }
        case kLatentAttention: {
            const auto a = in.args<LatentAttentionArgs>();
            grow(l.tokens, a.T);
            grow(l.head_dim, a.K);
            grow(l.rows, a.R);
            return grow(l.segments, most_segments(threads, a.W * a.S));
        }
        case kLatentAppend:
            return grow(l.thread, in.args<LatentAppendArgs>().D);
        case kHeadLinear:
            return grow(l.thread, kTokensAChunk * even(in.args<HeadLinearArgs>().K));
        case kAdjustLogits:
            return grow(l.vocab, in.args<AdjustLogitsArgs>().V);
        case kSampleTokens:
            return grow(l.vocab, in.args<SampleTokensArgs>().V);
        case kTokenLogprobs:
            return grow(l.vocab, in.args<TokenLogprobsArgs>().V);
        case kCausalConvSilu:
            return grow(l.states, in.args<CausalConvSiluArgs>().N);
        case kGatedDeltaRule: {
            const auto a = in.args<GatedDeltaRuleArgs>();
            grow(l.states, a.N);
            if (in.kv_format == kStateBF16) grow(l.state, a.K * a.V);
            return grow(l.width, 2 * a.K);  // q and k of a token
        }
        case kRouteExperts:
            // scores, ranks and marks of a token's experts
            return grow(l.width, 3 * in.args<RouteExpertsArgs>().N);
        case kExpertGateUp: {
            const auto a = in.args<ExpertGateUpArgs>();
            return widen_slots(l, a.T * a.K, a.N, a.M);
        }
        case kExpertDown: {
            const auto a = in.args<ExpertDownArgs>();
            grow(l.slot_results, a.T * a.K * a.M);
            return widen_slots(l, a.T * a.K, a.N, a.F);
        }
        default:
            return;
    }
}

QuantRows quant_rows(Exec& e, int64_t values) {
    const size_t n = static_cast<size_t>(values);
    return {static_cast<int8_t*>(e.allocate(n)), static_cast<float*>(e.allocate(n / kBlock * 4 + 64)),
            static_cast<float*>(e.allocate(n / kBlock * 4 + 64)),
            static_cast<float*>(e.allocate(n / kBlock * 4 + 64))};
}

uint16_t* halves(Exec& e, int64_t n) {
    return static_cast<uint16_t*>(e.allocate(static_cast<size_t>(n) * 2));
}

float* floats(Exec& e, int64_t n) {
    return static_cast<float*>(e.allocate(static_cast<size_t>(n) * 4));
}

// Room for rows in every form; their distances depend on the instruction.
Rows all_rows(Exec& e, int64_t rows, int64_t width) {
    return {floats(e, rows * width), width, quant_rows(e, rows * width), halves(e, rows * (width + 1))};
}

void allocate_scratch(Exec& e) {
    Limits& l = e.limits;
    l.small = std::max(kSmallValues, l.width);
    l.thread = std::max(l.small, l.thread);
    l.acc = std::max<int64_t>(2 * 64 * 16, 64 * l.head_dim) + l.head_dim;
    e.shared = all_rows(e, l.tokens, l.width);
    e.slots.rows = all_rows(e, l.slots, l.slot_width);
    e.slots.results = floats(e, l.slot_results);
    e.slots.order.resize(static_cast<size_t>(l.slots));
    e.slots.starts.resize(static_cast<size_t>(l.experts + 1));
    e.slots.blocks.resize(static_cast<size_t>(l.expert_blocks));
    e.scratch.resize(static_cast<size_t>(e.pool->threads()));
    for (Scratch& s : e.scratch) {
        s = {};
        s.f32 = floats(e, l.thread);
        s.state = floats(e, l.state);
        s.q = quant_rows(e, l.thread);
        s.bf16 = halves(e, 2 * l.thread);  // rows of one value take two
        s.acc = floats(e, l.acc);
        s.decode = floats(e, kDecodeColumns * 16);
        s.scores = floats(e, kMaxQueries * kSegment);
        s.part = floats(e, kMaxQueries * l.head_dim);
        s.total = floats(e, kMaxQueries * l.head_dim);
        const auto vocab = static_cast<size_t>(l.vocab);
        s.seen = static_cast<int32_t*>(e.allocate(4 * vocab));
        std::fill(s.seen, s.seen + vocab, 0);
        s.weights = static_cast<uint64_t*>(e.allocate(8 * vocab));
        s.ids = static_cast<int32_t*>(e.allocate(4 * vocab));
    }
    e.partials = floats(e, l.segments * kMaxQueries * (2 + l.head_dim));
    e.blocks.resize(static_cast<size_t>(l.tokens + l.rows));
    e.named.resize(static_cast<size_t>(l.states));
}

}  // namespace

Exec::~Exec() {
    for (void* p : owned) std::free(p);
}

void* Exec::allocate(size_t bytes) {
    void* p = nullptr;
    // Large blocks come from fresh mappings and take memory only where they are touched.
    if (posix_memalign(&p, 64, bytes + 64) != 0) throw std::bad_alloc();
    owned.push_back(p);
    return p;
}

bool Exec::fail(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(error, sizeof error, format, args);
    va_end(args);
    return false;
}

bool Exec::check_indices(const char* what, const int32_t* index, int64_t count, int64_t limit,
                         int32_t least) {
    // Every layer reads the same positions and slots: once a step is enough.
    for (int i = 0; i < num_checked; i++)
        if (checked[i] == index) return true;
    for (int64_t i = 0; i < count; i++)
        if (index[i] < least || index[i] >= limit)
            return fail("%s[%lld]: expected %d to %lld, got %d", what, static_cast<long long>(i), least,
                        static_cast<long long>(limit - 1), index[i]);
    if (num_checked < 8) checked[num_checked++] = index;
    return true;
}

bool Exec::check_spans(const char* what, const int32_t* starts, const int32_t* lens, int64_t count,
                       int64_t limit) {
    for (int64_t i = 0; i < count; i++)
        if (lens[i] != 0 && (starts[i] < 0 || lens[i] < 0 || int64_t{starts[i]} + lens[i] > limit))
            return fail("%s[%lld]: expected within %lld, got %d entries from %d", what,
                        static_cast<long long>(i), static_cast<long long>(limit), lens[i], starts[i]);
    return true;
}

void Exec::add_phase(const Instr& in, void (*run)(const void*, const Phase&, int64_t, int), int64_t chunks,
                     int64_t a, int64_t b, int64_t c, int64_t d) {
    if (chunks <= 0) return;
    const auto serial = static_cast<int32_t>(phases.size());
    phases.push_back({run, chunks, static_cast<int32_t>(&in - step.data()), serial, a, b, c, d});
}

Exec* exec_create(Pool* pool, const Kernels* kernels, bool int8, bool bf16, const int64_t* program,
                  int64_t count, void* const* table, const int64_t* sizes, int64_t num_sizes, char* error) {
    error[0] = '\0';
    try {
        auto e = std::make_unique<Exec>();
        e->pool = pool;
        e->kernels = kernels;
        e->int8 = int8;
        e->bf16 = bf16 && kernels->gemm_bf16 != nullptr;
        e->program.assign(program, program + count);
        e->table = table;
        if (!find_instructions(e->program, e->words, num_sizes, e->step)) {
            std::snprintf(error, 256, "instruction %zu is malformed", e->step.size());
            return nullptr;
        }
        e->phases.reserve(e->step.size() * kPhasesAnInstr);
        for (const Instr& in : e->step) {
            resolve(in, table, sizes);
            widen(e->limits, in, pool->threads());
        }
        allocate_scratch(*e);
        return e.release();
    } catch (const std::exception& x) {
        std::snprintf(error, 256, "no memory for the executor's scratch: %s", x.what());
        return nullptr;
    }
}

bool exec_run(Exec* e, const int64_t* sizes, int64_t num_sizes, int64_t first, int64_t last,
              int64_t* nanoseconds) {
    (void)num_sizes;
    e->phases.clear();
    e->steps++;
    e->blocks_for = nullptr;
    e->states_for = nullptr;
    e->num_checked = 0;
    const Ranks& ranks = e->ranks;
    if (ranks.base != nullptr) e->sums = ranks.joined(ranks.rank).load();
    for (int64_t i = first; i < last; i++) {
        const Instr& in = e->step[static_cast<size_t>(i)];
        resolve(in, e->table, sizes);
        if (!plan(*e, in)) {
            if (ranks.base != nullptr) ranks.fail(1 + ranks.rank);  // the others wait for its sums
            return false;
        }
    }
    e->pool->run(e->phases.data(), static_cast<int>(e->phases.size()), e, nanoseconds);
    if (ranks.base != nullptr && ranks.failed() != 0) return e->fail("the group of ranks has failed");
    return true;
}

}  // namespace pega
