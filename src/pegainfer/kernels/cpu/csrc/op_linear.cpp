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
    const int64_t* a = in.axis;
    const auto f32 = [&](int i) { return static_cast<const float*>(in.ptr[i]); };
    const auto weight = [&](int i) { return static_cast<const Packed*>(in.ptr[i]); };
    const auto eps = static_cast<float>(in.attr[0]);
    switch (in.op) {
        case kQkv:
            return {f32(2), nullptr, f32(3), eps, a[0], a[7], {weight(4), weight(5), weight(6)}, 3};
        case kGateUp:
            return {f32(1), nullptr, f32(2), eps, a[0], a[2], {weight(3), weight(4)}, 2};
        case kLmHead:
            return {f32(1), static_cast<const int32_t*>(in.ptr[2]), f32(3), eps, a[0], a[2], {weight(4)}, 1};
        default:
            return {f32(1), nullptr, nullptr, 0, a[0], a[2], {weight(2)}, 1};
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

void run_linear(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const Product p = product_of(in);
    const Packed& w = *p.w[0];
    auto& s = const_cast<Scratch&>(e.scratch[static_cast<size_t>(thread)]);
    const Rows r = rows_for(e, ph, p, s);
    const Share share(ph, chunk, p.t, w.tiles);
    for (int64_t tile = share.unit; tile < share.last_unit; tile++) {
        multiply(e, w, tile, r, share.first, share.tokens, s, s.acc);
        const int64_t wide = std::min<int64_t>(kTile, w.n - tile * kTile);
        for (int64_t t = 0; t < share.tokens; t++) {
            float* out = static_cast<float*>(in.ptr[0]) + (share.first + t) * w.n + tile * kTile;
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
    const int64_t f = p.w[0]->n;
    const Share share(ph, chunk, p.t, p.w[0]->tiles);
    float* up = s.acc + kTokensAChunk * kTile;
    for (int64_t tile = share.unit; tile < share.last_unit; tile++) {
        multiply(e, *p.w[0], tile, r, share.first, share.tokens, s, s.acc);
        multiply(e, *p.w[1], tile, r, share.first, share.tokens, s, up);
        const int64_t wide = std::min<int64_t>(kTile, f - tile * kTile);
        for (int64_t t = 0; t < share.tokens; t++)
            e.kernels->silu_mul(static_cast<float*>(in.ptr[0]) + (share.first + t) * f + tile * kTile,
                                s.acc + 16 * t, up + 16 * t, wide);
    }
}

// Units are heads: H of q, then G of k, then G of v.
void run_qkv(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const Product p = product_of(in);
    const int64_t *a = in.axis, kv_heads = a[3], d = a[5], heads = a[6], head_tiles = d / kTile;
    auto& s = const_cast<Scratch&>(e.scratch[static_cast<size_t>(thread)]);
    const Rows r = rows_for(e, ph, p, s);
    const KvView kv{static_cast<uint8_t*>(in.ptr[1]),
                    a[2],
                    static_cast<int64_t>(in.attr[1]),
                    kv_heads,
                    a[4],
                    d,
                    in.f16_state ? 2 : 4};
    const auto* positions = static_cast<const int32_t*>(in.ptr[7]);
    const auto* slots = static_cast<const int32_t*>(in.ptr[8]);
    const auto* cos_sin = static_cast<const float*>(in.ptr[9]);
    float* row = s.acc + kTokensAChunk * d;
    const Share share(ph, chunk, p.t, heads + 2 * kv_heads);
    for (int64_t unit = share.unit; unit < share.last_unit; unit++) {
        const int which = unit < heads ? 0 : unit < heads + kv_heads ? 1 : 2;
        const int64_t head = unit - (which == 0 ? 0 : which == 1 ? heads : heads + kv_heads);
        for (int64_t i = 0; i < head_tiles; i++)
            multiply(e, *p.w[which], head * head_tiles + i, r, share.first, share.tokens, s,
                     s.acc + i * share.tokens * kTile);
        const auto* head_norm = static_cast<const float*>(which == 2 ? nullptr : in.ptr[10 + which]);
        for (int64_t t = 0; t < share.tokens; t++) {
            const int64_t token = share.first + t;
            float* out = which == 0 ? static_cast<float*>(in.ptr[0]) + (token * heads + head) * d : row;
            for (int64_t i = 0; i < head_tiles; i++)
                std::memcpy(out + 16 * i, s.acc + (i * share.tokens + t) * kTile, kTile * 4);
            if (head_norm != nullptr) e.kernels->rms_norm(out, out, head_norm, d, p.eps);
            if (which != 2) e.kernels->rope(out, cos_sin + positions[token] * d, d);
            if (which != 0)
                kv.append(slots[token], head, which == 1 ? row : nullptr, which == 2 ? row : nullptr);
        }
    }
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
    const int64_t* a = in.axis;
    if (in.op == kQkv) {
        if (!e.check_indices("qkv_norm_rope_append: positions", static_cast<const int32_t*>(in.ptr[7]), a[0],
                             a[8]) ||
            !e.check_indices("qkv_norm_rope_append: slots", static_cast<const int32_t*>(in.ptr[8]), a[0],
                             a[1] * a[4]))
            return false;
        add_product(e, in, p, run_qkv, a[6] + 2 * a[3], p.w[0]->tile_bytes * (a[5] / kTile));
        return true;
    }
    if (in.op == kLmHead && !e.check_indices("lm_head: rows", p.rows, a[0], a[3])) return false;
    if (in.op == kGateUp) {
        add_product(e, in, p, run_gate_up, p.w[0]->tiles, 2 * p.w[0]->tile_bytes);
    } else {
        add_product(e, in, p, run_linear, p.w[0]->tiles, p.w[0]->tile_bytes);
    }
    return true;
}

}  // namespace pega
