// The recurrent layers: a row's tokens run in order through its state, in place in a pool of states. A unit
// of work is some channels (convolution) or one value head (delta rule) of one row.
#include <algorithm>
#include <cmath>

#include "exec.h"

namespace pega {

namespace {

constexpr int64_t kValuesAChunk = 4096;  // less is not worth waking a thread for
constexpr int64_t kMostTaps = 16;
constexpr int64_t kTokensTogether = 16;  // whose q and k are normalised before the state is touched

// What says where a step's rows and states lie.
struct StepRows {
    const int32_t *ids, *saves, *starts, *lens, *contexts;

    template <class Args>
    explicit StepRows(const Args& a)
        : ids(a.state_ids),
          saves(a.state_saves),
          starts(a.query_starts),
          lens(a.query_lens),
          contexts(a.context_lens) {}

    // Whether the row begins at position 0 and so from zeros.
    bool fresh(int64_t row) const { return contexts[row] == lens[row]; }
};

// Notes that a row or token names a state; false where that is out of the pool or another one named it.
bool name_state(Exec& e, const char* what, int64_t at, int32_t id, int64_t states) {
    if (id < 0) return true;
    if (id >= states)
        return e.fail("%s[%lld]: expected -1 to %lld, got %d", what, static_cast<long long>(at),
                      static_cast<long long>(states - 1), id);
    uint8_t& named = e.named[static_cast<size_t>(id)];
    if (named != 0)
        return e.fail("%s[%lld]: state %d is written twice in one step", what, static_cast<long long>(at),
                      id);
    named = 1;
    return true;
}

// Checks all that addresses memory, once a step.
bool check_rows(Exec& e, const StepRows& r, int64_t rows, int64_t tokens, int64_t states) {
    if (e.states_for == r.ids) return true;
    if (!e.check_spans("query_starts", r.starts, r.lens, rows, tokens)) return false;
    std::fill(e.named.begin(), e.named.begin() + states, uint8_t{0});
    for (int64_t row = 0; row < rows; row++)
        if (!name_state(e, "state_ids", row, r.ids[row], states)) return false;
    for (int64_t t = 0; t < tokens; t++)
        if (!name_state(e, "state_saves", t, r.saves[t], states)) return false;
    e.states_for = r.ids;
    return true;
}

struct Conv {
    float* out;
    float* pool;
    const float *x, *taps;
    StepRows rows;
    int64_t channels, entry, kept, num_taps;  // entry: floats from a state to the next; kept: taps - 1

    explicit Conv(const CausalConvSiluArgs& a)
        : out(a.out),
          pool(a.conv + static_cast<int64_t>(a.layer) * a.X * a.F),
          x(a.x),
          taps(a.taps),
          rows(a),
          channels(a.F),
          entry(a.Y * a.X * a.F),
          kept(a.X),
          num_taps(a.W) {}

    // Input `at` of a row, counted from its first token of this step; negative: of the state, null for zeros.
    const float* input(const float* state, int64_t first, int64_t at, int64_t channel) const {
        if (at >= 0) return x + (first + at) * channels + channel;
        return state == nullptr ? nullptr : state + (kept + at) * channels;
    }

