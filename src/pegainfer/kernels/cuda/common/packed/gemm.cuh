// GEMMs of a quantised weight (form.cuh) with up to some hundred rows of activations, on tensor cores.
//
//   out[m, n] = sum over k of x[m, k] · w[n, k]
//
// Levels become bf16 numbers in registers, which are exact as they are whole numbers of at most 256, and each
// group's sums are multiplied by its scale in float32. The weight fills the 16-row side of mma.m16n8k16, the
// tokens its 8-column side.
//
// A cell is 128 rows of the weight by TOKENS tokens; a unit is a cell's product over 128 columns. The blocks
// share out the units of all cells evenly, in order, so several blocks may have parts of a cell. Each of them
// then leaves its sums, and the block that comes last adds them up in their order.
//
// Each unit is a stage of a ring that cp.async fills. A warp fetches and multiplies one tile of the weight;
// all warps share the tokens. The weight's first stages are fetched before griddepcontrol.wait, because
// weights are constant.
#pragma once
#include "arguments.cuh"
#include "form.cuh"
#include "reduce.cuh"

namespace packed {

enum Kind { STORE, STORE_F32, RESIDUAL, SWIGLU };  // as KINDS of lower/cuda/skinny.py

constexpr int WARPS = 8, THREADS = WARPS * 32, CELL = WARPS * ROWS;
constexpr int MAX_TOKENS = 256;
constexpr int SQUARES = 32;  // rows whose squares are summed together

constexpr uint32_t ONES = 0x3f803f80u;      // 1 in both halves
constexpr uint32_t MAGIC = 0x43004300u;     // 128; the bits of a whole number below 128 may be put into it
constexpr uint32_t NEGATIVE = 0xc300c300u;  // -128, likewise

// Of forms with an offset, what their levels are less in the product: sums then lose fewer digits.
template <typename F>
__device__ constexpr int centre() {
    return F::BITS == 4 ? 8 : 16;
}

// What is added to the levels of a row's group, in both halves: of 4 bits with 128 added already.
template <typename F>
__device__ __forceinline__ uint32_t shift_of(uint32_t word) {
    if constexpr (F::SCALES == Scales::Plain) {
        return 0;
    } else if constexpr (F::OFFSET) {
        const float shift = -centre<F>() - (F::BITS == 4 ? 128 : 0);
        return pack2<bf16>(shift, shift);
    } else if constexpr (F::BITS == 4) {
        return (word & 0xff) * 0x00010001u + NEGATIVE;
    } else {
        const float shift = 128.f - static_cast<float>(word & 0xff);
        return pack2<bf16>(shift, shift);
    }
}

// Eight levels of one row as four pairs of bf16. `high`: the other word of 8-bit levels.
template <typename F>
__device__ __forceinline__ void spread(uint32_t low, uint32_t high, uint32_t shift, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (F::BITS == 4) {
            a[i] = fma_bf16x2(((low >> 4 * i) & 0x000f000fu) | MAGIC, ONES, shift);
        } else {
            // The low seven bits, less 128 where the sign is set: -128 and -256 differ in the bit of the
            // sign.
            const uint32_t bytes = (i < 2 ? low : high) >> 8 * (i % 2);
            const uint32_t level =
                fma_bf16x2((bytes & 0x007f007fu) | MAGIC, ONES, (bytes & 0x00800080u) | NEGATIVE);
            a[i] = F::SCALES == Scales::Plain ? level : fma_bf16x2(level, ONES, shift);
        }
    }
}

template <typename F, int NT>
struct Block {
    static constexpr bool OFFSET = F::OFFSET;
    static constexpr int TOKENS = 8 * NT, GROUPS = COLUMNS / F::GROUP, SUMS = COLUMNS / 32 * TOKENS;
    static constexpr int STAGE_W = WARPS * F::BYTES, STAGE = STAGE_W + TOKENS * COLUMNS * 2;
    const Args& a;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const uint32_t ring;

