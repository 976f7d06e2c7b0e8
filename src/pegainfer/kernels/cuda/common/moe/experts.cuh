// Products with the matrices of chosen experts. A slot is one of a token's K places for an expert.
//
//   out[slot, n] = x[slot's row] · w[experts[slot], n]ᵀ,  w: [N, n, k]
//
// SWIGLU: the matrix's rows are gate and up in turn, and out[slot, i] = silu(gate_i) · up_i. Slots whose
// expert is none give zeros there, and are left out of the sum that follows otherwise.
//
// `expert_rows` gives every output of every slot a warp: for float32 and for widths that no other kernel
// takes. `expert_tiles` takes up to 64 slots of one expert together, on mma.sync: slots were sorted by
// expert, and blocks beyond those in use end at once, so that the grid depends on the number of tokens alone.
// The sums of a slot do not depend on its neighbours in a tile.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace experts {

__device__ __forceinline__ float silu(float gate) {
    return gate / (1.f + expf(-gate));
}

template <typename T, bool SWIGLU>
__device__ __forceinline__ void finish(const Args& a, int slot, int n, float v, float pair) {
    if constexpr (SWIGLU) {
        // The two projections are rounded first, as they are where they are stored.
        const float gate = to_f32(from_f32<T>(v)), up = to_f32(from_f32<T>(pair));
        static_cast<T*>(a.out)[static_cast<int64_t>(slot) * (a.n / 2) + n / 2] = from_f32<T>(silu(gate) * up);
    } else {
        static_cast<T*>(a.out)[static_cast<int64_t>(slot) * a.n + n] = from_f32<T>(v);
    }
}

constexpr int ROW_WARPS = 8;

// Grid: (slots, outputs over ROW_WARPS). N elements an access.
template <typename T, bool SWIGLU, int N>
__device__ __forceinline__ void rows(const Args& a) {
    constexpr int UNIT = SWIGLU ? 2 : 1;
    const int slot = blockIdx.x, lane = threadIdx.x & 31;
    const int n = (blockIdx.y * ROW_WARPS + (threadIdx.x >> 5)) * UNIT;
    pdl_wait();
    pdl_launch();
    if (n >= a.n) return;
    const int expert = a.experts[slot];
    if (expert < 0 || expert >= a.num_experts) {
        if (SWIGLU && lane == 0) finish<T, SWIGLU>(a, slot, n, 0.f, 0.f);
        return;
    }
    const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(slot / a.each) * a.k;
    const T* w = static_cast<const T*>(a.w) + (static_cast<int64_t>(expert) * a.n + n) * a.k;
    float sum[UNIT] = {};
#pragma unroll 4
    for (int k = lane * N; k < a.k; k += 32 * N) {
        const auto xs = load<T, N>(x + k);
#pragma unroll
        for (int u = 0; u < UNIT; u++) {
            const auto ws = load<T, N>(w + static_cast<int64_t>(u) * a.k + k);
#pragma unroll
            for (int i = 0; i < N; i++) sum[u] += to_f32(xs.v[i]) * to_f32(ws.v[i]);
        }
    }
#pragma unroll
    for (int u = 0; u < UNIT; u++) sum[u] = warp_sum(sum[u]);
    if (lane == 0) finish<T, SWIGLU>(a, slot, n, sum[0], sum[UNIT - 1]);
}

constexpr int TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * 32;
constexpr int TILE_N = 64;      // rows of a matrix: 16 a warp
constexpr int TILE_SLOTS = 64;  // as lower/cuda/experts.py has it
constexpr int TILE_K = 64;
constexpr int STAGES = 3;
constexpr int ROW_BYTES = TILE_K * 2;
constexpr int STAGE_BYTES = (TILE_N + TILE_SLOTS) * ROW_BYTES;

// Where piece c of 16 bytes of a row lies: turned by the row, so that eight rows share no bank.
__device__ __forceinline__ int piece(int row, int c) {
    return row * ROW_BYTES + ((c ^ (row & 7)) << 4);
}

// The matrix's row that tile row r holds: of a pair, gate in rows 0 … 7 and up in rows 8 … 15 of sixteen, so
// that both end in one thread.
template <bool SWIGLU>
__device__ __forceinline__ int row_of(int r) {
    return SWIGLU ? (r & ~15) + 2 * (r & 7) + ((r >> 3) & 1) : r;
}

