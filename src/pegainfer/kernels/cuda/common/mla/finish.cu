// op mla_qkv_append: queries rotated and latents cached, of published models' sizes in 16 bits, a warp a head
// or latent.
#include "append_row.cuh"

namespace mla {

// Unit h of a token is the latent, which lies behind the heads in memory.
template <typename T>
__device__ __forceinline__ void finish_rows(const AppendArgs& a) {
    const int64_t unit = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) >> 5;
    const int lane = threadIdx.x & 31, token = unit / (a.h + 1), head = unit % (a.h + 1);
    if (token >= a.tokens) {
        pdl_wait();
        return;
    }
    const T* latent = static_cast<const T*>(a.latent) + token * a.stride;
    if (head == a.h) {
        append_row<T>(a, latent, token, lane);
        return;
    }
    const Rotation rotation(a, token, lane);
    pdl_wait();
    pdl_launch();
    const T* from = latent + (head - a.h) * (KEPT + ROTATED);
    T* to = static_cast<T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * (KEPT + ROTATED);
    const T low = from[KEPT + lane], high = from[KEPT + PAIRS + lane];
    if (lane < KEPT / 8) reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(from)[lane];
    rotation.apply(to + KEPT, low, high, lane);
}

}  // namespace mla

#define FINISH_KERNEL(TYPE, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(256) mla_finish_##TYPE##_r512(mla::AppendArgs a) { \
        mla::finish_rows<T>(a);                                                                     \
    }

// variant mla_finish_bf16_r512: dtype=bf16
FINISH_KERNEL(bf16, bf16)
// variant mla_finish_f16_r512: dtype=f16
FINISH_KERNEL(f16, f16)
