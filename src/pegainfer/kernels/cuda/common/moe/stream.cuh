// Products of a few slots with the matrices of their experts: bound by how fast the chosen matrices are read.
//
//   pairs: out[slot, i] = silu(gate_i) · up_i, the rows of an expert's matrix being gate and up in turn
//   sums:  out[token]   = sum over the token's slots of gate · (x[slot] · w[expert]ᵀ), by ascending expert
//
// Every block takes the same even share of rows of each chosen matrix, so that all memory is busy whichever
// experts are chosen, and a block owns its columns of a token's sum: they are added up in its shared memory
// in the order of the experts, without a launch of its own. An expert with more than 8 slots has several
// entries in the list; the later ones find the matrix in L2.
//
// The rows fill the 16-row side of mma.m16n8k16, an entry's slots its 8-column side. Warps take chunks of 64
// k in turn, shifted by the expert's number so that all get equal shares over several experts. Each thread
// copies what it multiplies itself through a ring of cp.async stages: the main loop has no barrier. For sums
// the list of experts is known while the kernel ahead still runs, and so the ring is filled with weights
// before griddepcontrol.wait.
#pragma once
#include "experts.cuh"

namespace experts {

constexpr int STREAM_WARPS = 8, STREAM_THREADS = STREAM_WARPS * 32;
constexpr int PART = 8;                    // slots of an entry
constexpr int ROWS = 16, CHUNK = 64;       // of a matrix in a stage of a warp
constexpr int STAGE_W = ROWS * CHUNK * 2;  // bytes
constexpr int STAGE = STAGE_W + PART * CHUNK * 2;
constexpr int PARTIAL = STREAM_WARPS * ROWS * PART;  // floats: a tile's sums of all warps

// What a block keeps in shared memory.
struct StreamMemory {
    float* partial;  // [2, PARTIAL]
    int4* entries;   // [most]
    int* order;      // [slots]
    float* gates;    // [slots]
    float* totals;   // [tokens, rows of this block]
    uint32_t ring;   // this thread's part of this warp's ring

    __device__ __forceinline__ StreamMemory(const StreamArgs& a, uint8_t* shared) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        uint8_t* rest = shared + STREAM_WARPS * a.depth * STAGE;
        partial = reinterpret_cast<float*>(rest), entries = reinterpret_cast<int4*>(partial + 2 * PARTIAL);
        order = reinterpret_cast<int*>(entries + a.most), gates = reinterpret_cast<float*>(order + a.slots);
        totals = gates + a.slots, ring = shared_address(shared) + warp * a.depth * STAGE + lane * 16;
    }
};

// Where a warp is in its work: an entry of the list, a tile of the block's rows, a chunk of k.
struct Cursor {
    int entry, tile, chunk, slot;
};

template <typename T, bool SUM>
struct Stream {
    static constexpr int UNIT = SUM ? 1 : 2;  // rows of a matrix that belong together
    const StreamArgs& a;
    const StreamMemory& s;
    int g, t, r0, r1, tiles, chunks, in_use = 0;

