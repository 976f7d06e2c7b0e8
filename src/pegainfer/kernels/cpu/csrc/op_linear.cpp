// Products with packed weights, and what is fused with them: norm and rounding of the rows before, residual,
// gating, rotation and the cache's append after.
#include <algorithm>

#include "exec.h"
#include "multiply.h"

namespace pega {

namespace {

// What a product reads, whichever op it belongs to.
struct Product {
    const float* x;       // [*, k]
    const int32_t* rows;  // which rows of x; null: 0 … t
    const float* norm;    // weight of an rms_norm over x; null: none
    float eps;
    int64_t t, k;
    const Packed* w[3];
    int num_w;
};

Product product_of(const Instr& in) {
    switch (in.op) {
        case kQkvNormRopeAppend: {
            const auto a = in.args<QkvNormRopeAppendArgs>();
            return {a.x, nullptr, a.norm, static_cast<float>(a.eps), a.T, a.M, {a.wq, a.wk, a.wv}, 3};
        }
        case kGateUpSwiglu: {
            const auto a = in.args<GateUpSwigluArgs>();
            return {a.x, nullptr, a.norm, static_cast<float>(a.eps), a.T, a.M, {a.w_gate, a.w_up}, 2};
        }
        case kLmHead: {
            const auto a = in.args<LmHeadArgs>();
            return {a.x, a.rows, a.norm, static_cast<float>(a.eps), a.L, a.M, {a.w}, 1};
        }
        case kLinearResidual: {
            const auto a = in.args<LinearResidualArgs>();
            return {a.a, nullptr, nullptr, 0, a.T, a.K, {a.w}, 1};
        }
        default: {
            const auto a = in.args<LinearArgs>();
            return {a.a, nullptr, nullptr, 0, a.T, a.K, {a.w}, 1};
        }
    }
}

// Where a product with one weight, which only stores or adds its result, writes it.
float* output_of(const Instr& in) {
    switch (in.op) {
        case kLmHead:
            return in.args<LmHeadArgs>().logits;
        case kLinearResidual:
            return in.args<LinearResidualArgs>().x;
        default:
            return in.args<LinearArgs>().out;
    }
}

// Fills rows first … last of f32, q and bf16, those that some weight needs, from the product's input.
void prepare(const Exec& e, const Product& p, int64_t first, int64_t last, float* f32, const QuantRows& q,
             uint16_t* bf16) {
    bool some_round = false, some_halve = false;
    for (int i = 0; i < p.num_w; i++) {
        some_round = some_round || rounds(e, *p.w[i]);
        some_halve = some_halve || halves(e, *p.w[i]);
    }
    for (int64_t t = first; t < last; t++) {
        const float* x = p.x + (p.rows != nullptr ? p.rows[t] : t) * p.k;
        if (p.norm != nullptr) {
            e.kernels->rms_norm(f32 + t * p.k, x, p.norm, p.k, p.eps);
            x = f32 + t * p.k;
        }
        if (some_round) quantise_row(e, x, p.k, q, t);
        if (some_halve) e.kernels->round_bf16(x, p.k, bf16 + t * even(p.k));
    }
}

void prepare_chunk(const void* context, const Phase& ph, int64_t chunk, int) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Product p = product_of(e.instr(ph));
    prepare(e, p, chunk * ph.a, std::min(p.t, (chunk + 1) * ph.a), const_cast<float*>(e.shared.f32),
            e.shared.q, e.shared.bf16);
}

// The product's rows: prepared by this thread for itself (phase.c), or by all in the phase before.
Rows rows_for(const Exec& e, const Phase& ph, const Product& p, Scratch& s) {
    Rows r = ph.c != 0 ? Rows{s.f32, p.k, s.q, s.bf16} : Rows{e.shared.f32, p.k, e.shared.q, e.shared.bf16};
    if (p.norm == nullptr) r.f32 = p.x;
    if (ph.c != 0 && s.prepared != e.stamp(ph)) {
        prepare(e, p, 0, p.t, s.f32, s.q, s.bf16);
        s.prepared = e.stamp(ph);
    }
    return r;
}

// A chunk's tokens and its share of `units` (tiles or heads); phase.a: units a chunk, phase.b: chunks a
// block of tokens.
struct Share {
    int64_t first, tokens, unit, last_unit;

