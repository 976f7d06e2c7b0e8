// Products with a matrix of each head, and appending to a cache of latents.
#include <algorithm>
#include <cstring>

#include "exec.h"
#include "multiply.h"

namespace pega {

namespace {

constexpr int64_t kValuesAChunk = 4096;  // less is not worth waking a thread for

// All tiles of one head for a block of tokens, which this thread prepares for itself. phase.a: token blocks.
void run_heads(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const auto a = e.instr(ph).args<HeadLinearArgs>();
    const Scratch& s = e.scratch[static_cast<size_t>(thread)];
    const Packed& w = *a.w;
    const int64_t head = chunk / ph.a, first = chunk % ph.a * kTokensAChunk;
    const int64_t tokens = std::min(kTokensAChunk, a.T - first), more = a.B - a.K;
    const float* x = a.a + (first * a.H + head) * a.B;
    float* out = a.out + (first * a.H + head) * a.A;
    for (int64_t t = 0; t < tokens; t++) {
        if (rounds(e, w)) quantise_row(e, x + t * a.H * a.B, a.K, s.q, t);
        if (halves(e, w)) e.kernels->round_bf16(x + t * a.H * a.B, a.K, s.bf16 + t * even(a.K));
    }
    const Rows rows{x, a.H * a.B, s.q, s.bf16};
    for (int64_t tile = 0; tile < w.tiles; tile++) {
        multiply(e, w, head * w.tiles + tile, rows, 0, tokens, s, s.acc);
        const int64_t wide = std::min<int64_t>(kTile, a.N - tile * kTile);
        for (int64_t t = 0; t < tokens; t++)
            std::memcpy(out + t * a.H * a.A + tile * kTile, s.acc + kTile * t,
                        static_cast<size_t>(wide) * sizeof(float));
    }
    for (int64_t t = 0; t < tokens; t++)
        std::copy_n(x + t * a.H * a.B + a.K, more, out + t * a.H * a.A + a.N);
}

bool plan_heads(Exec& e, const Instr& in) {
    const auto a = in.args<HeadLinearArgs>();
    const int64_t blocks = (a.T + kTokensAChunk - 1) / kTokensAChunk;
    e.add_phase(in, run_heads, a.H * blocks, blocks);
    return true;
}

// phase.a: tokens a chunk.
void run_append(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Instr& in = e.instr(ph);
    const auto a = in.args<LatentAppendArgs>();
    const KvView kv = latent_view(in, a);
    float* const row = e.scratch[static_cast<size_t>(thread)].f32;
    const int64_t last = std::min(a.T, (chunk + 1) * ph.a);
    for (int64_t t = chunk * ph.a; t < last; t++) {
        const float* latent = a.latent + t * a.D;
        e.kernels->rms_norm(row, latent, a.norm, a.K, static_cast<float>(a.eps));
        std::copy_n(latent + a.K, a.B, row + a.K);
        e.kernels->rope(row + a.K, a.cos_sin + a.positions[t] * a.B, a.B);
        uint8_t* to = kv.keys(a.slots[t] / a.S, 0) + a.slots[t] % a.S * a.D * kv.bytes;
        if (kv.bytes == 2) {
            auto* half = reinterpret_cast<uint16_t*>(to);
            for (int64_t d = 0; d < a.D; d++) half[d] = float_to_f16(row[d]);
        } else {
            std::memcpy(to, row, static_cast<size_t>(a.D) * sizeof(float));
        }
    }
}

bool plan_append(Exec& e, const Instr& in) {
    const auto a = in.args<LatentAppendArgs>();
    if (!e.check_indices("latent_append: positions", a.positions, a.T, a.P) ||
        !e.check_indices("latent_append: slots", a.slots, a.T, a.N * a.S))
        return false;
    const int64_t each = std::max<int64_t>(1, kValuesAChunk / a.D);
    e.add_phase(in, run_append, (a.T + each - 1) / each, each);
    return true;
}

}  // namespace

bool plan_latent(Exec& e, const Instr& in) {
    return in.op == kHeadLinear ? plan_heads(e, in) : plan_append(e, in);
}

}  // namespace pega
