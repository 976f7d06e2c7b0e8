// op attention: float32 of any even head size up to 256, a warp a query head. For checking, not for serving.
#include "attention.cuh"

using namespace attention;

// grid: (H, T). A token that belongs to no row gets nothing written.
// variant attention_plain_f32: dtype=f32 most_head=256
extern "C" __global__ void __launch_bounds__(32) attention_plain_f32(Args a, int rows, int d) {
    pdl_wait();
    pdl_launch();
    const int token = blockIdx.y, head = blockIdx.x, lane = threadIdx.x;
    int row = 0;
    while (row < rows && (token < a.query_starts[row] || token >= a.query_starts[row] + a.query_lens[row]))
        row++;
    if (row == rows) return;
    const int sees = a.context_lens[row] - (a.query_starts[row] + a.query_lens[row] - 1 - token);
    const int kv_head = head / (a.h / a.g);
    const float* q = static_cast<const float*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * d;
    float x[8], o[8] = {}, m = -INFINITY, l = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = i * 32 + lane < d ? q[i * 32 + lane] : 0;
    for (int key = 0; key < sees; key++) {
        const int block = a.block_table[static_cast<int64_t>(row) * a.table_width + key / a.block_size];
        const float* k = static_cast<const float*>(a.kv) + block * a.page_stride +
                         (static_cast<int64_t>(kv_head) * a.block_size + key % a.block_size) * d;
        const float* v = k + static_cast<int64_t>(a.g) * a.block_size * d;
        float dot = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i * 32 + lane < d) dot += x[i] * k[i * 32 + lane];
        dot = warp_sum(dot) * a.scale_log2;
        const float top = fmaxf(m, dot), scale = exp2f(m - top), weight = exp2f(dot - top);
        m = top;
        l = l * scale + weight;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i * 32 + lane < d) o[i] = o[i] * scale + weight * v[i * 32 + lane];
    }
    float* out = static_cast<float*>(a.out) + (static_cast<int64_t>(token) * a.h + head) * d;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i * 32 + lane < d) out[i * 32 + lane] = o[i] / l;
}
