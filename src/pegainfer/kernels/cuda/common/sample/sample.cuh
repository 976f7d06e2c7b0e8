// What the sampling kernels share. A row of logits is cut into chunks, one block each; whatever is summed
// over chunks is a whole number or merged in a fixed order, so tokens are those of the reference to the last
// bit.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

namespace sample {

using u64 = unsigned long long;

constexpr int CHUNK = 4096, THREADS = 256, EACH = CHUNK / THREADS;
constexpr int MAX_CHUNKS = 256;  // vocabularies up to 2^20
constexpr int BINS = 2048;       // of y, the distance from the best score in powers of two: 32 a power
constexpr float GREEDY_BELOW = 9.5367431640625e-07f;  // 2^-20
constexpr u64 NOT_A_NUMBER = ~0ull;

// Whole numbers in the order of the floats; -0 equals 0. NaN must have been dealt with before.
__device__ __forceinline__ uint32_t order_key(float v) {
    const uint32_t bits = __float_as_uint(v + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float key_value(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
// Greater is better: by score, then by the lower id.
__device__ __forceinline__ u64 place(float v, int id) {
    return static_cast<u64>(order_key(v)) << 32 | static_cast<uint32_t>(~id);
}
__device__ __forceinline__ int place_id(u64 p) {
    return static_cast<int>(~static_cast<uint32_t>(p));
}
__device__ __forceinline__ float place_value(u64 p) {
    return key_value(static_cast<uint32_t>(p >> 32));
}

__device__ __forceinline__ u64 block_max(u64 v, u64* scratch) {
    return block_reduce(v, 0ull, scratch, [](u64 a, u64 b) { return a > b ? a : b; });
}
__device__ __forceinline__ u64 block_sum(u64 v, u64* scratch) {
    return block_reduce(v, 0ull, scratch, [](u64 a, u64 b) { return a + b; });
}

// y = (max - score) · log2(e) / temperature, at most 64, each operation rounded to float32.
__device__ __forceinline__ float distance(float score, float best, float cold) {
    return fminf(__fmul_rn(__fsub_rn(best, score), cold), 64.f);
}
__device__ __forceinline__ float coldness(float temperature) {
    return static_cast<float>(1.4426950408889634 / static_cast<double>(temperature));
}
// 2^40 · 2^-y in whole numbers; ops/draw.py has the coefficients' meaning.
__device__ __forceinline__ u64 weight_of(float y) {
    const float whole = floorf(y);
    const int shift = static_cast<int>(whole);
    if (shift > 40) return 0;
    const uint32_t f = static_cast<uint32_t>(__fmul_rn(__fsub_rn(y, whole), 2147483648.f));
    uint32_t m = 234126;
    constexpr uint32_t coefficients[6] = {2737501, 20571132, 119165494, 515877902, 1488521986, 2147483648u};
#pragma unroll
    for (int i = 0; i < 6; i++) m = coefficients[i] - static_cast<uint32_t>(static_cast<u64>(m) * f >> 31);
    return static_cast<u64>(m) << 9 >> shift;
}
__device__ __forceinline__ int bin_of(float y) {
    return min(static_cast<int>(y * 32.f), BINS - 1);
}

}  // namespace sample
