// SwiGLU experts of up to 8 tokens on Hopper: bound by how fast the chosen matrices are read.
//
//   up:   act[i, token] = gate · silu(g) · u,  (g, u): products of the token with two rows of matrix i
//   down: x[token] += sum over the matrices i of act[i, token] · w_down[i]ᵀ
//
// Matrix i is that of the i-th expert, in ascending order, which any token has chosen. Every block makes the
// list of them itself from the router's logits (choice.cuh): a launch that sorts, and the wait for it, would
// take longer. `up` hands out tiles of rows of all chosen matrices to blocks in turn. In `down` a block owns
// rows of the result for all experts, so the sum over experts needs no other launch; it makes its list and
// fills its ring with weights before griddepcontrol.wait, for the logits are those of the launch before the
// last one.
//
// Shared experts, which every token meets, are the first of the list, several if one is as wide as several
// others. Their weights are copied while the router's launch still runs.
//
// One warp copies tiles of weights by TMA through a ring of stages. Rows of the weight fill the 16-row side
// of mma.m16n8k16, all tokens its 8-column side, whichever experts they chose. Eight warps split the columns,
// each always the same ones, so a token's result does not depend on the other tokens.
#pragma once
#include <cuda.h>

#include "choice.cuh"
#include "hopper.cuh"

namespace few {

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int TOKENS = 8;
constexpr int MEET = 1;                       // named barrier of the warps that multiply
constexpr int COLUMNS = 64, BOX_ROW = 128;    // elements and bytes of a row of a box
constexpr int PARTIAL = WARPS * 16 * TOKENS;  // floats: a tile's sums of all warps

// A side's position in the ring. Consumers begin with parity 0, the producer with 1.
struct Ring {
    uint32_t stages, full, empty;
    int depth, stage, slot = 0;
    uint32_t parity;

    __device__ __forceinline__ Ring(uint32_t shared, int depth, int stage, uint32_t first)
        : stages(shared), depth(depth), stage(stage), parity(first) {
        full = stages + depth * stage, empty = full + 8 * depth;
    }
    __device__ __forceinline__ void make_barriers() const {
        for (int i = 0; i < depth; i++) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, WARPS);
        mbarrier_init_fence();
    }
    __device__ __forceinline__ uint32_t here() const { return stages + slot * stage; }
    __device__ __forceinline__ void advance() {
        if (++slot == depth) slot = 0, parity ^= 1;
    }
    // By one thread: copies a box of rows `row`… and columns 64 `column`… into the next stage. more: bytes
    // that it will copy for the stage beside the box.
    __device__ __forceinline__ void fill(const void* map, int row, int column, uint64_t policy,
                                         int more = 0) {
        mbarrier_wait(empty + 8 * slot, parity);
        mbarrier_arrive_expect(full + 8 * slot, stage);
        tma_load3(here(), map, 0, row, column, full + 8 * slot, policy);
        advance();
    }
    __device__ __forceinline__ void await() const { mbarrier_wait(full + 8 * slot, parity); }
    // By a whole warp, which has read the stage.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) mbarrier_arrive(empty + 8 * slot);
        advance();
    }
};

// Adds the GEMM of a box's 64 columns. A lane has columns 16 t … 16 t + 15 of its rows and of its token in
// x: both operands may have their columns in any order, if it is the same.
template <typename T>
__device__ __forceinline__ void multiply_box(uint32_t box, bool tall, const uint4 (&x)[2], float (&acc)[4]) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const uint32_t at = box + g * BOX_ROW + ((2 * t + j) ^ g) * 16;  // as TMA swizzles
        const uint4 low = load_shared16(at);
        const uint4 high = tall ? load_shared16(at + 8 * BOX_ROW) : make_uint4(0, 0, 0, 0);
        mma<T>(acc, low.x, high.x, low.y, high.y, x[j].x, x[j].y);
        mma<T>(acc, low.z, high.z, low.w, high.w, x[j].z, x[j].w);
    }
}

