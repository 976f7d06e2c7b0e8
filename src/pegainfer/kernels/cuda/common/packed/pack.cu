// op pack: quantised matrices from the blocks of their files into the layout of form.cuh, and made up ones.
#include "arguments.cuh"
#include "form.cuh"

namespace packed {

// 32 levels of a row, as form.cuh counts them, and their scale.
struct Group {
    int q[32];
    float scale;
    float second;  // scale of the upper 16, in groups of 16
    float offset;  // Zero: the zero point of levels that begin at 0
};

__device__ __forceinline__ uint32_t read16(const uint8_t* p) {
    return p[0] | p[1] << 8;
}
__device__ __forceinline__ float half_at(const uint8_t* p) {
    return unpack2<f16>(read16(p)).x;
}
// Low nibbles of 16 bytes, then the high ones.
__device__ __forceinline__ void nibbles(const uint8_t* p, int (&q)[32]) {
#pragma unroll
    for (int i = 0; i < 16; i++) q[i] = p[i] & 15, q[16 + i] = p[i] >> 4;
}
__device__ __forceinline__ void fifth_bits(const uint8_t* p, int (&q)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) q[i] |= (p[i / 8] >> i % 8 & 1) << 4;
}

// Storage formats (runtime/weights/dequant.py, grouped.py): the group `i` of a row that begins at `row`.
template <int BITS, int GROUP>
struct Int {
    __device__ static Group read(const uint8_t* row, int i) {
        constexpr int EACH = 32 * BITS / 8;
        const uint8_t* block = row + static_cast<int64_t>(i / (GROUP / 32)) * (4 + GROUP * BITS / 8);
        const uint8_t* levels = block + 4 + i % (GROUP / 32) * EACH;
        Group out;
        if constexpr (BITS == 4) nibbles(levels, out.q);
        if constexpr (BITS == 8)
            for (int e = 0; e < 32; e++) out.q[e] = levels[e];
        out.scale = __uint_as_float((read16(block) | read16(block + 2) << 16) & 0xffffff00u);
        out.offset = block[0];
        return out;
    }
};
struct Q4_0 {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i) * 18;
        Group out;
        nibbles(block + 2, out.q);
        out.scale = half_at(block), out.offset = 8;
        return out;
    }
};
struct Q4_1 {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i) * 20;
        Group out;
        nibbles(block + 4, out.q);
        out.scale = half_at(block), out.offset = half_at(block + 2);
        return out;
    }
};
struct Q5_0 {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i) * 22;
        Group out;
        nibbles(block + 6, out.q);
        fifth_bits(block + 2, out.q);
        out.scale = half_at(block), out.offset = 16;
        return out;
    }
};
struct Q5_1 {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i) * 24;
        Group out;
        nibbles(block + 8, out.q);
        fifth_bits(block + 4, out.q);
        out.scale = half_at(block), out.offset = half_at(block + 2);
        return out;
    }
};
struct Q8_0 {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i) * 34;
        Group out;
        for (int e = 0; e < 32; e++) out.q[e] = block[2 + e] ^ 0x80;
        out.scale = half_at(block), out.offset = 128;
        return out;
    }
};
// The scale and the offset of one of a superblock's eight groups: 6-bit shares of two float16.
__device__ __forceinline__ void shares(const uint8_t* block, int i, Group& out) {
    const uint8_t* packed = block + 4;
    const int j = i % 4;
    const int scale = i < 4 ? packed[j] & 63 : (packed[8 + j] & 15) | packed[j] >> 6 << 4;
    const int minimum = i < 4 ? packed[4 + j] & 63 : packed[8 + j] >> 4 | packed[4 + j] >> 6 << 4;
    out.scale = half_at(block) * scale;
    out.offset = -(half_at(block + 2) * minimum);
}
struct Q4_K {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i / 8) * 144;
        const uint8_t* levels = block + 16 + i % 8 / 2 * 32;
        Group out;
        for (int e = 0; e < 32; e++) out.q[e] = levels[e] >> i % 2 * 4 & 15;
        shares(block, i % 8, out);
        return out;
    }
};
struct Q5_K {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i / 8) * 176;
        const uint8_t* levels = block + 48 + i % 8 / 2 * 32;
        Group out;
        for (int e = 0; e < 32; e++)
            out.q[e] = (levels[e] >> i % 2 * 4 & 15) | (block[16 + e] >> i % 8 & 1) << 4;
        shares(block, i % 8, out);
        return out;
    }
};

