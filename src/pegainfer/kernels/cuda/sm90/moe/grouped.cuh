// Grouped GEMM of slots that lie sorted by expert, on Hopper. A slot is one of a token's K places for an
// expert.
//
//   out[i, n] = sum over k of x[i, k] · w[expert of i, n, k],  w: [experts, N, K]
//
// PAIRS: an expert's rows are gate and up in turn, and out[i, j] = silu(gate_j) · up_j.
//
// The slots fill the 64-row side of wgmma, 64 a warpgroup, and 256 or 128 rows of the matrix its other side,
// as in wide.cuh. Where a block of the list has fewer slots, only a.tile rows of x are brought: the other
// rows of the operand are whatever lies behind them in the stage, and what they give is not stored. Blocks
// stay: each takes every gridDim.x-th (block of slots, tile of rows), of which there are as many as the
// device has counted. One warp brings both operands by TMA through a ring of stages, and goes on with the
// next tile while the others finish theirs. A tile may reach beyond its expert's slots or rows; what it
// multiplies there is not stored.
#pragma once
#include <cuda.h>

#include "../gemm/skinny.cuh"

namespace grouped {

using skinny::Place, skinny::operand, skinny::along;

constexpr int PRODUCERS = 128;  // threads that do not multiply

// Where things lie in shared memory. COLUMNS: rows of a matrix in a tile.
template <int WG, int COLUMNS>
struct Ring {
    uint32_t stages, full, empty;
    int depth, stage_x, stage;  // bytes of x in a stage, and of all of it

    __device__ __forceinline__ Ring(const Args& a, uint32_t shared)
        : stages(shared), depth(a.depth), stage_x(a.tile * 128), stage(stage_x + COLUMNS * 128) {
        full = stages + depth * stage, empty = full + 8 * depth;
    }
    __device__ __forceinline__ void make_barriers() const {
        for (int i = 0; i < depth; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 4 * WG);
        mbarrier_init_fence();
    }
};

// By one thread.
template <int WG, int COLUMNS>
__device__ __forceinline__ void issue_tma(const void* w, const void* x, const Args& a,
                                          const Ring<WG, COLUMNS>& ring, int work, int chunks) {
    const uint64_t policy = l2_evict_last();
    Place at(1);
#pragma unroll 1
    for (int i = blockIdx.x; i < work; i += gridDim.x) {
        const int4 block = a.blocks[i / a.tiles];
        const int row = block.x * a.n + i % a.tiles * COLUMNS;
#pragma unroll 1
        for (int k = 0; k < chunks; k++) {
            const uint32_t full = ring.full + 8 * at.slot, to = ring.stages + at.slot * ring.stage;
            mbarrier_wait(ring.empty + 8 * at.slot, at.parity);
            mbarrier_arrive_expect(full, ring.stage);
            tma_load2(to, x, k * skinny::SWIZZLE, block.y, full, policy);
            tma_load2(to + ring.stage_x, w, k * skinny::SWIZZLE, row, full, policy);
            at.advance(ring.depth);
        }
    }
}

// One tile's GEMM: of this warpgroup's 64 slots with COLUMNS rows.
template <typename T, int WG, int COLUMNS>
__device__ __forceinline__ void multiply(const Ring<WG, COLUMNS>& ring, int chunks, float (&acc)[COLUMNS / 2],
                                         Place& at) {
    const int lane = threadIdx.x & 31, mine = (threadIdx.x >> 7) * 8192;  // bytes of a stage of x
    int last = -1;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) acc[i] = 0;
#pragma unroll 1
    for (int k = 0; k < chunks; k++) {
        mbarrier_wait(ring.full + 8 * at.slot, at.parity);
        const uint64_t x = operand(ring.stages + at.slot * ring.stage + mine);
        const uint64_t w = operand(ring.stages + at.slot * ring.stage + ring.stage_x);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; kk++) Wgmma<T, COLUMNS>::ss(acc, along(x, kk * 32), along(w, kk * 32), true);
        wgmma_commit();
        wgmma_wait<1>();  // the stage before
        if (last >= 0 && lane == 0) mbarrier_arrive(ring.empty + 8 * last);
        last = at.slot;
        at.advance(ring.depth);
    }
    wgmma_wait<0>();
    wgmma_pin(acc);
    if (last >= 0 && lane == 0) mbarrier_arrive(ring.empty + 8 * last);
}

