// Ops that work row by row: lookups, norms, rotation, gating, and appending to the cache.
#include <algorithm>
#include <cmath>

#include <cmath>

#include "exec.h"
#include "pack.h"

namespace pega {

namespace {

constexpr int64_t kValuesAChunk = 4096;  // less is not worth waking a thread for

const Exec& exec_of(const void* context) {
    return *static_cast<const Exec*>(context);
}

// Runs `one(exec, instruction, row)` for each row of a chunk; phase.a: rows a chunk, phase.b: rows.
template <void (*one)(const Exec&, const Instr&, int64_t)>
void each_row(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const int64_t last = std::min(p.b, (chunk + 1) * p.a);
    for (int64_t row = chunk * p.a; row < last; row++) one(e, e.instr(p), row);
}

template <void (*one)(const Exec&, const Instr&, int64_t)>
bool by_rows(Exec& e, const Instr& in, int64_t rows, int64_t width) {
    const int64_t least = std::max<int64_t>(1, kValuesAChunk / std::max<int64_t>(1, width));
    const int64_t each = std::max(least, (rows + 4 * e.pool->threads() - 1) / (4 * e.pool->threads()));
    e.add_phase(in, each_row<one>, (rows + each - 1) / each, each, rows);
    return true;
}

void embed(const Exec&, const Instr& in, int64_t t) {
    const auto a = in.args<EmbeddingArgs>();
    unpack_row(*a.table, a.ids[t], a.out + t * a.M);
}

void gather(const Exec&, const Instr& in, int64_t l) {
    const auto a = in.args<GatherRowsArgs>();
    std::memcpy(a.out + l * a.M, a.x + a.rows[l] * a.M, static_cast<size_t>(a.M) * 4);
}

void norm(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<RmsNormArgs>();
    e.kernels->rms_norm(a.out + t * a.M, a.x + t * a.M, a.weight, a.M, static_cast<float>(a.eps));
}

// rows are heads of tokens
void head_norm(const Exec& e, const Instr& in, int64_t i) {
    const auto a = in.args<HeadNormArgs>();
    float* x = a.x + i * a.D;
    e.kernels->rms_norm(x, x, a.weight, a.D, static_cast<float>(a.eps));
}

void rotate(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<RopeArgs>();
    const float* cos_sin = a.cos_sin + a.positions[t] * a.D;
    for (int64_t h = 0; h < a.H; h++) e.kernels->rope(a.x + (t * a.H + h) * a.D, cos_sin, a.D);
}

void rotate_tail(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<RopeTailArgs>();
    const float* cos_sin = a.cos_sin + a.positions[t] * a.B;
    for (int64_t h = 0; h < a.H; h++) e.kernels->rope(a.x + (t * a.H + h + 1) * a.D - a.B, cos_sin, a.B);
}

void append(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<KvAppendArgs>();
    const KvView kv = kv_view(in, a);
    int64_t clipped = 0;
    for (int64_t g = 0; g < a.G; g++) {
        const int64_t at = (t * a.G + g) * a.D;
        clipped += kv.append(a.slots[t], g, a.k + at, a.v + at);
    }
    e.count_clipped(clipped);
}

void gate(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<SiluMulArgs>();
    e.kernels->silu_mul(a.out + t * a.F, a.gate + t * a.F, a.up + t * a.F, a.F);
}

// rows are heads of tokens
void gated_norm(const Exec& e, const Instr& in, int64_t i) {
    const auto a = in.args<GatedRmsNormArgs>();
    float* out = a.out + i * a.D;
    e.kernels->rms_norm(out, a.x + i * a.D, a.weight, a.D, static_cast<float>(a.eps));
    e.kernels->silu_mul(out, a.gate + i * a.D, out, a.D);
}

void sigmoid_gate(const Exec& e, const Instr& in, int64_t t) {
    const auto a = in.args<SigmoidGateArgs>();
    e.kernels->sigmoid_mul(a.x + t * a.A, a.gate + t * a.A, a.A);
}

}  // namespace

int64_t KvView::append(int64_t slot, int64_t head, const float* k, const float* v) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    // K of sixteen tokens is [D, 16], V is [S, D].
    const int64_t k_at = offset / 16 * 16 * head_dim + offset % 16, v_at = offset * head_dim;
    if (bytes == 1) {
        uint8_t *keys_at = keys(block, head) + k_at, *values_at = values(block, head) + v_at;
        int64_t clipped = 0;
        const auto store = [&clipped](uint8_t* to, float x) {
            *to = float_to_e4m3(x);
            clipped += std::fabs(x) > kLargestE4M3;
        };
        for (int64_t d = 0; k != nullptr && d < head_dim; d++) store(keys_at + 16 * d, k[d] * k_inverse);
        for (int64_t d = 0; v != nullptr && d < head_dim; d++) store(values_at + d, v[d] * v_inverse);
        return clipped;
    }
    if (bytes == 2) {
        auto* keys_at = reinterpret_cast<uint16_t*>(keys(block, head)) + k_at;
        auto* values_at = reinterpret_cast<uint16_t*>(values(block, head)) + v_at;
        for (int64_t d = 0; k != nullptr && d < head_dim; d++) keys_at[16 * d] = float_to_f16(k[d]);
        for (int64_t d = 0; v != nullptr && d < head_dim; d++) values_at[d] = float_to_f16(v[d]);
        return 0;
    }
    auto* keys_at = reinterpret_cast<float*>(keys(block, head)) + k_at;
    for (int64_t d = 0; k != nullptr && d < head_dim; d++) keys_at[16 * d] = k[d];
    if (v != nullptr) std::memcpy(values(block, head) + v_at * 4, v, static_cast<size_t>(head_dim) * 4);
    return 0;
}