    // Where columns 8 c … 8 c + 7 of a token lie in a stage. Odd rows are turned by 64 bytes, so that two
    // rows share no bank.
    __device__ __forceinline__ static uint32_t place(int token, int c) {
        return STAGE_W + token * (COLUMNS * 2) + ((c ^ ((token & 1) << 2)) << 4);
    }

    __device__ __forceinline__ void fetch_w(int cell, int chunk, uint32_t stage) const {
        const int tile = cell / a.token_blocks * WARPS + warp;
        const bool valid = tile * ROWS < a.n;
        const uint8_t* from = static_cast<const uint8_t*>(a.w) +
                              (static_cast<int64_t>(valid ? tile : 0) * a.chunks + chunk) * F::BYTES;
        const uint32_t to = stage + warp * F::BYTES;
#pragma unroll
        for (int at = 0; at < F::BYTES; at += 512)
            if (at + lane * 16 < F::BYTES) cp_async16(to + at + lane * 16, from + at + lane * 16, valid);
    }

    // Zeros past M and K.
    __device__ __forceinline__ void fetch_x(int cell, int chunk, uint32_t stage) const {
        const int first = cell % a.token_blocks * TOKENS;
        const bf16* x = static_cast<const bf16*>(a.x);
#pragma unroll
        for (int i0 = 0; i0 < TOKENS * 16; i0 += THREADS) {
            const int i = i0 + threadIdx.x, token = i / 16, c = i % 16, k = chunk * COLUMNS + c * 8;
            const bool valid = first + token < a.m && k < a.k;
            const bf16* from = valid ? x + static_cast<int64_t>(first + token) * a.k + k : x;
            if (i < TOKENS * 16) cp_async16(stage + place(token, c), from, valid);
        }
    }

