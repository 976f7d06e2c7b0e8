// op latent_attention: latents of any size up to 1,024 with their rotated keys, a warp a query head. Sizes of
// published models in 16 bits have latent.cuh.
#include "../attention/attention.cuh"

using namespace attention;

constexpr int EACH = 32;  // channels of a lane, at most

// grid: (H, T). d, k: channels of a cached row, and of its values. A token that belongs to no row gets
// nothing written.
template <typename T>
__device__ __forceinline__ void attend(const Args& a, int rows, int d, int k) {
    pdl_wait();
    pdl_launch();
    const int token = blockIdx.y, head = blockIdx.x, lane = threadIdx.x;
    int row = 0;
    while (row < rows && (token < a.query_starts[row] || token >= a.query_starts[row] + a.query_lens[row]))
        row++;
    if (row == rows) return;
    const int sees = a.context_lens[row] - (a.query_starts[row] + a.query_lens[row] - 1 - token);
    const T* q = static_cast<const T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * d;
    float x[EACH], o[EACH] = {}, m = -INFINITY, l = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) x[i] = i * 32 + lane < d ? to_f32(q[i * 32 + lane]) : 0.f;
    for (int key = 0; key < sees; key++) {
        const int block = a.block_table[static_cast<int64_t>(row) * a.table_width + key / a.block_size];
        const T* c = static_cast<const T*>(a.kv) + block * a.page_stride +
                     static_cast<int64_t>(key % a.block_size) * d;
        float v[EACH], dot = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            v[i] = i * 32 + lane < d ? to_f32(c[i * 32 + lane]) : 0.f;
            dot += x[i] * v[i];
        }
        dot = warp_sum(dot) * a.scale_log2;
        const float top = fmaxf(m, dot), scale = exp2f(m - top), weight = exp2f(dot - top);
        m = top;
        l = l * scale + weight;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (i * 32 + lane < k) o[i] = o[i] * scale + weight * v[i];
    }
    T* out = static_cast<T*>(a.out) + (static_cast<int64_t>(token) * a.h + head) * k;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (i * 32 + lane < k) out[i * 32 + lane] = from_f32<T>(o[i] / l);
}

#define KERNEL(TYPE, T)                                               \
    extern "C" __global__ void __launch_bounds__(32)                  \
        latent_attention_any_##TYPE(Args a, int rows, int d, int k) { \
        attend<T>(a, rows, d, k);                                     \
    }

// variant latent_attention_any_f32: dtype=f32 most_width=1024
KERNEL(f32, float)
// variant latent_attention_any_bf16: dtype=bf16 most_width=1024
KERNEL(bf16, bf16)
// variant latent_attention_any_f16: dtype=f16 most_width=1024
KERNEL(f16, f16)