    // Writes n channels of the state as it is after `count` tokens. `to` may be `state`: rows move down in
    // order.
    void write_state(float* to, const float* state, int64_t first, int64_t count, int64_t channel,
                     int64_t n) const {
        for (int64_t i = 0; i < kept; i++, to += channels) {
            const float* from = input(state, first, count - kept + i, channel);
            if (from == nullptr)
                std::fill(to, to + n, 0.0f);
            else if (from != to)
                std::memcpy(to, from, static_cast<size_t>(n) * 4);
        }
    }
};

// phase.a: channels a unit, phase.b: units a row.
void run_conv(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Conv c(e.instr(p).args<CausalConvSiluArgs>());
    const int64_t row = chunk / p.b, channel = chunk % p.b * p.a, n = std::min(p.a, c.channels - channel);
    const int64_t first = c.rows.starts[row], count = c.rows.lens[row], id = c.rows.ids[row];
    if (id < 0 || count == 0) {
        for (int64_t t = first; t < first + count; t++)
            std::fill_n(c.out + t * c.channels + channel, n, 0.0f);
        return;
    }
    float* const own = c.pool + id * c.entry + channel;
    const float* const state = c.rows.fresh(row) ? nullptr : own;
    const float *inputs[kMostTaps], *taps[kMostTaps];
    for (int64_t w = 0; w < c.num_taps; w++) taps[w] = c.taps + w * c.channels + channel;
    for (int64_t t = 0; t < count; t++) {
        for (int64_t w = 0; w < c.num_taps; w++) inputs[w] = c.input(state, first, t - c.kept + w, channel);
        e.kernels->conv_silu(c.out + (first + t) * c.channels + channel, inputs, taps, c.num_taps, n);
        const int64_t save = c.rows.saves[first + t];
        if (save >= 0) c.write_state(c.pool + save * c.entry + channel, state, first, t + 1, channel, n);
    }
    c.write_state(own, state, first, count, channel, n);
}

bool plan_conv(Exec& e, const Instr& in) {
    const auto a = in.args<CausalConvSiluArgs>();
    const Conv c(a);
    const int64_t rows = a.R, tokens = a.T;
    if (c.num_taps > kMostTaps)
        return e.fail("causal_conv_silu: expected at most %lld taps, got %lld",
                      static_cast<long long>(kMostTaps), static_cast<long long>(c.num_taps));
    if (!check_rows(e, c.rows, rows, tokens, a.N)) return false;
    if (rows == 0) return true;
    const int64_t units = 4 * e.pool->threads(), each_row = (units + rows - 1) / rows;
    const int64_t least = kValuesAChunk * rows / std::max(rows, tokens);
    int64_t wide = std::max((c.channels + each_row - 1) / each_row, least);
    wide = (wide + 15) / 16 * 16;
    const int64_t parts = (c.channels + wide - 1) / wide;
    e.add_phase(in, run_conv, rows * parts, wide, parts);
    return true;
}

// A state of float32 or bf16. Computation is in float32; bf16 is rounded to the nearest, ties to even.
struct StoredState {
    float* f32;      // null for bf16
    uint16_t* bf16;  // null for float32
    int64_t count;

    void read(float* to) const {
        for (int64_t i = 0; i < count; i++) to[i] = bf16_to_float(bf16[i]);
    }
    void write(const float* from) const {
        if (f32 != nullptr) {
            std::memcpy(f32, from, static_cast<size_t>(count) * 4);
            return;
        }
        for (int64_t i = 0; i < count; i++) bf16[i] = float_to_bf16(from[i]);
    }
};

struct Delta {
    float* out;
    float* pool;  // of float32 or bf16
    const float *qkv, *a, *b, *a_log, *dt_bias;
    StepRows rows;
    int64_t channels, heads, key_dim, value_dim, entry, keys, layer;  // layer: elements before its own
    float eps;
    bool tiled, narrow;  // narrow: states are bf16

    Delta(const GatedDeltaRuleArgs& args, int32_t format)
        : out(args.out),
          pool(args.delta),
          qkv(args.qkv),
          a(args.a),
          b(args.b),
          a_log(args.a_log),
          dt_bias(args.dt_bias),
          rows(args),
          channels(args.F),
          heads(args.H),
          key_dim(args.K),
          value_dim(args.V),
          entry(args.Y * heads * key_dim * value_dim),
          keys((channels - heads * value_dim) / (2 * key_dim)),
          eps(static_cast<float>(args.eps)),
          tiled(args.tiled != 0),
          narrow(format == kStateBF16),
          layer(static_cast<int64_t>(args.layer) * (entry / args.Y)) {}

    int64_t key_head(int64_t head) const { return tiled ? head % keys : head / (heads / keys); }