    // Sums of each token over each 32 columns of a stage, which offsets are multiplied by: [4][TOKENS].
    __device__ __forceinline__ void sum_x(uint32_t stage, float* sums) const {
        constexpr int EACH = NT >= 8 ? 1 : NT == 4 ? 2 : 4;  // threads of a sum
        const int sum = threadIdx.x / EACH, part = threadIdx.x % EACH;
        if (sum >= SUMS) return;  // whole warps
        const int token = sum % TOKENS, group = sum / TOKENS;
        float total = 0;
#pragma unroll
        for (int c = 0; c < 4 / EACH; c++) {
            const uint4 v = load_shared16(stage + place(token, group * 4 + part * (4 / EACH) + c));
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 pair = unpack2<bf16>(words[i]);
                total += pair.x + pair.y;
            }
        }
#pragma unroll
        for (int o = 1; o < EACH; o *= 2) total += __shfl_xor_sync(~0u, total, o);
        if (part == 0) sums[sum] = total;
    }

    // Adds a unit to the sums. A thread has rows g and g + 8 of its warp's tile, of each 8 tokens those at 2
    // t and 2 t + 1.
    __device__ __forceinline__ void multiply(uint32_t stage, const float* sums, float (&acc)[NT][4]) const {
        const uint32_t tile = stage + warp * F::BYTES;
        uint4 levels = {};
        uint32_t ag[4], ah[4];
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const uint32_t at = tile + F::LEVELS + (group * 8 + g) * 2 * F::WORD;
            uint2 word, offset_word = {};
            if constexpr (F::WORD == 8) {
                const uint4 both = load_shared16(at);
                word = make_uint2(both.x, both.y), offset_word = make_uint2(both.z, both.w);
            } else {
                word = load_shared8(at);
            }
            const uint32_t shift_g = shift_of<F>(word.x), shift_h = shift_of<F>(word.y);
            float2 scale, offset = {};
            if constexpr (F::SCALES == Scales::Plain) {
                scale = make_float2(__uint_as_float(word.x), __uint_as_float(word.y));
            } else if constexpr (F::SCALES == Scales::Zero) {
                scale =
                    make_float2(__uint_as_float(word.x & 0xffffff00u), __uint_as_float(word.y & 0xffffff00u));
            } else if constexpr (F::SCALES == Scales::Pair) {
                const float2 vg = unpack2<f16>(word.x), vh = unpack2<f16>(word.y);
                scale = make_float2(vg.x, vh.x), offset = make_float2(vg.y, vh.y);
            } else {
                scale = make_float2(__uint_as_float(word.x), __uint_as_float(word.y));
                offset = make_float2(__uint_as_float(offset_word.x), __uint_as_float(offset_word.y));
            }
            if constexpr (OFFSET) {
                offset.x = fmaf(centre<F>(), scale.x, offset.x);
                offset.y = fmaf(centre<F>(), scale.y, offset.y);
            }
            // Adds a group's product with 8 tokens.
            auto add = [&](int nt, const float (&part)[4]) {
                if constexpr (OFFSET) {
                    const float2 of =
                        *reinterpret_cast<const float2*>(sums + group * TOKENS + nt * 8 + 2 * t);
                    acc[nt][0] += offset.x * of.x, acc[nt][1] += offset.x * of.y;
                    acc[nt][2] += offset.y * of.x, acc[nt][3] += offset.y * of.y;
                }
                acc[nt][0] += scale.x * part[0], acc[nt][1] += scale.x * part[1];
                acc[nt][2] += scale.y * part[2], acc[nt][3] += scale.y * part[3];
            };
            if constexpr (F::GROUP == 16) {
                if (group % 2 == 0) {
                    levels = load_shared16(tile + group / 2 * 512 + lane * 16);
                    spread<F>(levels.x, levels.y, 0, ag);
                    spread<F>(levels.z, levels.w, 0, ah);
                }
                const int at = group % 2 * 2;
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    float part[4] = {};
                    const uint2 b = load_shared8(stage + place(nt * 8 + g, group * 2 + t / 2) + t % 2 * 8);
                    mma<bf16>(part, ag[at], ah[at], ag[at + 1], ah[at + 1], b.x, b.y);
                    add(nt, part);
                }
            } else {
                constexpr int BLOCKS = F::GROUP / 32;
                float parts[BLOCKS == 1 ? 1 : NT][4] = {};
#pragma unroll
                for (int j = 0; j < BLOCKS; j++) {
                    const int block = group * BLOCKS + j;
                    if constexpr (F::BITS == 4) {
                        if (block % 2 == 0) levels = load_shared16(tile + block / 2 * 512 + lane * 16);
                        spread<F>(block % 2 ? levels.z : levels.x, 0, shift_g, ag);
                        spread<F>(block % 2 ? levels.w : levels.y, 0, shift_h, ah);
                    } else {
                        levels = load_shared16(tile + block * 512 + lane * 16);
                        spread<F>(levels.x, levels.y, shift_g, ag);
                        spread<F>(levels.z, levels.w, shift_h, ah);
                    }
#pragma unroll
                    for (int nt = 0; nt < NT; nt++) {
                        float first[4] = {};
                        auto& part = BLOCKS == 1 ? first : parts[BLOCKS == 1 ? 0 : nt];
                        const uint4 b = load_shared16(stage + place(nt * 8 + g, block * 4 + t));
                        mma<bf16>(part, ag[0], ah[0], ag[1], ah[1], b.x, b.y);
                        mma<bf16>(part, ag[2], ah[2], ag[3], ah[3], b.z, b.w);
                        if (j == BLOCKS - 1) add(nt, part);
                    }
                }
            }
        }
    }

    // Stores one sum; returns what it adds to the squares of its row. n: row of the weight.
    __device__ __forceinline__ float store(int token, int n, float v) const {
        const int64_t at = static_cast<int64_t>(token) * a.ld_out + n;
        if (a.kind == STORE_F32) {
            static_cast<float*>(a.out)[at] = v;
            return 0;
        }
        bf16* out = static_cast<bf16*>(a.out) + at;
        if (a.kind == RESIDUAL) v += to_f32(*out);
        const bf16 stored = from_f32<bf16>(v);
        *out = stored;
        if (a.normed == nullptr) return 0;
        v = to_f32(stored);
        static_cast<bf16*>(a.normed)[static_cast<int64_t>(token) * a.n + n] = from_f32<bf16>(v * a.norm[n]);
        return v * v;
    }

    __device__ __forceinline__ void finish(int cell, const float* factor, float* squares,
                                           float (&acc)[NT][4]) const {
        const int tile = cell / a.token_blocks * WARPS + warp, first = cell % a.token_blocks * TOKENS;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int column = nt * 8 + 2 * t + i, token = first + column;
                const bool valid = token < a.m;
                const float by = a.squares != nullptr && valid ? factor[token] : 1.f;
                const float vg = acc[nt][i] * by, vh = acc[nt][2 + i] * by;
                float square = 0;
                if (a.kind == SWIGLU) {
                    // The two projections are rounded first, as they are where they are stored.
                    const float gate = to_f32(from_f32<bf16>(vg)), up = to_f32(from_f32<bf16>(vh));
                    const int n = tile * 8 + g;
                    if (valid && 2 * n < a.n)
                        static_cast<bf16*>(a.out)[static_cast<int64_t>(token) * a.ld_out + n] =
                            from_f32<bf16>(gate / (1.f + expf(-gate)) * up);
                } else {
                    const int n = tile * ROWS + g;
                    if (valid && n < a.n) square += store(token, n, vg);
                    if (valid && n + 8 < a.n) square += store(token, n + 8, vh);
                }
                if (a.normed != nullptr) {
#pragma unroll
                    for (int o = 4; o < 32; o *= 2) square += __shfl_xor_sync(~0u, square, o);
                    if (g == 0) squares[warp * TOKENS + column] = square;
                }
            }
        }
        if (a.normed == nullptr) return;
        __syncthreads();
        constexpr int TOGETHER = SQUARES / ROWS, PARTS = WARPS / TOGETHER;
        for (int i = threadIdx.x; i < PARTS * TOKENS; i += THREADS) {
            const int part = i / TOKENS, column = i % TOKENS;
            float total = 0;
#pragma unroll
            for (int w = 0; w < TOGETHER; w++) total += squares[(part * TOGETHER + w) * TOKENS + column];
            if (first + column < a.m)
                a.next_squares[static_cast<int64_t>(cell / a.token_blocks * PARTS + part) * a.squares_width +
                               first + column] = total;
        }
        __syncthreads();
    }
};

