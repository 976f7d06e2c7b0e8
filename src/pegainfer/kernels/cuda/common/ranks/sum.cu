// op reduce_residual, reduce_residual_norm: x += the sum over ranks of partial, added up in float32 in the
// order of the ranks, so that every rank gets the same bits.
#include "ranks.cuh"
#include "reduce.cuh"

using namespace ranks;

namespace {

constexpr int MOST_TOKENS = 64;  // MAX_TOKENS of sm90/gemm/skinny.cuh, which reads the sums of squares

// Adds up four values of every rank in the order of the ranks; `part_of(rank)` gives those of one.
template <typename PartOf>
__device__ __forceinline__ Part in_order(int ranks, PartOf part_of) {
    Part sum = part_of(0);
    for (int rank = 1; rank < ranks; rank++) {
        const Part part = part_of(rank);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) sum.v[j] += part.v[j];
    }
    return sum;
}

template <typename T>
__device__ __forceinline__ Vec<T, WIDTH> plus(const T* x, const Part& sum) {
    auto v = load<T, WIDTH>(x);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) v.v[j] = from_f32<T>(to_f32(v.v[j]) + sum.v[j]);
    return v;
}

// x plus this rank's own values, without the other ranks.
template <typename T>
__device__ __forceinline__ Vec<T, WIDTH> with_own(const T* x, const float* own) {
    return plus(x, load<float, WIDTH>(own));
}
template <typename T>
__device__ __forceinline__ void add_own(T* x, const float* partial, int64_t count) {
    const Span span(count);
    EACH(i, span) store(x + i, with_own(x + i, partial + i));
}

// x plus the sum of all ranks' values: this rank's are at `own`, those of the others at i in their slots.
template <typename T>
__device__ __forceinline__ Vec<T, WIDTH> with_slots(const Control& c, int64_t number, const T* x,
                                                    const float* own, int64_t i) {
    return plus(x, in_order(c.count, [&](int rank) {
                    if (rank == c.rank) return load<float, WIDTH>(own);
                    uint8_t* const from = slot(c, c.peers[c.rank].base, 0, number, rank);
                    return received<Part>(reinterpret_cast<const float*>(from) + i);
                }));
}

// Four values of another rank, each pair with the number of the sum beside it.
__device__ __forceinline__ Part arrived(const Control& c, const uint4* from, uint32_t tag, int peer) {
    Patience patience;
    uint4 low, high;
    do {
        low = load_words(from);
        high = load_words(from + 1);
    } while ((low.y != tag || low.w != tag || high.y != tag || high.w != tag) && !patience.ends(c, peer));
    return {__uint_as_float(low.x), __uint_as_float(low.z), __uint_as_float(high.x), __uint_as_float(high.z)};
}

// As with_slots, when the tagged values of all ranks have arrived.
template <typename T>
__device__ __forceinline__ Vec<T, WIDTH> with_tagged(const Control& c, int64_t number, const T* x,
                                                     const float* own, int64_t i) {
    return plus(x, in_order(c.count, [&](int rank) {
                    if (rank == c.rank) return load<float, WIDTH>(own);
                    const uint4* const from = tagged_slot(c, c.peers[c.rank].base, number, rank) + i / 2;
                    return arrived(c, from, static_cast<uint32_t>(number), rank);
                }));
}

// A block sends values first … last of `partial` to all others. Neighbouring threads write neighbouring
// pairs, because the link carries whole sectors.
__device__ __forceinline__ void send(const Control& c, const float* partial, int64_t number, int64_t first,
                                     int64_t last) {
    const auto tag = static_cast<uint32_t>(number);
    for (int64_t i = first + 2 * threadIdx.x; i < last; i += 2 * THREADS) {
        const auto v = load<float, 2>(partial + i);
        const uint4 words = {__float_as_uint(v.v[0]), tag, __float_as_uint(v.v[1]), tag};
        for (int j = 1; j < c.count; j++) {
            const int peer = (c.rank + j) % c.count;
            store_words(tagged_slot(c, c.peers[peer].base, number, c.rank) + i / 2, words);
        }
    }
}

// As one_shot below, with the number of the sum beside each value: twice the bytes, and nothing to wait for
// but the values. For the shortest sums.
template <typename T>
__device__ __forceinline__ void tagged(const SumArgs& a) {
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    T* const x = static_cast<T*>(a.x);
    if (c.alone) return add_own(x, a.partial, a.count);
    const int64_t number = c.joined + 1;
    const Span span(a.count);
    send(c, a.partial, number, span.first, span.last);
    __syncthreads();  // every thread has read the number
    count(a.control, number);
    EACH(i, span) store(x + i, with_tagged(c, number, x + i, a.partial + i, i));
}