struct Q6_K {
    __device__ static Group read(const uint8_t* row, int i) {
        const uint8_t* block = row + static_cast<int64_t>(i / 8) * 210;
        const int half = i % 8 / 4, part = i % 4;
        const uint8_t *low = block + half * 64 + part % 2 * 32, *high = block + 128 + half * 32;
        const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + i % 8 * 2;
        Group out;
        for (int e = 0; e < 32; e++)
            out.q[e] = ((low[e] >> part / 2 * 4 & 15) | (high[e] >> 2 * part & 3) << 4) - 32;
        out.scale = half_at(block + 208) * scales[0], out.second = half_at(block + 208) * scales[1];
        return out;
    }
};

template <typename F>
__device__ __forceinline__ void write(const PackArgs& a, int row, int i, const Group& group) {
    const int at = a.pairs ? row / 8 * ROWS + row % 8 + (a.first ? 8 : 0) : a.first + row;
    const int r = at % ROWS, k = i * 32 % COLUMNS;
    uint8_t* tile = const_cast<uint8_t*>(tile_at<F>(a.out, at, i * 32, a.across));
#pragma unroll
    for (int c = 0; c < 32; c += 8) {
        uint64_t words = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            // 8-bit levels with a zero point are stored less 128.
            const int flip = F::BITS == 8 && F::SCALES == Scales::Zero ? 0x80 : 0;
            constexpr int MASK = F::BITS == 4 ? 15 : 255;
            words |= static_cast<uint64_t>((group.q[c + e] ^ flip) & MASK) << level_shift<F>(e);
        }
        *reinterpret_cast<uint32_t*>(tile + word_at<F>(r, k + c)) = words;
        if (F::BITS == 8) *reinterpret_cast<uint32_t*>(tile + word_at<F>(r, k + c + 4)) = words >> 32;
    }
    if (k % F::GROUP) return;
    uint32_t* words = reinterpret_cast<uint32_t*>(tile + F::LEVELS);
    const int word = k / F::GROUP * 8 + (r & 7), half = r >> 3;
    if constexpr (F::SCALES == Scales::Full) {
        words[4 * word + half] = __float_as_uint(group.scale);
        words[4 * word + 2 + half] = __float_as_uint(group.offset);
    } else if constexpr (F::SCALES == Scales::Plain) {
        words[2 * word + half] = __float_as_uint(group.scale);
        if (F::GROUP == 16) words[2 * (word + 8) + half] = __float_as_uint(group.second);
    } else if constexpr (F::SCALES == Scales::Pair) {
        words[2 * word + half] = pack2<f16>(group.scale, group.offset);
    } else {
        words[2 * word + half] =
            (__float_as_uint(group.scale) & 0xffffff00u) | static_cast<uint32_t>(group.offset);
    }
}

// Blocks of a file: in[rows, K] in format S.
template <typename F, typename S>
__device__ __forceinline__ void pack(const PackArgs& a) {
    const int64_t groups = a.k / 32, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.rows * groups;
         i += step) {
        const int row = i / groups, group = i % groups;
        write<F>(a, a.row + row, group,
                 S::read(static_cast<const uint8_t*>(a.in) + row * a.row_bytes, group));
    }
}

