// Mixture of experts: the router's choice, and products with the matrices of the chosen experts.
//
// A slot is one of a token's K places for an expert. Slots are sorted by expert, so that each expert's matrix
// is streamed once for up to 64 of them, and an expert that no token chose is not touched. How many blocks of
// slots there are is known only when the router has run: chunks are planned for the most, and those without a
// block end at once. Each slot's result is by itself and a token's are added up in the order of its slots, so
// that neither other tokens nor the threads change it.
#include <cmath>
#include <limits>

#include "multiply.h"

namespace pega {

namespace {

constexpr int64_t kValuesAChunk = 4096;  // less is not worth waking a thread for

struct Router {
    bool sigmoid, renormalize, has_bias;
    float scale;
    int64_t experts, chosen, groups, kept_groups;

    explicit Router(const RouteExpertsArgs& a)
        : sigmoid(a.sigmoid != 0),
          renormalize(a.renormalize != 0),
          has_bias(a.bias != nullptr),
          scale(static_cast<float>(a.scale)),
          experts(a.N),
          chosen(a.K),
          groups(static_cast<int64_t>(a.groups)),
          kept_groups(static_cast<int64_t>(a.kept_groups)) {}
};

// The greatest of n values among those that are marked open; the first of equals.
int64_t best_open(const float* value, const float* open, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (open[i] != 0 && (best < 0 || value[i] > value[best])) best = i;
    return best;
}

// A group's merit: its best rank, or with a bias the sum of its two best.
float merit(const Router& r, const float* rank, int64_t each) {
    float first = rank[0], second = -std::numeric_limits<float>::infinity();
    for (int64_t i = 1; i < each; i++) {
        second = std::max(second, std::min(first, rank[i]));
        first = std::max(first, rank[i]);
    }
    return r.has_bias && each > 1 ? first + second : first;
}

// open[e] = whether expert e is in one of the kept groups.
void open_groups(const Router& r, const float* rank, float* open) {
    const int64_t each = r.experts / r.groups;
    std::fill(open, open + r.experts, r.kept_groups < r.groups ? 0.0f : 1.0f);
    for (int64_t kept = 0; r.kept_groups < r.groups && kept < r.kept_groups; kept++) {
        int64_t best = -1;
        float most = 0;
        for (int64_t g = 0; g < r.groups; g++) {
            if (open[g * each] != 0) continue;
            const float here = merit(r, rank + g * each, each);
            if (best < 0 || here > most) best = g, most = here;
        }
        std::fill(open + best * each, open + (best + 1) * each, 1.0f);
    }
}

void score(const Router& r, const float* logits, float* scores) {
    if (r.sigmoid) {
        for (int64_t i = 0; i < r.experts; i++) scores[i] = 1 / (1 + std::exp(-logits[i]));
        return;
    }
    float most = logits[0], sum = 0;
    for (int64_t i = 1; i < r.experts; i++) most = std::max(most, logits[i]);
    for (int64_t i = 0; i < r.experts; i++) sum += scores[i] = std::exp(logits[i] - most);
    for (int64_t i = 0; i < r.experts; i++) scores[i] /= sum;  // a NaN among the logits is now in all of them
}

void route_row(const Router& r, const float* logits, const float* bias, int32_t* experts, float* gates,
               float* scratch) {
    float *scores = scratch, *rank = scratch + r.experts, *open = scratch + 2 * r.experts;
    score(r, logits, scores);
    for (int64_t i = 0; i < r.experts; i++) {
        rank[i] = r.has_bias ? scores[i] + bias[i] : logits[i];
        if (std::isnan(rank[i])) rank[i] = -std::numeric_limits<float>::infinity();
    }
    open_groups(r, rank, open);
    for (int64_t j = 0; j < r.chosen; j++) {
        const int64_t best = best_open(rank, open, r.experts);
        open[best] = 0;
        experts[j] = static_cast<int32_t>(best);
    }
    std::sort(experts, experts + r.chosen);
    float sum = 0;
    for (int64_t j = 0; j < r.chosen; j++) sum += gates[j] = scores[experts[j]];
    for (int64_t j = 0; j < r.chosen; j++)
        gates[j] = (r.renormalize ? gates[j] / (sum + 1e-20f) : gates[j]) * r.scale;
}

// phase.a: tokens a chunk.
void run_route(const void* context, const Phase& p, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const auto a = e.instr(p).args<RouteExpertsArgs>();
    const Router r(a);
    float* scratch = e.scratch[static_cast<size_t>(thread)].f32;
    const int64_t last = std::min(a.T, (chunk + 1) * p.a);
    for (int64_t t = chunk * p.a; t < last; t++)
        route_row(r, a.logits + t * r.experts, a.bias, a.experts + t * r.chosen, a.gates + t * r.chosen,
                  scratch);
}

bool plan_route(Exec& e, const Instr& in) {
    const auto a = in.args<RouteExpertsArgs>();
    const Router r(a);
    const bool divides = r.groups >= 1 && r.experts % r.groups == 0;
    const bool kept = r.kept_groups >= 1 && r.kept_groups <= r.groups;
    if (!divides || !kept || r.chosen > r.kept_groups * (r.experts / r.groups))
        return e.fail(
            "route_experts: expected groups that divide %lld experts and keep at least %lld, "
            "got %lld of %lld groups",
            static_cast<long long>(r.experts), static_cast<long long>(r.chosen),
            static_cast<long long>(r.kept_groups), static_cast<long long>(r.groups));
    const int64_t each = std::max<int64_t>(1, kValuesAChunk / (r.experts * (r.chosen + 1)));
    e.add_phase(in, run_route, (a.T + each - 1) / each, each);
    return true;
}

void run_local(const void* context, const Phase& p, int64_t, int) {
    const auto a = static_cast<const Exec*>(context)->instr(p).args<LocalExpertsArgs>();
    const auto first = static_cast<int32_t>(a.first), count = static_cast<int32_t>(a.count);
    for (int64_t i = 0; i < a.T * a.K; i++) {
        const int32_t at = a.experts[i] - first;
        a.local[i] = at >= 0 && at < count ? at : -1;
    }
}

// expert_gate_up and expert_down: [slots] inputs of width k, weights [experts, n, k].
struct Grouped {
    float* out;
    const float* x;
    const int32_t* experts;  // [slots]
    const float* gates;      // [slots], of expert_down
    int64_t tokens, chosen, num_experts, n, k;
    const Packed* w[2];
    int num_w;

