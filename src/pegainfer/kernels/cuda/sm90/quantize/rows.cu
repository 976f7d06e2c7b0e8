// op linear, linear_residual, qkv_norm_rope_append, gate_up_swiglu, lm_head: activations in FP8 for GEMMs
// with FP8 weights, of many tokens (one code a value, with the norm ahead of the GEMM) and of few (two codes
// a value); and a bf16 weight in FP8, when it is loaded.
//
// Activations have a scale for 128 columns of a row. With one code, their greatest magnitude becomes 448.
#include "e4m3.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

constexpr float LARGEST = 448;  // of E4M3

// The greatest magnitude of a thread's values.
__device__ __forceinline__ float peak_of(const float (&v)[8]) {
    float peak = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) peak = fmaxf(peak, fabsf(v[i]));
    return peak;
}

// Stores 8 columns of a row as codes of v · inverse.
__device__ __forceinline__ void store_codes(const float (&v)[8], float inverse, uint8_t* codes) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = to_e4m3x2(v[2 * i] * inverse, v[2 * i + 1] * inverse);
    *reinterpret_cast<uint2*>(codes) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// variant quantize_rows_bf16: dtype=bf16 multiple=128
// x: [T, K] bf16; codes: [T, K]; scales: [K / 128, pitch]; weight: [K] float32 of a norm, or null. K a
// multiple of 128, one block a row; warps are whole, and a warp's columns are inside a row or all beyond it
// but for the last 16 threads.
extern "C" __global__ void __launch_bounds__(1024)
    quantize_rows_bf16(uint8_t* codes, float* scales, const bf16* x, const float* weight, int k, int pitch,
                       float eps) {
    __shared__ float scratch[32];
    pdl_wait();
    pdl_launch();
    const int64_t row = blockIdx.x;
    const bf16* from = x + row * k;
    float scale = 1;
    if (weight != nullptr) {
        float sum = 0;
        for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
            const auto v = load<bf16, 8>(from + i);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += to_f32(v.v[j]) * to_f32(v.v[j]);
        }
        scale = rsqrtf(block_sum(sum, scratch) / k + eps);
    }
    for (int base = 0; base < k; base += blockDim.x * 8) {
        const int i = base + threadIdx.x * 8;
        const bool valid = i < k;
        float v[8] = {};
        if (valid) {
            const auto loaded = load<bf16, 8>(from + i);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = to_f32(loaded.v[j]);
            if (weight != nullptr) {
                const auto w = load<float, 8>(weight + i);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = to_f32(from_f32<bf16>(v[j] * scale * w.v[j]));
            }
        }
        float peak = peak_of(v);
#pragma unroll
        for (int o = 8; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
        if (valid) store_codes(v, peak > 0 ? LARGEST / peak : 0, codes + row * k + i);
        if (valid && i % 128 == 0) scales[static_cast<int64_t>(i / 128) * pitch + row] = peak / LARGEST;
    }
}

// variant split_rows_bf16: dtype=bf16 multiple=128
// For GEMMs of few rows: each value of x [T, K] as the sum of two codes, hi and lo = E4M3(value - hi), codes:
// [2, MOST, K]; scales: [K / 128, MOST], powers of two: values divided by them have a greatest magnitude
// in [128, 256). 16 neighbouring threads take a group. The next launch may start at once, because it reads
// only constants before its wait for this one.
extern "C" __global__ void __launch_bounds__(256)
    split_rows_bf16(uint8_t* codes, float* scales, const bf16* x, int rows, int k) {
    constexpr int MOST = 64;
    const int groups = k / 128, at = (blockIdx.x * blockDim.x + threadIdx.x) / 16;
    const int row = at / groups, group = at % groups, column = group * 128 + threadIdx.x % 16 * 8;
    const bool valid = row < rows;
    pdl_launch();
    pdl_wait();
    Vec<bf16, 8> held = {};
    if (valid) held = load<bf16, 8>(x + static_cast<int64_t>(row) * k + column);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(held.v);
    // Magnitudes in bf16 are ordered as whole numbers are, NaN above all.
    uint32_t peaks = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) peaks = __vmaxu2(peaks, words[i] & 0x7fff7fff);
#pragma unroll
    for (int o = 8; o; o >>= 1) peaks = __vmaxu2(peaks, __shfl_xor_sync(~0u, peaks, o));
    // Exponents as float32 has them.
    const uint32_t exponent = max(max(peaks & 0xffff, peaks >> 16) >> 7, 8u);
    const float inverse = __uint_as_float((261 - exponent) << 23);
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 v = unpack2<bf16>(words[i]);
        const uint32_t scaled = pack2<f16>(v.x * inverse, v.y * inverse);  // exact
        hi[i] = f16_to_e4m3x2(scaled), lo[i] = f16_to_e4m3x2(sub_f16x2(scaled, e4m3x2_to_f16(hi[i])));
    }
    if (!valid) return;
    uint2* to = reinterpret_cast<uint2*>(codes + static_cast<int64_t>(row) * k + column);
    to[0] = make_uint2(hi[0] | hi[1] << 16, hi[2] | hi[3] << 16);
    to[static_cast<int64_t>(MOST) * k / 8] = make_uint2(lo[0] | lo[1] << 16, lo[2] | lo[3] << 16);
    if (threadIdx.x % 16 == 0)
        scales[group * MOST + row] = __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 7) << 23);
}

// variant quantize_weight_bf16: dtype=bf16 multiple=64
// w: [N, K] bf16; row i's codes go to codes + i · pitch, its one scale to scales[i · step], and as often
// again, `across` apart, as it has groups of 128 columns, unless across is 0. One block a row.
extern "C" __global__ void __launch_bounds__(1024)
    quantize_weight_bf16(uint8_t* codes, int64_t pitch, float* scales, int step, int across, const bf16* w,
                         int k) {
    __shared__ float scratch[32];
    const int64_t row = blockIdx.x;
    const bf16* from = w + row * k;
    float peak = 0;
    for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
        const auto loaded = load<bf16, 8>(from + i);
#pragma unroll
        for (int j = 0; j < 8; j++) peak = fmaxf(peak, fabsf(to_f32(loaded.v[j])));
    }
    peak = block_reduce(peak, 0.f, scratch, [](float a, float b) { return fmaxf(a, b); });
    // As the host quantises: a scale below the normal numbers makes zeros.
    const float scale = peak / LARGEST, inverse = scale > 0 ? 1 / scale : 0;
    for (int i = threadIdx.x * 8; i < k; i += blockDim.x * 8) {
        const auto loaded = load<bf16, 8>(from + i);
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = to_f32(loaded.v[j]);
        store_codes(v, isinf(inverse) ? 0 : inverse, codes + row * pitch + i);
    }
    for (int g = threadIdx.x; g < (across > 0 ? k / 128 : 1); g += blockDim.x)
        scales[row * step + static_cast<int64_t>(g) * across] = scale;
}