    Share(const Phase& ph, int64_t chunk, int64_t t, int64_t units)
        : first(chunk / ph.b * kTokensAChunk),
          tokens(std::min(kTokensAChunk, t - first)),
          unit(chunk % ph.b * ph.a),
          last_unit(std::min(units, unit + ph.a)) {}
};

// Tiles of the weight that this rank multiplies by: some of the head's, all of others.
RankShare tiles_of(const Exec& e, const Instr& in, const Packed& w) {
    return in.op == kLmHead ? e.ranks.share(w.tiles, e.ranks.rank) : RankShare{0, w.tiles};
}

void run_linear(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const Product p = product_of(in);
    const Packed& w = *p.w[0];
    float* const output = output_of(in);
    auto& s = const_cast<Scratch&>(e.scratch[static_cast<size_t>(thread)]);
    const Rows r = rows_for(e, ph, p, s);
    const RankShare tiles = tiles_of(e, in, w);
    const Share share(ph, chunk, p.t, tiles.count);
    for (int64_t unit = share.unit; unit < share.last_unit; unit++) {
        const int64_t tile = tiles.first + unit;
        multiply(e, w, tile, r, share.first, share.tokens, s, s.acc);
        const int64_t wide = std::min<int64_t>(kTile, w.n - tile * kTile);
        for (int64_t t = 0; t < share.tokens; t++) {
            float* out = output + (share.first + t) * w.n + tile * kTile;
            if (in.op == kLinearResidual) {
                e.kernels->add(out, s.acc + 16 * t, wide);
            } else {
                std::memcpy(out, s.acc + 16 * t, static_cast<size_t>(wide) * 4);
            }
        }
    }
}

void run_gate_up(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const Product p = product_of(in);
    auto& s = const_cast<Scratch&>(e.scratch[static_cast<size_t>(thread)]);
    const Rows r = rows_for(e, ph, p, s);
    const auto a = in.args<GateUpSwigluArgs>();
    const Share share(ph, chunk, p.t, p.w[0]->tiles);
    float* up = s.acc + kTokensAChunk * kTile;
    for (int64_t tile = share.unit; tile < share.last_unit; tile++) {
        multiply(e, *p.w[0], tile, r, share.first, share.tokens, s, s.acc);
        multiply(e, *p.w[1], tile, r, share.first, share.tokens, s, up);
        const int64_t wide = std::min<int64_t>(kTile, a.F - tile * kTile);
        for (int64_t t = 0; t < share.tokens; t++)
            e.kernels->silu_mul(a.out + (share.first + t) * a.F + tile * kTile, s.acc + 16 * t, up + 16 * t,
                                wide);
    }
}

// Units are heads: H of q, then G of k, then G of v.
void run_qkv(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const Product p = product_of(in);
    const auto a = in.args<QkvNormRopeAppendArgs>();
    const int64_t kv_heads = a.G, d = a.D, heads = a.H, head_tiles = d / kTile;
    auto& s = const_cast<Scratch&>(e.scratch[static_cast<size_t>(thread)]);
    const Rows r = rows_for(e, ph, p, s);
    const KvView kv = kv_view(in, a);
    float* row = s.acc + kTokensAChunk * d;
    int64_t clipped = 0;
    const Share share(ph, chunk, p.t, heads + 2 * kv_heads);
    for (int64_t unit = share.unit; unit < share.last_unit; unit++) {
        const int which = unit < heads ? 0 : unit < heads + kv_heads ? 1 : 2;
        const int64_t head = unit - (which == 0 ? 0 : which == 1 ? heads : heads + kv_heads);
        for (int64_t i = 0; i < head_tiles; i++)
            multiply(e, *p.w[which], head * head_tiles + i, r, share.first, share.tokens, s,
                     s.acc + i * share.tokens * kTile);
        const float* head_norm = which == 0 ? a.q_norm : which == 1 ? a.k_norm : nullptr;
        for (int64_t t = 0; t < share.tokens; t++) {
            const int64_t token = share.first + t;
            float* out = which == 0 ? a.q + (token * heads + head) * d : row;
            for (int64_t i = 0; i < head_tiles; i++)
                std::memcpy(out + 16 * i, s.acc + (i * share.tokens + t) * kTile, kTile * 4);
            if (head_norm != nullptr) e.kernels->rms_norm(out, out, head_norm, d, p.eps);
            if (which != 2) e.kernels->rope(out, a.cos_sin + a.positions[token] * d, d);
            if (which != 0)
                clipped +=
                    kv.append(a.slots[token], head, which == 1 ? row : nullptr, which == 2 ? row : nullptr);
        }
    }
    e.count_clipped(clipped);
}

// Adds the phase that prepares rows (unless each thread does so for itself) and the product's own.
// units: tiles or heads; bytes: of weights a unit.
void add_product(Exec& e, const Instr& in, const Product& p,
                 void (*run)(const void*, const Phase&, int64_t, int), int64_t units, int64_t bytes) {
    const int threads = e.pool->threads();
    bool touches = p.norm != nullptr;
    for (int i = 0; i < p.num_w; i++) touches = touches || rounds(e, *p.w[i]) || halves(e, *p.w[i]);
    const bool alone = touches && p.t * p.k <= e.limits.small;
    if (touches && !alone) {
        const int64_t each = std::max<int64_t>(1, std::min<int64_t>(16, p.t / (4 * threads)));
        e.add_phase(in, prepare_chunk, (p.t + each - 1) / each, each);
    }
    const int64_t token_blocks = (p.t + kTokensAChunk - 1) / kTokensAChunk;
    const int64_t each = units_a_chunk(units, token_blocks, bytes, std::min(p.t, kTokensAChunk), threads);
    const int64_t groups = (units + each - 1) / each;
    e.add_phase(in, run, token_blocks * groups, each, groups, alone ? 1 : 0);
}

}  // namespace

bool plan_linear(Exec& e, const Instr& in) {
    const Product p = product_of(in);
    if (in.op == kQkvNormRopeAppend) {
        const auto a = in.args<QkvNormRopeAppendArgs>();
        if (!e.check_indices("qkv_norm_rope_append: positions", a.positions, a.T, a.P) ||
            !e.check_indices("qkv_norm_rope_append: slots", a.slots, a.T, a.N * a.S))
            return false;
        add_product(e, in, p, run_qkv, a.H + 2 * a.G, p.w[0]->tile_bytes * (a.D / kTile));
        return true;
    }
    if (in.op == kLmHead && !e.check_indices("lm_head: rows", p.rows, p.t, in.args<LmHeadArgs>().T))
        return false;
    if (in.op == kGateUpSwiglu) {
        add_product(e, in, p, run_gate_up, p.w[0]->tiles, 2 * p.w[0]->tile_bytes);
    } else {
        add_product(e, in, p, run_linear, tiles_of(e, in, *p.w[0]).count, p.w[0]->tile_bytes);
    }
    return in.op != kLmHead || e.ranks.count == 1 || plan_gather(e, in);
}

}  // namespace pega