    __device__ __forceinline__ Stream(const StreamArgs& args, const StreamMemory& memory)
        : a(args), s(memory), g((threadIdx.x & 31) >> 2), t(threadIdx.x & 3) {
        const int64_t units = a.n / UNIT;
        r0 = static_cast<int>(units * blockIdx.x / gridDim.x) * UNIT;
        r1 = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x) * UNIT;
        tiles = (r1 - r0 + ROWS - 1) / ROWS, chunks = (a.k + CHUNK - 1) / CHUNK;
    }
    __device__ __forceinline__ void read_lists() {
        in_use = *a.in_use;
        for (int i = threadIdx.x; i < a.most; i += STREAM_THREADS) s.entries[i] = a.blocks[i];
        for (int i = threadIdx.x; i < a.slots; i += STREAM_THREADS) {
            s.order[i] = a.order[i];
            if (SUM) s.gates[i] = a.gates[i];
        }
        if (SUM)
            for (int i = threadIdx.x; i < a.tokens * (r1 - r0); i += STREAM_THREADS) s.totals[i] = 0;
        __syncthreads();
        if (tiles == 0) in_use = 0;  // more blocks than rows
    }
    __device__ __forceinline__ int first_chunk(int expert) const {
        return (static_cast<int>(threadIdx.x >> 5) - expert * chunks) & (STREAM_WARPS - 1);
    }
    __device__ __forceinline__ void settle(Cursor& c) const {
        while (c.entry < in_use && c.chunk >= chunks) {
            if (++c.tile == tiles) c.tile = 0, c.entry++;
            if (c.entry < in_use) c.chunk = first_chunk(s.entries[c.entry].x);
        }
    }
    __device__ __forceinline__ Cursor start() const {
        Cursor c = {0, 0, in_use ? first_chunk(s.entries[0].x) : 0, 0};
        settle(c);
        return c;
    }
    __device__ __forceinline__ void advance(Cursor& c) const {
        c.chunk += STREAM_WARPS;
        if (++c.slot == a.depth) c.slot = 0;
        settle(c);
    }
    __device__ __forceinline__ void fetch_w(const Cursor& c) const {
        if (c.entry >= in_use) return;
        const int first = r0 + c.tile * ROWS, k = c.chunk * CHUNK + t * 8;
        const T* w = static_cast<const T*>(a.w);
        const T* matrix = w + static_cast<int64_t>(s.entries[c.entry].x) * a.n * a.k + k;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = first + (SUM ? g + 8 * h : 2 * g + h);  // a pair ends in one thread
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const bool valid = row < r1 && k + 32 * j < a.k;
                cp_async16(s.ring + c.slot * STAGE + (2 * j + h) * 512,
                           valid ? matrix + static_cast<int64_t>(row) * a.k + 32 * j : w, valid);
            }
        }
    }
    __device__ __forceinline__ void fetch_x(const Cursor& c) const {
        if (c.entry >= in_use) return;
        const int4 entry = s.entries[c.entry];
        const int k = c.chunk * CHUNK + t * 8, slot = g < entry.z ? s.order[entry.y + g] : 0;
        const T* x = static_cast<const T*>(a.x);
        const T* from = x + static_cast<int64_t>(SUM ? slot : slot / a.chosen) * a.k + k;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const bool valid = g < entry.z && k + 32 * j < a.k;
            cp_async16(s.ring + c.slot * STAGE + STAGE_W + j * 512, valid ? from + 32 * j : x, valid);
        }
    }
    // Adds up what the warps have for a tile, in their order, and finishes it: a thread takes a row (or
    // pair) of a slot.
    __device__ __forceinline__ void finish_tile(const float* partial, const int4& entry, int tile) const {
        const int r = threadIdx.x % (ROWS / UNIT), i = threadIdx.x / (ROWS / UNIT);
        const int n = r0 + tile * ROWS + r * UNIT;
        if (i >= entry.z || n >= r1) return;
        const float* from = partial + (r & 7) * 4 + i / 2;  // lane 4 g + t has columns 2 t and 2 t + 1
        float v[2] = {};
#pragma unroll
        for (int u = 0; u < UNIT; u++) {
            const int half = SUM ? r >> 3 : u, register_of = half * 2 + (i & 1);
#pragma unroll
            for (int warp = 0; warp < STREAM_WARPS; warp++)
                v[u] += from[warp * ROWS * PART + register_of * 32];
        }
        const int slot = s.order[entry.y + i];
        if constexpr (SUM) {
            s.totals[slot / a.chosen * (r1 - r0) + n - r0] += s.gates[slot] * v[0];
        } else {
            const float gate = to_f32(from_f32<T>(v[0])), up = to_f32(from_f32<T>(v[1]));
            static_cast<T*>(a.out)[static_cast<int64_t>(slot) * (a.n / 2) + n / 2] =
                from_f32<T>(silu(gate) * up);
        }
    }
    __device__ __forceinline__ void leave_totals() const {
        const int width = r1 - r0;
        for (int i = threadIdx.x; i < a.tokens * width; i += STREAM_THREADS) {
            const int64_t at = static_cast<int64_t>(i / width) * a.n + r0 + i % width;
            if (a.residual != nullptr) {
                T* x = static_cast<T*>(a.residual) + at;
                *x = from_f32<T>(to_f32(*x) + s.totals[i]);
            } else {
                static_cast<float*>(a.out)[at] = s.totals[i];
            }
        }
    }
};

template <typename T, bool SUM>
__device__ __forceinline__ void stream(const StreamArgs& a) {
    extern __shared__ __align__(128) uint8_t shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const StreamMemory memory(a, shared);
    Stream<T, SUM> s(a, memory);
    const bool early = SUM && a.early;
    if (!early) pdl_wait(), pdl_launch();
    s.read_lists();
    Cursor ahead = s.start();
    // A group of copies a stage; what is copied early lacks x, which one more group brings for all stages.
    Cursor filled = ahead;
    for (int i = 0; i < a.depth; i++) {
        s.fetch_w(ahead);
        if (!early) s.fetch_x(ahead);
        cp_async_commit();
        s.advance(ahead);
    }
    if (early) {
        pdl_wait();
        pdl_launch();
        for (int i = 0; i < a.depth; i++) {
            s.fetch_x(filled);
            s.advance(filled);
        }
        cp_async_commit();
    }
    int slot = 0, step = 0, parity = 0;
    for (int i = 0; i < s.in_use; i++) {
        const int4 entry = memory.entries[i];
        for (int tile = 0; tile < s.tiles; tile++, parity ^= 1) {
            float acc[4] = {};
            for (int chunk = s.first_chunk(entry.x); chunk < s.chunks; chunk += STREAM_WARPS, step++) {
                cp_async_wait_upto(early && step < a.depth ? step : a.depth - 1);
                const uint32_t stage = memory.ring + slot * STAGE;
                if (++slot == a.depth) slot = 0;
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const uint4 lo = load_shared16(stage + 2 * j * 512);
                    const uint4 hi = load_shared16(stage + (2 * j + 1) * 512);
                    const uint4 b = load_shared16(stage + STAGE_W + j * 512);
                    mma<T>(acc, lo.x, hi.x, lo.y, hi.y, b.x, b.y);
                    mma<T>(acc, lo.z, hi.z, lo.w, hi.w, b.z, b.w);
                }
                s.fetch_w(ahead);  // the mma above have read the stage that this overwrites
                s.fetch_x(ahead);
                cp_async_commit();
                s.advance(ahead);
            }
            float* partial = memory.partial + parity * PARTIAL;  // two, so that one barrier a tile is enough
#pragma unroll
            for (int r = 0; r < 4; r++) partial[warp * ROWS * PART + r * 32 + lane] = acc[r];
            __syncthreads();
            s.finish_tile(partial, entry, tile);
        }
    }
    cp_async_wait<0>();
    if constexpr (SUM) {
        __syncthreads();
        s.leave_totals();
    }
}

}  // namespace experts

#define EXPERT_STREAM(NAME, T, SUM)                                          \
    extern "C" __global__ void __launch_bounds__(experts::STREAM_THREADS, 2) \
        NAME(const experts::StreamArgs a) {                                  \
        experts::stream<T, SUM>(a);                                          \
    }