    int64_t num_slots() const { return tokens * chosen; }
    bool has_expert(int64_t slot) const { return experts[slot] >= 0 && experts[slot] < num_experts; }
    // The input of a slot: its token's row, or its own.
    const float* input(int64_t slot) const { return x + (num_w == 2 ? slot / chosen : slot) * k; }
};

Grouped grouped(const Instr& in) {
    if (in.op == kExpertGateUp) {
        const auto a = in.args<ExpertGateUpArgs>();
        return {a.act, a.h, a.experts, nullptr, a.T, a.K, a.N, a.F, a.M, {a.w_gate, a.w_up}, 2};
    }
    const auto a = in.args<ExpertDownArgs>();
    return {a.out, a.act, a.experts, a.gates, a.T, a.K, a.N, a.M, a.F, {a.w_down}, 1};
}

// Sorts the slots by expert and cuts each expert's into blocks. One chunk.
void run_group(const void* context, const Phase& p, int64_t, int) {
    const Exec& e = *static_cast<const Exec*>(context);
    auto& s = const_cast<ExpertSlots&>(e.slots);
    const Instr& in = e.instr(p);
    const Grouped g = grouped(in);
    int32_t* const starts = s.starts.data();
    std::fill(starts, starts + g.num_experts + 1, 0);
    for (int64_t i = 0; i < g.num_slots(); i++)
        if (g.has_expert(i)) starts[g.experts[i] + 1]++;
    s.num_blocks = 0;
    for (int64_t x = 0; x < g.num_experts; x++) {
        const int32_t count = starts[x + 1], first = starts[x];
        for (int32_t at = 0; at < count; at += kTokensAChunk) {
            const int32_t some = std::min<int32_t>(count - at, kTokensAChunk);
            s.blocks[static_cast<size_t>(s.num_blocks++)] = {static_cast<int32_t>(x), first + at, some};
        }
        starts[x + 1] += first;
    }
    s.num_slots = starts[g.num_experts];
    for (int64_t i = 0; i < g.num_slots(); i++) {
        if (g.has_expert(i)) {
            s.order[static_cast<size_t>(starts[g.experts[i]]++)] = static_cast<int32_t>(i);
        } else if (in.op == kExpertGateUp) {
            std::fill_n(g.out + i * g.n, g.n, 0.0f);
        }
    }
}

// Prepares the inputs of slots in their order. phase.a: slots a chunk.
void run_prepare(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Grouped g = grouped(e.instr(p));
    const Rows& r = e.slots.rows;
    bool some_round = false, some_halve = false, some_plain = false;
    for (int i = 0; i < g.num_w; i++) {
        some_round = some_round || rounds(e, *g.w[i]);
        some_halve = some_halve || halves(e, *g.w[i]);
        some_plain = some_plain || !(rounds(e, *g.w[i]) || halves(e, *g.w[i]));
    }
    const int64_t last = std::min(e.slots.num_slots, (chunk + 1) * p.a);
    for (int64_t i = chunk * p.a; i < last; i++) {
        const float* x = g.input(e.slots.order[static_cast<size_t>(i)]);
        if (some_round) quantise_row(e, x, g.k, r.q, i);
        if (some_halve) e.kernels->round_bf16(x, g.k, r.bf16 + i * even(g.k));
        if (some_plain)
            std::memcpy(const_cast<float*>(r.f32) + i * g.k, x, static_cast<size_t>(g.k) * sizeof(float));
    }
}

// Some tiles of one expert for one block of its slots. phase.a: tiles a chunk, phase.b: chunks a block.
void run_experts(const void* context, const Phase& p, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    if (chunk / p.b >= e.slots.num_blocks) return;
    const Instr& in = e.instr(p);
    const Grouped g = grouped(in);
    const ExpertBlock block = e.slots.blocks[static_cast<size_t>(chunk / p.b)];
    const int32_t* slots = e.slots.order.data() + block.first;
    const Rows rows{e.slots.rows.f32, g.k, e.slots.rows.q, e.slots.rows.bf16};
    const Scratch& s = e.scratch[static_cast<size_t>(thread)];
    float* const up = s.acc + kTokensAChunk * kTile;
    float* const out = in.op == kExpertGateUp ? g.out : e.slots.results;
    const int64_t tiles = g.w[0]->tiles, first = chunk % p.b * p.a, last = std::min(tiles, first + p.a);
    for (int64_t tile = first; tile < last; tile++) {
        const int64_t at = block.expert * tiles + tile, wide = std::min<int64_t>(kTile, g.n - tile * kTile);
        multiply(e, *g.w[0], at, rows, block.first, block.count, s, s.acc);
        if (g.num_w == 2) multiply(e, *g.w[1], at, rows, block.first, block.count, s, up);
        for (int64_t i = 0; i < block.count; i++) {
            float* to = out + slots[i] * g.n + tile * kTile;
            if (g.num_w == 2) {
                e.kernels->silu_mul(to, s.acc + kTile * i, up + kTile * i, wide);
            } else {
                std::memcpy(to, s.acc + kTile * i, static_cast<size_t>(wide) * sizeof(float));
            }
        }
    }
}

// out[t] = sum over a token's slots, in order, of gate · result. phase.a: tokens a chunk.
void run_sum(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Grouped g = grouped(e.instr(p));
    const int64_t last = std::min(g.tokens, (chunk + 1) * p.a);
    for (int64_t t = chunk * p.a; t < last; t++) {
        float* out = g.out + t * g.n;
        std::fill_n(out, g.n, 0.0f);
        for (int64_t slot = t * g.chosen; slot < (t + 1) * g.chosen; slot++) {
            if (!g.has_expert(slot)) continue;
            const float gate = g.gates[slot], *result = e.slots.results + slot * g.n;
            for (int64_t i = 0; i < g.n; i++) out[i] += gate * result[i];
        }
    }
}

bool plan_experts(Exec& e, const Instr& in) {
    const Grouped g = grouped(in);
    const int threads = e.pool->threads();
    const int64_t slots = g.num_slots(), blocks = most_expert_blocks(slots, g.num_experts);
    if (slots == 0) return true;
    e.add_phase(in, run_group, 1);
    const int64_t rows = std::max<int64_t>(1, std::min<int64_t>(16, slots / (4 * threads)));
    e.add_phase(in, run_prepare, (slots + rows - 1) / rows, rows);
    const int64_t tiles = g.w[0]->tiles,
                  tokens = std::min<int64_t>(kTokensAChunk, (slots + blocks - 1) / blocks);
    const int64_t each = units_a_chunk(tiles, blocks, g.num_w * g.w[0]->tile_bytes, tokens, threads);
    const int64_t parts = (tiles + each - 1) / each;
    e.add_phase(in, run_experts, blocks * parts, each, parts);
    if (in.op == kExpertDown) {
        const int64_t some = std::max<int64_t>(1, kValuesAChunk / (g.n * g.chosen));
        e.add_phase(in, run_sum, (g.tokens + some - 1) / some, some);
    }
    return true;
}

}  // namespace

bool plan_moe(Exec& e, const Instr& in) {
    if (in.op == kLocalExperts) {
        e.add_phase(in, run_local, 1);
        return true;
    }
    return in.op == kRouteExperts ? plan_route(e, in) : plan_experts(e, in);
}

}  // namespace pega
