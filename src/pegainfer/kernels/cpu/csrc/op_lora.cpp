// What the tokens' LoRA adapters add to linear layers. Every value is computed by itself, so that no result
// depends on which other tokens are in the step.
#include <algorithm>

#include "exec.h"

namespace pega {

namespace {

constexpr int64_t kValuesAUnit = 16384;  // less is not worth waking a thread for
constexpr int64_t kColumnsAUnit = 512;   // of a token's row, which threads share

const Exec& exec_of(const void* context) {
    return *static_cast<const Exec*>(context);
}

// How many channels a token's adapter has; 0 where it has none.
template <class Args>
int64_t rank_of(const Args& a, int64_t t) {
    const int32_t id = a.adapters[t];
    return id < 0 ? 0 : std::clamp<int64_t>(a.ranks[id], 0, a.X);
}

// phase.a: tokens a unit.
void run_shrink(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<LoraShrinkArgs>();
    for (int64_t t = chunk * p.a; t < std::min(a.T, (chunk + 1) * p.a); t++) {
        const int64_t rank = rank_of(a, t);
        const float* down = a.down + std::max<int64_t>(a.adapters[t], 0) * a.X * a.K;
        float* out = a.out + t * a.X;
        for (int64_t r = 0; r < rank; r++) out[r] = e.kernels->dot(a.a + t * a.K, down + r * a.K, a.K);
        std::fill(out + rank, out + a.X, 0.0f);
    }
}

// phase.a: tokens a unit.
void run_lookup(const void* context, const Phase& p, int64_t chunk, int) {
    const auto a = exec_of(context).instr(p).args<LoraLookupArgs>();
    for (int64_t t = chunk * p.a; t < std::min(a.T, (chunk + 1) * p.a); t++) {
        const int64_t rank = rank_of(a, t);
        const float* row = a.table + (std::max<int64_t>(a.adapters[t], 0) * a.V + a.ids[t]) * a.X;
        float* out = a.out + t * a.X;
        std::copy(row, row + rank, out);
        std::fill(out + rank, out + a.X, 0.0f);
    }
}

// phase.a: tokens a unit, phase.b: units of columns.
void run_expand(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<LoraExpandArgs>();
    const int64_t first = chunk / p.b * p.a, column = chunk % p.b * kColumnsAUnit;
    const int64_t columns = std::min(kColumnsAUnit, a.N - column);
    for (int64_t t = first; t < std::min(a.T, first + p.a); t++) {
        const int64_t rank = rank_of(a, t);
        if (rank == 0) continue;
        const float* up = a.up + a.adapters[t] * a.X * a.N + column;
        e.kernels->add_weighted(a.x + t * a.N + column, a.h + t * a.X, up, a.N, rank, columns);
    }
}

template <class Args>
bool check(Exec& e, const Args& a) {
    return e.check_indices("adapters", a.adapters, a.T, a.A, -1);
}

// Tokens that one unit takes, `values` products each.
int64_t tokens_a_unit(int64_t values) {
    return std::max<int64_t>(1, kValuesAUnit / std::max<int64_t>(1, values));
}

}  // namespace

bool plan_lora(Exec& e, const Instr& in) {
    if (in.op == kLoraShrink) {
        const auto a = in.args<LoraShrinkArgs>();
        const int64_t each = tokens_a_unit(a.X * a.K);
        if (!check(e, a)) return false;
        e.add_phase(in, run_shrink, (a.T + each - 1) / each, each);
        return true;
    }
    if (in.op == kLoraLookup) {
        const auto a = in.args<LoraLookupArgs>();
        const int64_t each = tokens_a_unit(a.X);
        if (!check(e, a) || !e.check_indices("lora_lookup: ids", a.ids, a.T, a.V)) return false;
        e.add_phase(in, run_lookup, (a.T + each - 1) / each, each);
        return true;
    }
    const auto a = in.args<LoraExpandArgs>();
    const int64_t units = (a.N + kColumnsAUnit - 1) / kColumnsAUnit;
    const int64_t each = tokens_a_unit(a.X * std::min(a.N, kColumnsAUnit));
    if (!check(e, a)) return false;
    e.add_phase(in, run_expand, (a.T + each - 1) / each * units, each, units);
    return true;
}

}  // namespace pega