// Grid: (n over TILE_N, most blocks). k must be a multiple of 8.
template <typename T, bool SWIGLU>
__device__ __forceinline__ void tiles(const Args& a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    pdl_wait();
    pdl_launch();
    if (static_cast<int>(blockIdx.y) >= *a.in_use) return;
    const int4 block = a.blocks[blockIdx.y];
    const int* order = a.order + block.y;
    const int count = block.z, n0 = blockIdx.x * TILE_N, chunks = (a.k + TILE_K - 1) / TILE_K;
    const T* w = static_cast<const T*>(a.w) + static_cast<int64_t>(block.x) * a.n * a.k;
    const T* x = static_cast<const T*>(a.x);
    const uint32_t base = shared_address(shared);

    // Each thread copies one 16-byte piece of every sixteenth row.
    const int c = threadIdx.x & 7, first = threadIdx.x >> 3;
    constexpr int EACH_W = TILE_N * 8 / TILE_THREADS, EACH_X = TILE_SLOTS * 8 / TILE_THREADS;
    const T *from_w[EACH_W], *from_x[EACH_X];
#pragma unroll
    for (int i = 0; i < EACH_W; i++) {
        const int n = n0 + row_of<SWIGLU>(first + 16 * i);
        from_w[i] = n < a.n ? w + static_cast<int64_t>(n) * a.k + 8 * c : nullptr;
    }
#pragma unroll
    for (int i = 0; i < EACH_X; i++) {
        const int s = first + 16 * i;
        from_x[i] = s < count ? x + static_cast<int64_t>(order[s] / a.each) * a.k + 8 * c : nullptr;
    }
    auto fetch = [&](int chunk) {
        if (chunk < chunks) {
            const uint32_t to = base + chunk % STAGES * STAGE_BYTES;
            const int k = chunk * TILE_K;
            const bool inside = k + 8 * c < a.k;
#pragma unroll
            for (int i = 0; i < EACH_W; i++) {
                const bool valid = inside && from_w[i] != nullptr;
                cp_async16(to + piece(first + 16 * i, c), valid ? from_w[i] + k : w, valid);
            }
#pragma unroll
            for (int i = 0; i < EACH_X; i++) {
                const bool valid = inside && from_x[i] != nullptr;
                cp_async16(to + piece(TILE_N + first + 16 * i, c), valid ? from_x[i] + k : x, valid);
            }
        }
        cp_async_commit();
    };
    const int sixteens = (count + 15) / 16;  // of slots, that are in use
    float d[TILE_SLOTS / 8][4] = {};
    for (int i = 0; i < STAGES - 1; i++) fetch(i);
    for (int chunk = 0; chunk < chunks; chunk++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there, and the one before it has been read by all
        fetch(chunk + STAGES - 1);
        const uint32_t at = base + chunk % STAGES * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++) {
            uint32_t wf[4];
            ldmatrix4(wf, at + piece(warp * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int s = 0; s < TILE_SLOTS / 16; s++) {
                if (s >= sixteens) break;
                uint32_t xf[4];
                const int row = TILE_N + s * 16 + (lane >> 4) * 8 + (lane & 7);
                ldmatrix4(xf, at + piece(row, 2 * k + ((lane >> 3) & 1)));
                mma<T>(d[2 * s], wf[0], wf[1], wf[2], wf[3], xf[0], xf[1]);
                mma<T>(d[2 * s + 1], wf[0], wf[1], wf[2], wf[3], xf[2], xf[3]);
            }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int s = 0; s < TILE_SLOTS / 8; s++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 8 * s + 2 * t + i;
            if (at >= count) continue;
            const int slot = order[at];
            if constexpr (SWIGLU) {
                const int n = n0 + warp * 16 + 2 * g;
                if (n < a.n) finish<T, true>(a, slot, n, d[s][i], d[s][2 + i]);
            } else {
                const int n = n0 + warp * 16 + g;
                if (n < a.n) finish<T, false>(a, slot, n, d[s][i], 0.f);
                if (n + 8 < a.n) finish<T, false>(a, slot, n + 8, d[s][2 + i], 0.f);
            }
        }
    }
}

}  // namespace experts

#define EXPERT_ROWS(NAME, T, SWIGLU, N)                                                                 \
    extern "C" __global__ void __launch_bounds__(experts::ROW_WARPS * 32) NAME(const experts::Args a) { \
        experts::rows<T, SWIGLU, N>(a);                                                                 \
    }
#define EXPERT_TILES(NAME, T, SWIGLU)                                                                 \
    extern "C" __global__ void __launch_bounds__(experts::TILE_THREADS) NAME(const experts::Args a) { \
        experts::tiles<T, SWIGLU>(a);                                                                 \
    }
