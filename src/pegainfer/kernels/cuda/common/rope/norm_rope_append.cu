// op qkv_norm_rope_append, gated_qkv_norm_rope_append: what follows the fused projection. A warp takes one
// head of one token: query heads are normalised (Qwen3), rotated and written to q; key heads likewise, into
// their page; value heads are copied into theirs, and the heads of an output gate, which come last, to the
// gate.
#include "arguments.cuh"
#include "ptx.cuh"
#include "rope.cuh"
#include "store.cuh"

// All but the projection itself was there before the kernel ahead of this one began, and is fetched before
// that one ends.
template <typename T, typename C, int D>
__device__ __forceinline__ void norm_rope_append(const NormRopeAppendArgs& a) {
    const int lane = threadIdx.x & 31, plain = a.h + 2 * a.g;
    const int heads = a.gate ? plain + a.h : plain;
    const uint32_t unit = (static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    const bool mine = unit < static_cast<uint32_t>(a.tokens) * heads;
    const int token = unit / heads, head = unit % heads;
    const bool is_q = head < a.h, is_gate = head >= plain;
    const bool turns = head < a.h + a.g;
    const float* norm = is_q ? a.q_norm : a.k_norm;
    HeadPart<float, D> cos_sin = {}, weight = {};
    int slot = -1;
    if (mine && turns) {
        cos_sin.load_from(a.cos_sin + static_cast<int64_t>(a.positions[token]) * D, lane);
        weight = load_weight<D>(norm, lane);
    }
    if (mine && !is_q && !is_gate) slot = a.slots[token];
    pdl_wait();
    pdl_launch();
    if (!mine) return;
    HeadPart<T, D> x;
    x.load_from(static_cast<const T*>(a.qkv) + static_cast<int64_t>(unit) * D, lane);
    if (turns) apply_rope(x, norm ? head_scale(x, a.eps) : 1.f, weight, cos_sin);
    if (is_q) {
        T* to = static_cast<T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * D;
        x.store_to(to, lane);
    } else if (is_gate) {
        T* to = static_cast<T*>(a.gate) + (static_cast<int64_t>(token) * a.h + head - plain) * D;
        x.store_to(to, lane);
    } else {
        if (slot < 0) return;
        const int plane = head - a.h;  // key heads, then value heads: the order within a page
        C* to = static_cast<C*>(a.kv) + slot / a.block_size * a.page_stride +
                (static_cast<int64_t>(plane) * a.block_size + slot % a.block_size) * D;
        cached<C>(x, head < a.h + a.g ? a.k_inverse : a.v_inverse).store_to(to, lane);
    }
}

#define CACHE_KERNEL(TYPE, T, C, D)                                                                          \
    extern "C" __global__ void __launch_bounds__(256) norm_rope_append_##TYPE##_d##D(NormRopeAppendArgs a) { \
        norm_rope_append<T, C, D>(a);                                                                        \
    }
#define KERNEL(TYPE, T, D) CACHE_KERNEL(TYPE, T, T, D)

// variant norm_rope_append_bf16_d64: dtype=bf16 head=64
KERNEL(bf16, bf16, 64)
// variant norm_rope_append_bf16_d128: dtype=bf16 head=128
KERNEL(bf16, bf16, 128)
// variant norm_rope_append_bf16_d256: dtype=bf16 head=256
KERNEL(bf16, bf16, 256)
// variant norm_rope_append_f16_d64: dtype=f16 head=64
KERNEL(f16, f16, 64)
// variant norm_rope_append_f16_d128: dtype=f16 head=128
KERNEL(f16, f16, 128)
// variant norm_rope_append_f16_d256: dtype=f16 head=256
KERNEL(f16, f16, 256)
// variant norm_rope_append_f32_d64: dtype=f32 head=64
KERNEL(f32, float, 64)
// variant norm_rope_append_f32_d128: dtype=f32 head=128
KERNEL(f32, float, 128)
// variant norm_rope_append_f32_d256: dtype=f32 head=256
KERNEL(f32, float, 256)
// variant norm_rope_append_f8_e4m3_d64: dtype=bf16 cache=f8_e4m3 head=64
CACHE_KERNEL(f8_e4m3, bf16, e4m3, 64)
// variant norm_rope_append_f8_e4m3_d128: dtype=bf16 cache=f8_e4m3 head=128
CACHE_KERNEL(f8_e4m3, bf16, e4m3, 128)
// variant norm_rope_append_f8_e4m3_d256: dtype=bf16 cache=f8_e4m3 head=256
CACHE_KERNEL(f8_e4m3, bf16, e4m3, 256)