// Leaves this warp's sums of a tile for `total`.
__device__ __forceinline__ void leave_sums(float* partial, const float (&acc)[4]) {
    const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    float2* to = reinterpret_cast<float2*>(partial + (warp * 16 + g) * TOKENS + 2 * t);
    to[0] = make_float2(acc[0], acc[1]), to[4 * TOKENS] = make_float2(acc[2], acc[3]);
}
__device__ __forceinline__ float total(const float* partial, int row, int token) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[(w * 16 + row) * TOKENS + token];
    return sum;
}

// 16 columns of a row of activations; zeros where `valid` is false.
__device__ __forceinline__ void load_columns(const void* row, bool valid, uint4 (&x)[2]) {
    const uint4* from = static_cast<const uint4*>(row);
#pragma unroll
    for (int j = 0; j < 2; j++) x[j] = valid ? __ldcg(from + j) : make_uint4(0, 0, 0, 0);
}

// CHUNKS: of 512 columns of x, at the most.
template <typename T, int CHUNKS>
struct Up {
    const UpArgs& a;
    const choice::List& list;
    Ring ring;
    int copied = 0;  // stages, by the thread that copies

    // Tiles of this block among so many.
    __device__ __forceinline__ int share(int tiles) const {
        return (tiles - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
               static_cast<int>(gridDim.x);
    }
    __device__ __forceinline__ void copy(const void* map, const void* shared_map, uint64_t policy) {
        const int tile = blockIdx.x + copied / a.chunks * gridDim.x, matrix = tile / a.tiles;
        const bool shared = matrix < a.shared;
        const int row = (shared ? matrix : list.expert(matrix)) * 2 * a.f + tile % a.tiles * a.rows;
        ring.fill(shared ? shared_map : map, row, copied % a.chunks * WARPS, policy);
        copied++;
    }
    // What depends on no other launch and fits the ring.
    __device__ __forceinline__ void prefetch(const void* map, const void* shared_map) {
        const uint64_t policy = l2_evict_first();
        const int stages = min(share(a.shared * a.tiles) * a.chunks, a.depth);
#pragma unroll 1
        while (copied < stages) copy(map, shared_map, policy);
    }
    __device__ __forceinline__ void produce(const void* map, const void* shared_map) {
        const uint64_t policy = l2_evict_first();
        const int stages = share(list.count() * a.tiles) * a.chunks;
        bool launched = false;
#pragma unroll 1
        for (;;) {
            if (!launched && stages - copied <= a.trigger) pdl_launch(), launched = true;
            if (copied >= stages) break;
            copy(map, shared_map, policy);
        }
    }
    __device__ __forceinline__ void load_x(uint4 (&x)[CHUNKS][2]) const {
        const int warp = threadIdx.x >> 5, token = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int k = (c * WARPS + warp) * COLUMNS + 16 * t;
            load_columns(static_cast<const T*>(a.h) + static_cast<int64_t>(token) * a.m + k,
                         token < a.tokens && k < a.m, x[c]);
        }
    }
    __device__ __forceinline__ void finish(const float* partial, int matrix, int tile, float scale) const {
        const int pair = threadIdx.x / TOKENS, token = threadIdx.x % TOKENS;
        if (pair >= a.rows / 2 || !list.has(matrix, token)) return;
        const float gate = to_f32(from_f32<T>(total(partial, 2 * pair, token) * scale));
        const float up = to_f32(from_f32<T>(total(partial, 2 * pair + 1, token) * scale));
        const float v = __fdividef(gate, 1.f + __expf(-gate)) * up * list.gate(matrix, token);
        static_cast<T*>(
            a.act)[(static_cast<int64_t>(matrix) * TOKENS + token) * a.f + tile * (a.rows / 2) + pair] =
            from_f32<T>(v);
    }
    __device__ __forceinline__ void consume(const uint4 (&x)[CHUNKS][2], float* partial) {
        const int warp = threadIdx.x >> 5, token = threadIdx.x % TOKENS, work = list.count() * a.tiles;
        const float scale = token < a.tokens ? __ldcg(a.scales + token) : 0.f;
        int parity = 0;
#pragma unroll 1
        for (int i = blockIdx.x; i < work; i += gridDim.x, parity ^= PARTIAL) {
            float acc[4] = {};
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (c >= a.chunks) break;
                ring.await();
                multiply_box<T>(ring.here() + warp * a.rows * BOX_ROW, a.rows > 8, x[c], acc);
                ring.release();
            }
            leave_sums(partial + parity, acc);  // two places, so that one barrier a tile is enough
            named_wait<CONSUMERS>(MEET);
            finish(partial + parity, i / a.tiles, i % a.tiles, scale);
        }
    }
};