// Where one thread's sums of a tile go: slots `row` and row + 8 of the block.
template <typename T>
struct Target {
    T* rows[2];  // null: beyond the block's slots

    __device__ __forceinline__ Target(const Args& a, const int4& block, int row, int width) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = row + 8 * h;
            const bool valid = at < block.z;
            const int slot = valid && a.order != nullptr ? a.order[block.y + at] : block.y + at;
            rows[h] = valid ? static_cast<T*>(a.out) + static_cast<int64_t>(slot) * width : nullptr;
        }
    }
};

// Stores a thread's sums. wgmma leaves it columns 8 j + 2 t and one more of two slots; four lanes exchange
// theirs, so that each stores columns that lie together.
template <typename T, bool PAIRS, int COLUMNS>
__device__ __forceinline__ void leave_sums(const Args& a, const float (&acc)[COLUMNS / 2],
                                           const Target<T>& target, int first) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j += 4) {
        const int n = first + 8 * (j + t);  // of the matrix, the first of 8 rows
        if constexpr (PAIRS) {
            uint32_t v[4];  // each has one result of either slot
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* sums = acc + 4 * (j + i);
                float results[2];
#pragma unroll
                for (int h = 0; h < 2;
                     h++) {  // The projections are rounded, as they are where they are stored.
                    const float2 p = unpack2<T>(pack2<T>(sums[2 * h], sums[2 * h + 1]));
                    results[h] = __fdividef(p.x, 1.f + __expf(-p.x)) * p.y;
                }
                v[i] = pack2<T>(results[0], results[1]);
            }
            transpose4(v);
            const uint2 words[2] = {
                {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410)},
                {__byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632)},
            };
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (target.rows[h] != nullptr && n < a.n)
                    *reinterpret_cast<uint2*>(target.rows[h] + n / 2) = words[h];
        } else {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t v[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    v[i] = pack2<T>(acc[4 * (j + i) + 2 * h], acc[4 * (j + i) + 2 * h + 1]);
                transpose4(v);
                if (target.rows[h] != nullptr && n < a.n)
                    *reinterpret_cast<uint4*>(target.rows[h] + n) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

template <typename T, int WG, int COLUMNS, bool PAIRS>
__device__ __forceinline__ void run(const void* w, const void* x, const Args& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const Ring<WG, COLUMNS> ring(a, shared_address(shared));
    const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
    if (threadIdx.x == 0) ring.make_barriers(), tma_prefetch(w), tma_prefetch(x);
    __syncthreads();
    pdl_wait();
    pdl_launch();
    const int work = *a.in_use * a.tiles, chunks = (a.k + skinny::SWIZZLE - 1) / skinny::SWIZZLE;
    if (warp >= 4 * WG) {
        if constexpr (WG == 2) registers_drop<40>();
        if (warp == 4 * WG && lane == 0) issue_tma(w, x, a, ring, work, chunks);
        return;
    }
    if constexpr (WG == 2) registers_raise<232>();
    Place at(0);
    float acc[COLUMNS / 2];
#pragma unroll 1
    for (int i = blockIdx.x; i < work; i += gridDim.x) {
        const int4 block = a.blocks[i / a.tiles];
        const Target<T> target(a, block, warp * 16 + lane / 4, PAIRS ? a.n / 2 : a.n);
        multiply<T>(ring, chunks, acc, at);
        leave_sums<T, PAIRS, COLUMNS>(a, acc, target, i % a.tiles * COLUMNS);
    }
}

}  // namespace grouped

#define EXPERT_GROUPS(NAME, T, WG, COLUMNS, PAIRS)                                         \
    extern "C" __global__ void __launch_bounds__(128 * WG + grouped::PRODUCERS, 1)         \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, \
             const grouped::Args a) {                                                      \
        grouped::run<T, WG, COLUMNS, PAIRS>(&w, &x, a);                                    \
    }