// 1 / sqrt(mean(x²) + eps) of every token, from its squares.
__device__ __forceinline__ void factors(const Args& a, float* factor) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int token = warp; token < a.m; token += WARPS) {
        float total = 0;
        for (int i = lane; i < a.square_groups; i += 32)
            total += a.squares[static_cast<int64_t>(i) * a.squares_width + token];
        total = warp_sum(total);
        if (lane == 0) factor[token] = rsqrtf(total / a.k + a.eps);
    }
}

template <typename F, int NT>
__device__ __forceinline__ void run(const Args& a) {
    using B = Block<F, NT>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float factor[MAX_TOKENS], squares[WARPS * B::TOKENS];
    __shared__ float2 pairs[B::OFFSET ? B::SUMS : 1];
    float* sums = reinterpret_cast<float*>(pairs);  // of two stages
    __shared__ bool last;
    const B b{a,
              static_cast<int>(threadIdx.x >> 5),
              static_cast<int>(threadIdx.x & 31),
              static_cast<int>(threadIdx.x & 31) >> 2,
              static_cast<int>(threadIdx.x & 3),
              shared_address(shared)};
    const int64_t units = static_cast<int64_t>(a.cells) * a.chunks;
    const int blocks = gridDim.x, me = blockIdx.x;
    const int64_t begin = units * me / blocks;
    const int count = units * (me + 1) / blocks - begin;  // of units that are this block's

    const int head = min(a.depth - 1, count);
    const int cell0 = begin / a.chunks, chunk0 = begin % a.chunks;
    for (int i = 0, cell = cell0, chunk = chunk0; i < head; i++) {
        b.fetch_w(cell, chunk, b.ring + i * B::STAGE);
        if (++chunk == a.chunks) chunk = 0, cell++;
    }
    pdl_wait();
    pdl_launch();
    int next_cell = cell0, next_chunk = chunk0;
    for (int i = 0; i < a.depth - 1; i++) {
        if (i < head) {
            b.fetch_x(next_cell, next_chunk, b.ring + i * B::STAGE);
            if (++next_chunk == a.chunks) next_chunk = 0, next_cell++;
        }
        cp_async_commit();
    }
    if (a.squares != nullptr) factors(a, factor);
    if constexpr (B::OFFSET) {
        cp_async_wait_upto(a.depth - 2);
        __syncthreads();
        if (head > 0) b.sum_x(b.ring, sums);
    }

    float acc[NT][4] = {};
    int cell = cell0, chunk = chunk0, slot = 0, from = chunk0;
    int fetched = head;
    for (int unit = 0; unit < count; unit++) {
        // With an offset, the sums of the stage that follows are made beside this one's product.
        cp_async_wait_upto(a.depth - (B::OFFSET ? 3 : 2));
        __syncthreads();
        const uint32_t stage = b.ring + slot * B::STAGE;
        const int before = slot == 0 ? a.depth - 1 : slot - 1;  // every warp has read it
        if (++slot == a.depth) slot = 0;
        if (fetched < count) {
            b.fetch_w(next_cell, next_chunk, b.ring + before * B::STAGE);
            b.fetch_x(next_cell, next_chunk, b.ring + before * B::STAGE);
            if (++next_chunk == a.chunks) next_chunk = 0, next_cell++;
            fetched++;
        }
        cp_async_commit();
        const int odd = unit & 1;
        if constexpr (B::OFFSET)
            if (unit + 1 < count) b.sum_x(b.ring + slot * B::STAGE, sums + (odd ^ 1) * B::SUMS);
        b.multiply(stage, sums + (B::OFFSET ? odd * B::SUMS : 0), acc);
        if (++chunk < a.chunks && unit + 1 < count) continue;

        // The end of a cell, or of this block's share.
        bool mine = true;
        const int64_t cell_begin = static_cast<int64_t>(cell) * a.chunks, cell_end = cell_begin + a.chunks;
        if (from > 0 || chunk < a.chunks) {
            // A block has at most one part that begins before its share and one that ends after it.
            const int first = (blocks * (cell_begin + 1) - 1) / units,
                      final = (blocks * cell_end - 1) / units;
            auto part_of = [&](int block) {
                const bool begins = units * block / blocks >= cell_begin;
                return a.partial + static_cast<int64_t>(2 * block + (begins ? 1 : 0)) * (NT * 4 * THREADS) +
                       threadIdx.x;
            };
            float* part = part_of(me);
#pragma unroll
            for (int i = 0; i < NT * 4; i++) part[i * THREADS] = acc[i / 4][i % 4];
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                last = atomicAdd(a.arrivals + cell, 1) == final - first;
                if (last) a.arrivals[cell] = 0;
                __threadfence();
            }
            __syncthreads();
            mine = last;
            if (mine) {
                for (int block = first; block <= final; block++) {
                    const float* other = part_of(block);
#pragma unroll
                    for (int i = 0; i < NT * 4; i++) {
                        const float v = __ldcg(other + i * THREADS);
                        acc[i / 4][i % 4] = block == first ? v : acc[i / 4][i % 4] + v;
                    }
                }
            }
        }
        if (mine) b.finish(cell, factor, squares, acc);
#pragma unroll
        for (int i = 0; i < NT * 4; i++) acc[i / 4][i % 4] = 0;
        from = 0;
        if (chunk == a.chunks) chunk = 0, cell++;
    }
}

}  // namespace packed

#define PACKED_KERNEL(NAME, BITS, SCALES, GROUP, NT)                                        \
    extern "C" __global__ void __launch_bounds__(packed::THREADS, 2) NAME(packed::Args a) { \
        packed::run<packed::Form<BITS, packed::Scales::SCALES, GROUP>, NT>(a);              \
    }