// The same, and the beginning of the norm behind it, which the GEMM after it ends (ops/fused_norm.py). Grid:
// (parts of a row, T); a thread has one group of a row's values.
template <typename T>
__device__ __forceinline__ void tagged_norm(const SumNormArgs& a) {
    __shared__ float scratch[32];
    const int column = (blockIdx.x * THREADS + threadIdx.x) * WIDTH;
    const bool inside = column < a.n;
    const auto weight = inside ? load<float, WIDTH>(a.norm + column) : Part{};
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    const int64_t row = static_cast<int64_t>(blockIdx.y) * a.n, number = c.joined + 1, i = row + column;
    const int first = blockIdx.x * THREADS * WIDTH;
    if (!c.alone) send(c, a.partial, number, row + first, row + min(first + THREADS * WIDTH, a.n));
    __syncthreads();  // every thread has read the number
    if (!c.alone) count(a.control, number);
    float squares = 0;
    if (inside) {
        T* const x = static_cast<T*>(a.x) + i;
        const auto v = c.alone ? with_own(x, a.partial + i) : with_tagged(c, number, x, a.partial + i, i);
        store(x, v);
        Vec<T, WIDTH> normed;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            squares += to_f32(v.v[j]) * to_f32(v.v[j]);
            normed.v[j] = from_f32<T>(to_f32(v.v[j]) * weight.v[j]);
        }
        store(static_cast<T*>(a.normed) + i, normed);
    }
    squares = block_sum(squares, scratch);
    if (threadIdx.x == 0) a.squares[blockIdx.x * MOST_TOKENS + blockIdx.y] = squares;
}

// Every rank sends its part to all others and adds up everything: one exchange. For short sums.
template <typename T>
__device__ __forceinline__ void one_shot(const SumArgs& a) {
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    T* const x = static_cast<T*>(a.x);
    if (c.alone) return add_own(x, a.partial, a.count);
    const int64_t number = c.joined + 1;
    const Span span(a.count);
    for (int i = 1; i < c.count; i++) {
        const int peer = (c.rank + i) % c.count;
        float* const to = reinterpret_cast<float*>(slot(c, c.peers[peer].base, 0, number, c.rank));
        EACH(j, span) store(to + j, load<float, WIDTH>(a.partial + j));
    }
    meet(a.control, c, 0, number);
    EACH(i, span) store(x + i, with_slots(c, number, x + i, a.partial + i, i));
}

// Every rank adds up its share of the values and sends the new x of it to the others: two exchanges, of
// fewer bytes. For long sums.
template <typename T>
__device__ __forceinline__ void two_shot(const SumArgs& a) {
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    T* const x = static_cast<T*>(a.x);
    if (c.alone) return add_own(x, a.partial, a.count);
    const int64_t number = c.joined + 1;
    const int64_t share = ((a.count + c.count - 1) / c.count + WIDTH - 1) / WIDTH * WIDTH;
    const Span span(share);
    for (int i = 1; i < c.count; i++) {
        const int peer = (c.rank + i) % c.count;
        float* const to = reinterpret_cast<float*>(slot(c, c.peers[peer].base, 0, number, c.rank));
        EACH(j, span) {
            const int64_t at = peer * share + j;
            if (at < a.count) store(to + j, load<float, WIDTH>(a.partial + at));
        }
    }
    meet(a.control, c, 0, number);
    EACH(j, span) {
        const int64_t at = c.rank * share + j;
        if (at >= a.count) break;
        const auto v = with_slots(c, number, x + at, a.partial + at, j);
        store(x + at, v);
        for (int i = 1; i < c.count; i++) {
            const int peer = (c.rank + i) % c.count;
            store(reinterpret_cast<T*>(slot(c, c.peers[peer].base, 1, number, c.rank)) + j, v);
        }
    }
    meet(nullptr, c, 1, number);
    for (int i = 1; i < c.count; i++) {
        const int peer = (c.rank + i) % c.count;
        const T* const from = reinterpret_cast<const T*>(slot(c, c.peers[c.rank].base, 1, number, peer));
        EACH(j, span) {
            const int64_t at = peer * share + j;
            if (at < a.count) store(x + at, received<Vec<T, WIDTH>>(from + j));
        }
    }
}

}  // namespace

#define KERNELS(SHOT, NAME, T)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ SumArgs a) { \
        SHOT<T>(a);                                                                                 \
    }
// variant sum_ranks_tagged_bf16: dtype=bf16 multiple=4
KERNELS(tagged, sum_ranks_tagged_bf16, bf16)
// variant sum_ranks_tagged_f16: dtype=f16 multiple=4
KERNELS(tagged, sum_ranks_tagged_f16, f16)
// variant sum_ranks_tagged_f32: dtype=f32 multiple=4
KERNELS(tagged, sum_ranks_tagged_f32, float)
// variant sum_ranks_one_shot_bf16: dtype=bf16 multiple=4
KERNELS(one_shot, sum_ranks_one_shot_bf16, bf16)
// variant sum_ranks_one_shot_f16: dtype=f16 multiple=4
KERNELS(one_shot, sum_ranks_one_shot_f16, f16)
// variant sum_ranks_one_shot_f32: dtype=f32 multiple=4
KERNELS(one_shot, sum_ranks_one_shot_f32, float)
// variant sum_ranks_two_shot_bf16: dtype=bf16 multiple=4
KERNELS(two_shot, sum_ranks_two_shot_bf16, bf16)
// variant sum_ranks_two_shot_f16: dtype=f16 multiple=4
KERNELS(two_shot, sum_ranks_two_shot_f16, f16)
// variant sum_ranks_two_shot_f32: dtype=f32 multiple=4
KERNELS(two_shot, sum_ranks_two_shot_f32, float)

// variant sum_ranks_norm_bf16: dtype=bf16 multiple=4
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_ranks_norm_bf16(const __grid_constant__ SumNormArgs a) {
    tagged_norm<bf16>(a);
}
