// op fill_normal, convert: weights made or converted on the device.
#include "ptx.cuh"

// Philox4x32-10 (Salmon et al., SC 2011) with key `seed` and counter `index`.
__device__ __forceinline__ uint4 philox(uint64_t seed, uint64_t index) {
    uint32_t c0 = index, c1 = index >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        const uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        const uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// out[i] = mean + scale · normal(seed, i); the same on every device up to the last bit of log and cos.
template <typename T>
__device__ __forceinline__ void fill_normal(T* out, int64_t n, int64_t seed, float mean, float scale) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; 4 * i < n; i += step) {
        const uint4 r = philox(seed, i);
        const uint32_t words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            const float u = (words[j] + 0.5f) * 2.3283064365386963e-10f;  // (0, 1]
            float s, c;
            sincospif(words[j + 1] * 4.656612873077393e-10f, &s, &c);
            const float radius = sqrtf(-2.f * logf(u)) * scale;
            if (4 * i + j < n) out[4 * i + j] = from_f32<T>(mean + radius * c);
            if (4 * i + j + 1 < n) out[4 * i + j + 1] = from_f32<T>(mean + radius * s);
        }
    }
}

template <typename To, typename From>
__device__ __forceinline__ void convert(To* out, const From* in, int64_t n) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step)
        out[i] = from_f32<To>(to_f32(in[i]));
}

#define FILL(TYPE, T)                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                  \
        fill_normal_##TYPE(T* out, int64_t n, int64_t seed, float mean, float scale) { \
        fill_normal<T>(out, n, seed, mean, scale);                                     \
    }
#define CONVERT(TO, To, FROM, From)                                 \
    extern "C" __global__ void __launch_bounds__(256)               \
        convert_##FROM##_##TO(To* out, const From* in, int64_t n) { \
        convert<To, From>(out, in, n);                              \
    }

// variant fill_normal_bf16: dtype=bf16
FILL(bf16, bf16)
// variant fill_normal_f16: dtype=f16
FILL(f16, f16)
// variant fill_normal_f32: dtype=f32
FILL(f32, float)
// variant convert_f32_bf16: from=f32 dtype=bf16
CONVERT(bf16, bf16, f32, float)
// variant convert_f16_bf16: from=f16 dtype=bf16
CONVERT(bf16, bf16, f16, f16)
// variant convert_f32_f16: from=f32 dtype=f16
CONVERT(f16, f16, f32, float)
// variant convert_bf16_f16: from=bf16 dtype=f16
CONVERT(f16, f16, bf16, bf16)
// variant convert_bf16_f32: from=bf16 dtype=f32
CONVERT(f32, float, bf16, bf16)
// variant convert_f16_f32: from=f16 dtype=f32
CONVERT(f32, float, f16, f16)
