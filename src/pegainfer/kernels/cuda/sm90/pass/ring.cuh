// The ring of shared memory through which a pass over one row reads all global memory, and the producer warp
// that fills it.
#pragma once
#include "hopper.cuh"
#include "operands.cuh"

namespace pass {

// The layout of shared memory, and one side's position in the ring: the number of a stage, and the parity of
// the phase to wait for (a consumer begins with 0, the producer with 1).
template <int D>
struct Places {
    static constexpr int PAGE = 2 * 16 * D * 2;  // bytes
    const Args& a;
    uint8_t* base;
    int slot = 0;
    uint32_t parity;
    __device__ __forceinline__ Places(const Args& args, uint8_t* shared, uint32_t first)
        : a(args), base(shared), parity(first) {}
    __device__ __forceinline__ uint32_t here() const { return shared_address(base) + slot * a.stage; }
    __device__ __forceinline__ uint32_t full() const { return barriers() + 8 * slot; }
    __device__ __forceinline__ uint32_t empty() const { return barriers() + 8 * (a.depth + slot); }
    __device__ __forceinline__ uint32_t barriers() const { return shared_address(base) + a.depth * a.stage; }
    __device__ __forceinline__ void advance() {
        if (++slot == a.depth) slot = 0, parity ^= 1;
    }
    // Behind the barriers: of each warp, the sum of its columns' squares.
    __device__ __forceinline__ float* squares() const {
        return reinterpret_cast<float*>(base + a.depth * (a.stage + 16));
    }
    // Of the residual stream, the elements that this block's threads add to, one each.
    __device__ __forceinline__ float* residual() const { return squares() + WARPS; }
    __device__ __forceinline__ float* cos_sin() const { return residual() + ROUND; }  // of the position, [D]
    __device__ __forceinline__ float2 (*ends() const)[8] {
        return reinterpret_cast<float2(*)[8]>(cos_sin() + D);
    }
    __device__ __forceinline__ uint8_t* queries() const { return reinterpret_cast<uint8_t*>(ends() + WARPS); }
    // [WARPS][ROUND] sums of a GEMM's rows; or [WARPS][heads][D] of attention.
    __device__ __forceinline__ float* sums() const { return reinterpret_cast<float*>(queries() + 8 * D * 2); }
};

// The producer's side of the ring. A window bounds the copies in flight, because memory answers an SM in
// order: any other load of this SM, of a flag or an input, waits for all copies that were issued before it.
template <int D>
struct Filling {
    Places<D> at, oldest;  // oldest: the first stage in flight
    int in_flight = 0;
    __device__ __forceinline__ Filling(const Args& a, uint8_t* shared)
        : at(a, shared, 1), oldest(a, shared, 0) {}
    // Waits until the stage is empty and the window has room.
    __device__ __forceinline__ void begin() {
        if (in_flight == at.a.window)
            mbarrier_wait(oldest.full(), oldest.parity), oldest.advance(), in_flight--;
        mbarrier_wait(at.empty(), at.parity);
        in_flight++;
    }
};

// Issues TMA copies of a GEMM's rows, a whole stage at a time.
template <int D>
__device__ __forceinline__ void issue_tma_rows(const Args& a, const Gemm& p, Filling<D>& to,
                                               uint64_t policy) {
    Places<D>& at = to.at;
    const int end = p.first(blockIdx.x + 1), step = p.in_stage(a);
#pragma unroll 1
    for (int row = p.first(blockIdx.x); row < end; row += step, at.advance()) {
        to.begin();
        if ((threadIdx.x & 31) == 0) {
            const int row_bytes = p.k * p.item, bytes = min(step, end - row) * row_bytes;
            mbarrier_arrive_expect(at.full(), bytes);
            bulk_load(at.here(), static_cast<const uint8_t*>(p.w) + static_cast<int64_t>(row) * row_bytes,
                      bytes, at.full(), policy);
        }
        __syncwarp();
    }
}

// Which blocks hold a share's pages, 32 at a time, a lane each; the next 32 are on their way. The first 64
// are the same in every layer.
struct Entries {
    const Args& a;
    const Share& s;
    int first, second, now, next;
    __device__ __forceinline__ Entries(const Args& args, const Share& share) : a(args), s(share) {
        first = load_from(0), second = load_from(32);
    }
    __device__ __forceinline__ int load_from(int page) const {
        const int mine = s.first + page + (threadIdx.x & 31);
        return mine < s.end ? a.block_table[mine * 16 / a.block_size] : 0;
    }
    // Pages are taken in turn, by the whole warp.
    __device__ __forceinline__ int block_of(int page) {
        if (page == 0)
            now = first, next = second;
        else if (page % 32 == 0)
            now = next, next = load_from(page + 32);
        return __shfl_sync(~0u, now, page & 31);
    }
};

template <int D>
__device__ __forceinline__ void issue_tma_pages(const Args& a, const void* map, const Share& s,
                                                Entries& entries, int layer, Filling<D>& to) {
    Places<D>& at = to.at;
    const int step = a.stage / at.PAGE, count = s.end - s.first;
#pragma unroll 1
    for (int first = 0; first < count; first += step, at.advance()) {
        const int end = min(first + step, count);
        to.begin();
        if ((threadIdx.x & 31) == 0) mbarrier_arrive_expect(at.full(), (end - first) * at.PAGE);
        for (int i = first; i < end; i++) {
            const int block = entries.block_of(i), head = (block * a.layers + layer) * 2 * a.g + s.unit;
            const int row = (s.first + i) * 16 % a.block_size / 8;
            const uint32_t page = at.here() + (i - first) * at.PAGE;
            if ((threadIdx.x & 31) == 0) {
                tma_load5(page, map, 0, 0, 0, row, head, at.full());
                tma_load5(page + at.PAGE / 2, map, 0, 0, 0, row, head + a.g, at.full());
            }
        }
        __syncwarp();
    }
}

// The producer warp: issues all copies that this block's consumers read, in their order. item: bytes of an
// element of the layers' weights.
template <int D>
__device__ __forceinline__ void issue_tma(const Args& a, const Layers& layers, const void* map, int item,
                                          Filling<D> to) {
    const uint64_t policy = l2_evict_first();
    const Share share(a);
    Entries entries(a, share);
#pragma unroll 1
    for (int layer = 0; layer < a.layers; layer++) {
#pragma unroll 1
        for (int kind = QKV; kind < HEAD; kind++) {
            issue_tma_rows(a, Gemm(a, layers, layer, kind, D, item), to, policy);
            if (kind == QKV && share.mine) issue_tma_pages<D>(a, map, share, entries, layer, to);
        }
    }
    issue_tma_rows(a, Gemm(a, layers, 0, HEAD, D, item), to, policy);
}

}  // namespace pass