template <typename T, int CHUNKS, int R>
__device__ __forceinline__ void up(const void* map, const void* shared_map, const route::Args& r,
                                   const UpArgs& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t ring = shared_address(shared);
    const int stage = a.rows * WARPS * BOX_ROW;
    float* partial = reinterpret_cast<float*>(shared + a.depth * (stage + 16));
    const choice::List list(r, a.shared, partial + 2 * PARTIAL);
    const bool produces = threadIdx.x == CONSUMERS;
    Up<T, CHUNKS> self = {a, list, Ring(ring, a.depth, stage, produces)};
    if (produces) {
        self.ring.make_barriers();
        tma_prefetch(map), tma_prefetch(shared_map);
        self.prefetch(map, shared_map);
    }
    list.clear();
    __syncthreads();
    pdl_wait();
    uint4 x[CHUNKS][2];
    if (threadIdx.x < CONSUMERS) self.load_x(x);
    list.make<R>(r, a.shared_gates, blockIdx.x == 0);
    if (produces) self.produce(map, shared_map);
    if (threadIdx.x < CONSUMERS) self.consume(x, partial);
}

// MOST: boxes of a stage that a warp multiplies, at the most.
template <typename T>
struct Down {
    static constexpr int MOST = 2, AHEAD = 3;  // AHEAD: stages whose activations are in flight
    const DownArgs& a;
    const choice::List& list;
    Ring ring;

    // In which matrix, and in which of its stages, a side is.
    struct At {
        int matrix = 0, chunk = 0;
        __device__ __forceinline__ void advance(int chunks) {
            if (++chunk == chunks) chunk = 0, matrix++;
        }
    };

