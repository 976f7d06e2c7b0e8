// Ops that work row by row: lookups, norms, rotation, gating, and appending to the cache.
#include <algorithm>

#include "exec.h"
#include "pack.h"

namespace pega {

namespace {

constexpr int64_t kValuesAChunk = 4096;  // less is not worth waking a thread for

const Exec& exec_of(const void* context) {
    return *static_cast<const Exec*>(context);
}

template <class T>
T* pointer(const Instr& in, int operand) {
    return static_cast<T*>(in.ptr[operand]);
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
    unpack_row(*pointer<Packed>(in, 1), pointer<int32_t>(in, 2)[t], pointer<float>(in, 0) + t * in.axis[2]);
}

void gather(const Exec&, const Instr& in, int64_t l) {
    const int64_t m = in.axis[1];
    std::memcpy(pointer<float>(in, 0) + l * m, pointer<float>(in, 1) + pointer<int32_t>(in, 2)[l] * m,
                static_cast<size_t>(m) * 4);
}

void norm(const Exec& e, const Instr& in, int64_t t) {
    const int64_t m = in.axis[1];
    e.kernels->rms_norm(pointer<float>(in, 0) + t * m, pointer<float>(in, 1) + t * m, pointer<float>(in, 2),
                        m, static_cast<float>(in.attr[0]));
}

// rows are heads of tokens
void head_norm(const Exec& e, const Instr& in, int64_t i) {
    float* x = pointer<float>(in, 0) + i * in.axis[2];
    e.kernels->rms_norm(x, x, pointer<float>(in, 1), in.axis[2], static_cast<float>(in.attr[0]));
}

void rotate(const Exec& e, const Instr& in, int64_t t) {
    const int64_t heads = in.axis[1], d = in.axis[2];
    const float* cos_sin = pointer<float>(in, 2) + pointer<int32_t>(in, 1)[t] * d;
    for (int64_t h = 0; h < heads; h++)
        e.kernels->rope(pointer<float>(in, 0) + (t * heads + h) * d, cos_sin, d);
}

void append(const Exec&, const Instr& in, int64_t t) {
    const int64_t *a = in.axis, heads = a[3], d = a[5];
    const KvView kv{pointer<uint8_t>(in, 0), a[2], static_cast<int64_t>(in.attr[0]), heads, a[4], d,
                    in.f16_state ? 2 : 4};
    for (int64_t g = 0; g < heads; g++) {
        const int64_t at = (t * heads + g) * d;
        kv.append(pointer<int32_t>(in, 3)[t], g, pointer<float>(in, 1) + at, pointer<float>(in, 2) + at);
    }
}

void gate(const Exec& e, const Instr& in, int64_t t) {
    const int64_t f = in.axis[1];
    e.kernels->silu_mul(pointer<float>(in, 0) + t * f, pointer<float>(in, 1) + t * f,
                        pointer<float>(in, 2) + t * f, f);
}

// rows are heads of tokens
void gated_norm(const Exec& e, const Instr& in, int64_t i) {
    const int64_t d = in.axis[2];
    float* out = pointer<float>(in, 0) + i * d;
    e.kernels->rms_norm(out, pointer<float>(in, 1) + i * d, pointer<float>(in, 3), d,
                        static_cast<float>(in.attr[0]));
    e.kernels->silu_mul(out, pointer<float>(in, 2) + i * d, out, d);
}

void sigmoid_gate(const Exec& e, const Instr& in, int64_t t) {
    const int64_t width = in.axis[1];
    e.kernels->sigmoid_mul(pointer<float>(in, 0) + t * width, pointer<float>(in, 1) + t * width, width);
}

}  // namespace

void KvView::append(int64_t slot, int64_t head, const float* k, const float* v) const {
    const int64_t block = slot / block_size, offset = slot % block_size;
    // K of sixteen tokens is [D, 16], V is [S, D].
    const int64_t k_at = offset / 16 * 16 * head_dim + offset % 16, v_at = offset * head_dim;
    if (bytes == 2) {
        auto* keys_at = reinterpret_cast<uint16_t*>(keys(block, head)) + k_at;
        auto* values_at = reinterpret_cast<uint16_t*>(values(block, head)) + v_at;
        for (int64_t d = 0; k != nullptr && d < head_dim; d++) keys_at[16 * d] = float_to_f16(k[d]);
        for (int64_t d = 0; v != nullptr && d < head_dim; d++) values_at[d] = float_to_f16(v[d]);
        return;
    }
    auto* keys_at = reinterpret_cast<float*>(keys(block, head)) + k_at;
    for (int64_t d = 0; k != nullptr && d < head_dim; d++) keys_at[16 * d] = k[d];
    if (v != nullptr) std::memcpy(values(block, head) + v_at * 4, v, static_cast<size_t>(head_dim) * 4);
}

bool plan_rows(Exec& e, const Instr& in) {
    const int64_t* a = in.axis;
    switch (in.op) {
        case kEmbedding:
            return e.check_indices("embedding: ids", pointer<int32_t>(in, 2), a[0], a[1]) &&
                   by_rows<embed>(e, in, a[0], a[2]);
        case kGatherRows:
            return e.check_indices("gather_rows: rows", pointer<int32_t>(in, 2), a[0], a[2]) &&
                   by_rows<gather>(e, in, a[0], a[1]);
        case kRmsNorm:
            return by_rows<norm>(e, in, a[0], a[1]);
        case kHeadNorm:
            return by_rows<head_norm>(e, in, a[0] * a[1], a[2]);
        case kRope:
            return e.check_indices("rope: positions", pointer<int32_t>(in, 1), a[0], a[3]) &&
                   by_rows<rotate>(e, in, a[0], a[1] * a[2]);
        case kKvAppend:
            return e.check_indices("kv_append: slots", pointer<int32_t>(in, 3), a[0], a[1] * a[4]) &&
                   by_rows<append>(e, in, a[0], a[3] * a[5]);
        case kSiluMul:
            return by_rows<gate>(e, in, a[0], a[1]);
        case kGatedRmsNorm:
            return by_rows<gated_norm>(e, in, a[0] * a[1], a[2]);
        case kSigmoidGate:
            return by_rows<sigmoid_gate>(e, in, a[0], a[1]);
        default:
            return e.fail("no kernel for op number %d", in.op);
    }
}

}  // namespace pega