// Levels that depend on the seed and on where they lie, with `scale` and a mean of 0.
template <typename F>
__device__ __forceinline__ void make_up(const PackArgs& a) {
    const int64_t groups = a.k / 32, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.rows * groups;
         i += step) {
        Group group;
        uint64_t state = (i + 1) * 0x9E3779B97F4A7C15ull + a.seed;
        const int top = F::BITS == 4 ? 15 : F::OFFSET ? 31 : 255;
        for (int e = 0; e < 32; e++) {
            // SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
            uint64_t z = state += 0x9E3779B97F4A7C15ull;
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
            z = (z ^ z >> 27) * 0x94D049BB133111EBull;
            group.q[e] = (z ^ z >> 31) >> 32 & top;
        }
        group.scale = group.second = a.scale;
        group.offset = F::SCALES == Scales::Zero ? (top + 1) / 2 : -a.scale * top / 2;
        write<F>(a, i / groups, i % groups, group);
    }
}

__device__ __forceinline__ void store8(bf16* to, const float (&v)[8]) {
    uint4 out;
    out.x = pack2<bf16>(v[0], v[1]), out.y = pack2<bf16>(v[2], v[3]);
    out.z = pack2<bf16>(v[4], v[5]), out.w = pack2<bf16>(v[6], v[7]);
    *reinterpret_cast<uint4*>(to) = out;
}

// out[rows, K] bf16: rows of the packed matrix; of pairs, in turn as bf16 GEMMs take them. A block has a tile
// at a time, a thread eight columns of it; neighbouring threads read neighbouring words.
template <typename F>
__device__ __forceinline__ void expand(const ExpandArgs& a) {
    const int e = threadIdx.x, lane = F::BITS == 4 ? e % 128 / 4 : e % 64 / 2;
    const int block = F::BITS == 4 ? e / 128 * 2 + e % 4 / 2 : e / 64;
    const int r = lane / 4 + 8 * (e % 2), k = block * 32 + lane % 4 * 8;
    const int within = a.pairs ? 2 * (r % 8) + r / 8 : r;
    const int tiles = (a.rows + ROWS - 1) / ROWS * a.across;
    pdl_wait();
    pdl_launch();
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int row = tile / a.across * ROWS + within, column = tile % a.across * COLUMNS + k;
        if (row >= a.rows || column >= a.k) continue;
        float v[8];
        values<F>(static_cast<const uint8_t*>(a.w) + static_cast<int64_t>(tile) * F::BYTES, r, k, v);
        store8(static_cast<bf16*>(a.out) + static_cast<int64_t>(row) * a.k + column, v);
    }
}

// out[i] = row ids[i], bf16, one block each; an id outside the matrix leaves zeros.
template <typename F>
__device__ __forceinline__ void take(const ExpandArgs& a) {
    pdl_wait();
    pdl_launch();
    const int id = a.ids[blockIdx.x];
    for (int k = threadIdx.x * 8; k < a.k; k += blockDim.x * 8) {
        float v[8] = {};
        if (id >= 0 && id < a.rows) values<F>(tile_at<F>(a.w, id, k, a.across), id % ROWS, k % COLUMNS, v);
        store8(static_cast<bf16*>(a.out) + static_cast<int64_t>(blockIdx.x) * a.k + k, v);
    }
}

using INT4_32 = Int<4, 32>;
using INT4_64 = Int<4, 64>;
using INT4_128 = Int<4, 128>;
using INT8_32 = Int<8, 32>;
using INT8_64 = Int<8, 64>;
using INT8_128 = Int<8, 128>;

}  // namespace packed

#define PACK(FORMAT, BITS, SCALES, GROUP, SOURCE)                                           \
    extern "C" __global__ void __launch_bounds__(256) pack_##FORMAT(packed::PackArgs a) {   \
        packed::pack<packed::Form<BITS, packed::Scales::SCALES, GROUP>, packed::SOURCE>(a); \
    }
#define FORM_KERNELS(FORM, BITS, SCALES, GROUP)                                             \
    extern "C" __global__ void __launch_bounds__(256) make_up_##FORM(packed::PackArgs a) {  \
        packed::make_up<packed::Form<BITS, packed::Scales::SCALES, GROUP>>(a);              \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) expand_##FORM(packed::ExpandArgs a) { \
        packed::expand<packed::Form<BITS, packed::Scales::SCALES, GROUP>>(a);               \
    }                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) take_##FORM(packed::ExpandArgs a) {   \
        packed::take<packed::Form<BITS, packed::Scales::SCALES, GROUP>>(a);                 \
    }