bool plan_rows(Exec& e, const Instr& in) {
    switch (in.op) {
        case kEmbedding: {
            const auto a = in.args<EmbeddingArgs>();
            return e.check_indices("embedding: ids", a.ids, a.T, a.V) && by_rows<embed>(e, in, a.T, a.M);
        }
        case kGatherRows: {
            const auto a = in.args<GatherRowsArgs>();
            return e.check_indices("gather_rows: rows", a.rows, a.L, a.T) && by_rows<gather>(e, in, a.L, a.M);
        }
        case kRmsNorm: {
            const auto a = in.args<RmsNormArgs>();
            return by_rows<norm>(e, in, a.T, a.M);
        }
        case kHeadNorm: {
            const auto a = in.args<HeadNormArgs>();
            return by_rows<head_norm>(e, in, a.T * a.H, a.D);
        }
        case kRope: {
            const auto a = in.args<RopeArgs>();
            return e.check_indices("rope: positions", a.positions, a.T, a.P) &&
                   by_rows<rotate>(e, in, a.T, a.H * a.D);
        }
        case kRopeTail: {
            const auto a = in.args<RopeTailArgs>();
            return e.check_indices("rope_tail: positions", a.positions, a.T, a.P) &&
                   by_rows<rotate_tail>(e, in, a.T, a.H * a.B);
        }
        case kKvAppend: {
            const auto a = in.args<KvAppendArgs>();
            return e.check_indices("kv_append: slots", a.slots, a.T, a.N * a.S) &&
                   by_rows<append>(e, in, a.T, a.G * a.D);
        }
        case kSiluMul: {
            const auto a = in.args<SiluMulArgs>();
            return by_rows<gate>(e, in, a.T, a.F);
        }
        case kGatedRmsNorm: {
            const auto a = in.args<GatedRmsNormArgs>();
            return by_rows<gated_norm>(e, in, a.T * a.H, a.D);
        }
        case kSigmoidGate: {
            const auto a = in.args<SigmoidGateArgs>();
            return by_rows<sigmoid_gate>(e, in, a.T, a.A);
        }
        default:
            return e.fail("no kernel for op number %d", in.op);
    }
}

}  // namespace pega