    __device__ __forceinline__ void produce(const void* map, const void* shared_map) {
        const uint64_t policy = l2_evict_first();
        const int count = list.count(),
                  total = (a.m / a.rows - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                          static_cast<int>(gridDim.x) * count * a.chunks;
        const int fire = max(total - a.trigger, min(a.depth, total));
        int i = 0;
#pragma unroll 1
        for (int row = blockIdx.x * a.rows; row < a.m; row += gridDim.x * a.rows) {
#pragma unroll 1
            for (At at; at.matrix < count; at.advance(a.chunks)) {
                if (i++ == fire) pdl_wait(), pdl_launch();
                const int column = at.chunk * a.boxes;
                if (at.matrix < a.shared)  // side by side
                    ring.fill(shared_map, row, at.matrix * (a.f / COLUMNS) + column, policy);
                else
                    ring.fill(map, list.expert(at.matrix) * a.m + row, column, policy);
            }
        }
        if (i <= fire) pdl_wait(), pdl_launch();
    }
    __device__ __forceinline__ void load_x(const At& at, uint4 (&x)[MOST][2]) const {
        const int warp = threadIdx.x >> 5, token = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        const bool has = at.matrix < list.count() && list.has(at.matrix, token);
        const T* row =
            static_cast<const T*>(a.act) + (static_cast<int64_t>(at.matrix) * TOKENS + token) * a.f + 16 * t;
#pragma unroll
        for (int b = 0; b < MOST; b++) {
            const int box = warp + b * WARPS;
            load_columns(row + (at.chunk * a.boxes + box) * COLUMNS, has && box < a.boxes, x[b]);
        }
    }
    __device__ __forceinline__ void consume(float* partial) {
        const int warp = threadIdx.x >> 5, count = list.count(), total = count * a.chunks;
#pragma unroll 1
        for (int row = blockIdx.x * a.rows; row < a.m; row += gridDim.x * a.rows) {
            float acc[4] = {};
            uint4 x[AHEAD][MOST][2];
            At ahead;
#pragma unroll
            for (int s = 0; s < AHEAD; s++) load_x(ahead, x[s]), ahead.advance(a.chunks);
            const float before = residual(row);
#pragma unroll 1
            for (int i = 0; i < total; i += AHEAD) {
#pragma unroll
                for (int s = 0; s < AHEAD; s++) {
                    if (i + s >= total) break;
                    ring.await();
#pragma unroll
                    for (int b = 0; b < MOST; b++) {
                        const int box = warp + b * WARPS;
                        if (box < a.boxes)
                            multiply_box<T>(ring.here() + box * a.rows * BOX_ROW, a.rows > 8, x[s][b], acc);
                    }
                    ring.release();
                    load_x(ahead, x[s]), ahead.advance(a.chunks);
                }
            }
            named_wait<CONSUMERS>(MEET);  // the sums of the tile before have been read
            leave_sums(partial, acc);
            named_wait<CONSUMERS>(MEET);
            finish(partial, row, before);
        }
    }
    // A thread finishes one row of the tile of one token.
    __device__ __forceinline__ bool finishes() const {
        return static_cast<int>(threadIdx.x) < a.rows * TOKENS &&
               static_cast<int>(threadIdx.x) / a.rows < a.tokens;
    }
    __device__ __forceinline__ int64_t place(int row) const {
        return static_cast<int64_t>(threadIdx.x / a.rows) * a.m + row + threadIdx.x % a.rows;
    }
    __device__ __forceinline__ float residual(int row) const {
        return finishes() && a.x != nullptr ? to_f32(static_cast<const T*>(a.x)[place(row)]) : 0.f;
    }
    __device__ __forceinline__ void finish(const float* partial, int row, float before) const {
        const int r = threadIdx.x % a.rows, token = threadIdx.x / a.rows;
        if (static_cast<int>(threadIdx.x) >= a.rows * TOKENS) return;  // whole warps
        const float sum = total(partial, r, token);
        if (a.x == nullptr) {
            if (finishes()) a.out[place(row)] = sum;
            return;
        }
        const T x = from_f32<T>(before + sum);
        if (finishes()) static_cast<T*>(a.x)[place(row)] = x;
        if (a.norm == nullptr) return;
        if (finishes()) static_cast<T*>(a.normed)[place(row)] = from_f32<T>(to_f32(x) * a.norm[row + r]);
        float square = to_f32(x) * to_f32(x);
        for (int shift = a.rows / 2; shift; shift >>= 1) square += __shfl_xor_sync(~0u, square, shift);
        if (finishes() && r == 0) a.squares[row / a.rows * SQUARES_ROW + token] = square;
    }
    static constexpr int SQUARES_ROW = 64;  // skinny.cuh's MAX_TOKENS
};

template <typename T, int R>
__device__ __forceinline__ void down(const void* map, const void* shared_map, const route::Args& r,
                                     const DownArgs& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t ring = shared_address(shared);
    const int stage = a.rows * a.boxes * BOX_ROW;
    float* partial = reinterpret_cast<float*>(shared + a.depth * (stage + 16));
    const choice::List list(r, a.shared, partial + PARTIAL);
    const bool produces = threadIdx.x == CONSUMERS;
    Down<T> self = {a, list, Ring(ring, a.depth, stage, produces)};
    if (produces) self.ring.make_barriers(), tma_prefetch(map), tma_prefetch(shared_map);
    list.clear();
    __syncthreads();
    list.make<R>(r, nullptr, false);
    if (produces) self.produce(map, shared_map);
    if (threadIdx.x < CONSUMERS) pdl_wait(), self.consume(partial);
}

}  // namespace few

#define FEW_UP(NAME, T, CHUNKS, R)                                                              \
    extern "C" __global__ void __launch_bounds__(few::THREADS, 2)                               \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap shared, \
             const __grid_constant__ route::Args r, const __grid_constant__ few::UpArgs a) {    \
        few::up<T, CHUNKS, R>(&w, &shared, r, a);                                               \
    }
#define FEW_DOWN(NAME, T, R)                                                                    \
    extern "C" __global__ void __launch_bounds__(few::THREADS, 2)                               \
        NAME(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap shared, \
             const __grid_constant__ route::Args r, const __grid_constant__ few::DownArgs a) {  \
        few::down<T, R>(&w, &shared, r, a);                                                     \
    }