    StoredState state(int64_t id, int64_t head) const {
        const int64_t count = key_dim * value_dim, at = layer + id * entry + head * count;
        if (narrow) return {nullptr, reinterpret_cast<uint16_t*>(pool) + at, count};
        return {pool + at, nullptr, count};
    }

    // e^-(e^a_log · softplus(a + dt_bias)). From 20 on softplus is its argument to the last bit.
    float decay(int64_t t, int64_t head) const {
        const float dt = a[t * heads + head] + dt_bias[head];
        return std::exp(-std::exp(a_log[head]) * (dt > 20 ? dt : std::log1p(std::exp(dt))));
    }
    float beta(int64_t t, int64_t head) const { return 1 / (1 + std::exp(-b[t * heads + head])); }
};

// The state of the unit after this one, if that goes on from it; else null.
const float* next_state(const Delta& d, const Phase& p, int64_t chunk) {
    const int64_t row = chunk / d.heads;
    const bool reads = chunk < p.chunks && d.rows.ids[row] >= 0 && !d.rows.fresh(row);
    return reads ? d.state(d.rows.ids[row], chunk % d.heads).f32 : nullptr;
}

void run_delta(const void* context, const Phase& p, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(p);
    const Delta d(in.args<GatedDeltaRuleArgs>(), in.kv_format);
    const int64_t row = chunk / d.heads, head = chunk % d.heads, id = d.rows.ids[row];
    const int64_t first = d.rows.starts[row], last = first + d.rows.lens[row], ldo = d.heads * d.value_dim;
    if (id < 0 || first == last) {
        for (int64_t t = first; t < last; t++)
            std::fill_n(d.out + t * ldo + head * d.value_dim, d.value_dim, 0.0f);
        return;
    }
    const StoredState stored = d.state(id, head);
    const Scratch& scratch = e.scratch[static_cast<size_t>(thread)];
    float* const state = d.narrow ? scratch.state : stored.f32;
    if (d.rows.fresh(row))
        std::fill_n(state, stored.count, 0.0f);
    else if (d.narrow)
        stored.read(state);
    const int64_t together =
        std::min(kTokensTogether, e.limits.small / (2 * d.key_dim));  // whose q and k fit the scratch
    float* const q = scratch.f32;
    float* const k = q + together * d.key_dim;
    const float scale = 1 / std::sqrt(static_cast<float>(d.key_dim));
    float decay[kTokensTogether], beta[kTokensTogether];
    for (int64_t t = first; t < last;) {
        const float* const token = d.qkv + t * d.channels;
        int64_t n = 0;
        int32_t save = -1;
        for (; n < together && t + n < last && save < 0; n++) {  // a state that is saved ends the run
            const float* at = token + n * d.channels + d.key_head(head) * d.key_dim;
            e.kernels->unit(q + n * d.key_dim, at, d.key_dim, d.eps, scale);
            e.kernels->unit(k + n * d.key_dim, at + d.keys * d.key_dim, d.key_dim, d.eps, 1);
            decay[n] = d.decay(t + n, head);
            beta[n] = d.beta(t + n, head);
            save = d.rows.saves[t + n];
        }
        const float* const v = token + 2 * d.keys * d.key_dim + head * d.value_dim;
        e.kernels->delta({state, q, k, decay, beta, v, d.out + t * ldo + head * d.value_dim,
                          t + n == last ? next_state(d, p, chunk + 1) : nullptr, n, d.key_dim, d.value_dim,
                          d.channels, ldo});
        if (save >= 0) d.state(save, head).write(state);
        t += n;
    }
    if (d.narrow) stored.write(state);
}

}  // namespace

bool plan_recurrent(Exec& e, const Instr& in) {
    if (in.op == kCausalConvSilu) return plan_conv(e, in);
    const auto a = in.args<GatedDeltaRuleArgs>();
    if (!check_rows(e, StepRows(a), a.R, a.T, a.N)) return false;
    e.add_phase(in, run_delta, a.R * a.H);
    return true;
}

}  // namespace pega