// variant pack_int4_g32: from=int4_g32
PACK(int4_g32, 4, Zero, 32, INT4_32)
// variant pack_int4_g64: from=int4_g64
PACK(int4_g64, 4, Zero, 64, INT4_64)
// variant pack_int4_g128: from=int4_g128
PACK(int4_g128, 4, Zero, 128, INT4_128)
// variant pack_int8_g32: from=int8_g32
PACK(int8_g32, 8, Zero, 32, INT8_32)
// variant pack_int8_g64: from=int8_g64
PACK(int8_g64, 8, Zero, 64, INT8_64)
// variant pack_int8_g128: from=int8_g128
PACK(int8_g128, 8, Zero, 128, INT8_128)
// variant pack_q4_0: from=q4_0
PACK(q4_0, 4, Zero, 32, Q4_0)
// variant pack_q4_1: from=q4_1
PACK(q4_1, 4, Pair, 32, Q4_1)
// variant pack_q4_k: from=q4_k
PACK(q4_k, 4, Full, 32, Q4_K)
// variant pack_q5_0: from=q5_0
PACK(q5_0, 8, Zero, 32, Q5_0)
// variant pack_q5_1: from=q5_1
PACK(q5_1, 8, Pair, 32, Q5_1)
// variant pack_q5_k: from=q5_k
PACK(q5_k, 8, Full, 32, Q5_K)
// variant pack_q8_0: from=q8_0
PACK(q8_0, 8, Zero, 32, Q8_0)
// variant pack_q6_k: from=q6_k
PACK(q6_k, 8, Plain, 16, Q6_K)
// variant make_up_int4_g32: form=int4_g32
// variant expand_int4_g32: form=int4_g32
// variant take_int4_g32: form=int4_g32
FORM_KERNELS(int4_g32, 4, Zero, 32)
// variant make_up_int4_g64: form=int4_g64
// variant expand_int4_g64: form=int4_g64
// variant take_int4_g64: form=int4_g64
FORM_KERNELS(int4_g64, 4, Zero, 64)
// variant make_up_int4_g128: form=int4_g128
// variant expand_int4_g128: form=int4_g128
// variant take_int4_g128: form=int4_g128
FORM_KERNELS(int4_g128, 4, Zero, 128)
// variant make_up_int4_pair: form=int4_pair
// variant expand_int4_pair: form=int4_pair
// variant take_int4_pair: form=int4_pair
FORM_KERNELS(int4_pair, 4, Pair, 32)
// variant make_up_int4_full: form=int4_full
// variant expand_int4_full: form=int4_full
// variant take_int4_full: form=int4_full
FORM_KERNELS(int4_full, 4, Full, 32)
// variant make_up_int8_g32: form=int8_g32
// variant expand_int8_g32: form=int8_g32
// variant take_int8_g32: form=int8_g32
FORM_KERNELS(int8_g32, 8, Zero, 32)
// variant make_up_int8_g64: form=int8_g64
// variant expand_int8_g64: form=int8_g64
// variant take_int8_g64: form=int8_g64
FORM_KERNELS(int8_g64, 8, Zero, 64)
// variant make_up_int8_g128: form=int8_g128
// variant expand_int8_g128: form=int8_g128
// variant take_int8_g128: form=int8_g128
FORM_KERNELS(int8_g128, 8, Zero, 128)
// variant make_up_int8_pair: form=int8_pair
// variant expand_int8_pair: form=int8_pair
// variant take_int8_pair: form=int8_pair
FORM_KERNELS(int8_pair, 8, Pair, 32)
// variant make_up_int8_full: form=int8_full
// variant expand_int8_full: form=int8_full
// variant take_int8_full: form=int8_full
FORM_KERNELS(int8_full, 8, Full, 32)
// variant make_up_int8_g16: form=int8_g16
// variant expand_int8_g16: form=int8_g16
// variant take_int8_g16: form=int8_g16
FORM_KERNELS(int8_g16, 8, Plain, 16)
