// op causal_conv_silu: depthwise convolution over a row's tokens and the inputs kept in its state, then silu.
// A thread has N channels and a tile of kTile tokens. Blocks of one row's tiles run in any order: only the
// first tile reads the row's state, and it alone writes the new one.
#include "rows.cuh"

constexpr int kTile = 8;   // at least the number of kept inputs, so that later tiles need no state
constexpr int kAhead = 4;  // tokens whose inputs are loaded together

template <typename T, int N>
__device__ __forceinline__ void unpack(float (&to)[N], const Vec<T, N>& v) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = to_f32(v.v[i]);
}
template <typename T, int N>
__device__ __forceinline__ Vec<T, N> rounded(const float (&from)[N]) {
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; i++) v.v[i] = from_f32<T>(from[i]);
    return v;
}

// silu with at least the precision of T.
template <typename T>
__device__ __forceinline__ float silu_as(float v) {
    if constexpr (sizeof(T) == 2)
        return v * __fdividef(1.f, 1.f + __expf(-v));
    else
        return silu(v);
}

// Four taps; the last three inputs stay in registers.
template <typename T, int N>
__device__ __forceinline__ void conv4(const ConvArgs<T>& a) {
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    const Tile at = find_tile(a.rows.lens, a.num_rows, blockIdx.y, kTile);
    const bool idle = at.row < 0 || channel >= a.channels;
    float taps[4][N];
    if (!idle)
#pragma unroll
        for (int w = 0; w < 4; w++) unpack(taps[w], load<float, N>(a.taps + w * a.channels + channel));
    pdl_wait();
    pdl_launch();
    if (idle) return;
    const Row row = row_at(a.rows, at.row);
    const int begin = at.tile * kTile, end = min(row.count, begin + kTile);
    const int64_t stride = a.channels, x_stride = a.x_stride;
    const T* x = a.x + row.first * x_stride + channel;
    T* out = a.out + row.first * stride + channel;
    if (row.id < 0) {
        const float none[N] = {};
        for (int t = begin; t < end; t++) store(out + t * stride, rounded<T, N>(none));
        return;
    }
    T* state = a.pool + row.id * a.entry + channel;
    float kept[3][N] = {};
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (begin > 0)
            unpack(kept[i], load<T, N>(x + (begin - 3 + i) * x_stride));
        else if (!row.fresh)
            unpack(kept[i], load<T, N>(state + i * stride));
    bool saved = false;  // whether any state inside the tile is wanted
#pragma unroll
    for (int i = 0; i < kTile; i++) saved |= begin + i < end && a.rows.saves[row.first + begin + i] >= 0;
#pragma unroll 1
    for (int first = begin; first < end; first += kAhead) {
        Vec<T, N> inputs[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; i++)
            if (first + i < end) inputs[i] = load<T, N>(x + (first + i) * x_stride);
#pragma unroll
        for (int i = 0; i < kAhead; i++) {
            const int t = first + i;
            if (t >= end) break;
            float now[N], y[N];
            unpack(now, inputs[i]);
#pragma unroll
            for (int j = 0; j < N; j++) {
                y[j] = silu_as<T>(kept[0][j] * taps[0][j] + kept[1][j] * taps[1][j] +
                                  kept[2][j] * taps[2][j] + now[j] * taps[3][j]);
                kept[0][j] = kept[1][j];
                kept[1][j] = kept[2][j];
                kept[2][j] = now[j];
            }
            store(out + t * stride, rounded<T, N>(y));
            const int save = saved ? a.rows.saves[row.first + t] : -1;
            if (save >= 0)
#pragma unroll
                for (int w = 0; w < 3; w++)
                    store(a.pool + save * a.entry + w * stride + channel, rounded<T, N>(kept[w]));
        }
    }
    if (begin > 0) return;
#pragma unroll
    for (int i = 0; i < 3; i++)
        store(state + i * stride,
              row.count <= kTile ? rounded<T, N>(kept[i]) : load<T, N>(x + (row.count - 3 + i) * x_stride));
}

// Any number of taps, a channel a thread.
template <typename T>
__device__ __forceinline__ void conv_any(const ConvArgs<T>& a) {
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    const Tile at = find_tile(a.rows.lens, a.num_rows, blockIdx.y, kTile);
    pdl_wait();
    pdl_launch();
    if (at.row < 0 || channel >= a.channels) return;
    const Row row = row_at(a.rows, at.row);
    const int begin = at.tile * kTile, end = min(row.count, begin + kTile);
    const int64_t stride = a.channels, x_stride = a.x_stride;
    const T* x = a.x + row.first * x_stride + channel;
    T* out = a.out + row.first * stride + channel;
    T* state = a.pool + row.id * a.entry + channel;
    // Input `at` of the row, counted from its first token of this step.
    const auto input = [&](int at) {
        return at >= 0 ? x[at * x_stride] : row.fresh ? from_f32<T>(0.f) : state[(a.kept + at) * stride];
    };
    for (int t = begin; t < end; t++) {
        float sum = 0;
        if (row.id >= 0)
            for (int w = 0; w <= a.kept; w++)
                sum += a.taps[w * stride + channel] * to_f32(input(t - a.kept + w));
        out[t * stride] = from_f32<T>(silu(sum));
        const int save = row.id >= 0 ? a.rows.saves[row.first + t] : -1;
        for (int i = 0; save >= 0 && i < a.kept; i++)
            a.pool[save * a.entry + i * stride + channel] = input(t + 1 - a.kept + i);
    }
    // In place: what entry i becomes lies behind it, so that ascending order reads it before it changes.
    for (int i = 0; begin == 0 && row.id >= 0 && i < a.kept; i++)
        state[i * stride] = input(row.count - a.kept + i);
}

#define KERNELS(TYPE, T, N)                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 3) causal_conv4_##TYPE(const ConvArgs<T> args) { \
        conv4<T, N>(args);                                                                             \
    }                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) causal_conv_##TYPE(const ConvArgs<T> args) {     \
        conv_any<T>(args);                                                                             \
    }

// variant causal_conv4_bf16: dtype=bf16 taps=4 multiple=8
// variant causal_conv_bf16: dtype=bf16
KERNELS(bf16, bf16, 8)
// variant causal_conv4_f16: dtype=f16 taps=4 multiple=8
// variant causal_conv_f16: dtype=f16
KERNELS(f16, f16, 8)
// variant causal_conv4_f32: dtype=f32 taps=4 multiple=4
// variant causal_conv_f32: dtype=f32
KERNELS(f32, float, 4)
