// Weight formats and the packed layout that every kernel streams.
//
// Output rows are interleaved sixteen at a time: a *tile*. Lane r of a vector belongs to row 16 · tile + r,
// so that a dot product runs down the columns in one accumulator per output element. The order of its
// additions is then the same for any number of tokens, any chunking and any number of threads.
//
// Tiles are contiguous, start on a cache line, and are read from end to end, so that a product is one stream:
// clang-format off
//   f32, f16    value[k][16]
//   bf16        value[k / 2][16][2]: two columns of a row share a 32-bit lane, as the dot instructions want
//   q4_1        a block after another: scale[16] f16, min[16] f16, quant[4][16][4]
//   q4_0, q8_0  two blocks after two others, to keep quants on cache lines: scale[2][16] f16, then
//               quant[2][4][16][4] or quant[2][8][16][4]
//   q5_1        q4_1 with high[16][4] after each block's quants; bit s of byte (row, i) is the high bit of
//               element 4 s + i
//   q5_0        q4_0 with such high bits after each block's quants
//   q4_k        a superblock of 256 columns after another: scale[16] f16, min[16] f16, group_scale[8][16] u8,
//               group_min[8][16] u8, then eight blocks as q4_1's quants
//   q5_k        q4_k with q5_1's high bits after each block's quants
//   q6_k        likewise: scale[16] f16 and 32 bytes of nothing, group_scale[16][16] i8 for 16 columns each,
//               then eight blocks: quant[4][16][4] of low nibbles, high[2][16][4]; bits 2s and 2s + 1 of
//               byte (h, row, i) are the high bits of element 16 h + 4 s + i
//   iq4_nl      q4_0 whose nibbles number the entries of a table
//   iq4_xs      q4_k's superblock without minima, group_scale[8][16] i8, nibbles as iq4_nl's
//   q2_k, q3_k  likewise with group_scale[16][16], for 16 columns each: q3_k's i8; q2_k's low nibble is the
//               scale and its high one the minimum. Two or three bits a weight become nibbles
//   int4, int8  a group of 32, 64 or 128 columns after another: word[16] (a float32 scale whose low byte is
//               the zero point), then blocks as q4_1's or q8_0's quants; int8's are less 128
//   fp4_g32     a block after another: half the scale[16] f32, then q4_1's quants. mxfp4 becomes this
//   fp4_g16     the same with a scale for either half of the block: scale[2][16]
//   fp8         a group of 32, 64 or 128 columns after another: scale[16] f32, then E4M3 code[32][16] a block
// clang-format on
// Byte (j, row, i) of a q8_0 block is element 4j + i; of the others it holds element 4j + i in its low and
// element 16 + 4j + i in its high nibble. Four consecutive columns of a row share a 32-bit lane, which is
// what the 8-bit dot instructions sum over. Columns of fp8 are stored one after another, because they are
// multiplied by float32 activations. Rows and blocks past the weight's last ones are zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pega {

constexpr int kTile = 16;    // rows a tile
constexpr int kBlock = 32;   // columns a quantised block
constexpr int kSuper = 256;  // columns a superblock

enum Format : int32_t {
    kF32 = 0,
    kF16 = 1,
    kBF16 = 2,
    kQ8_0 = 3,
    kQ4_1 = 4,
    kQ4_0 = 5,
    kQ4_K = 6,
    kQ6_K = 7,
    kQ5_0 = 8,
    kQ5_1 = 9,
    kQ5_K = 10,
    kIQ4_NL = 11,
    kIQ4_XS = 12,
    kQ2_K = 13,
    kQ3_K = 14,
    kInt4 = 15,
    kInt8 = 16,
    kFp4_16 = 17,
    kFp4_32 = 18,
    kMXFP4 = 19,
    kFp8 = 20,
    kLastFormat = kFp8
};

// Added to kInt4, kInt8 and kFp8 in the numbers that callers pass: log2 of a group's blocks.
constexpr int kGroupShift = 8;

// Values of the nibbles of iq4_nl and iq4_xs, of twice those of fp4, and of q2_k and q3_k.
alignas(16) constexpr int8_t kIQ4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};
alignas(16) constexpr int8_t kFp4Table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr int8_t kQ2Table[16] = {0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
alignas(16) constexpr int8_t kQ3Table[16] = {-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0};

// A matrix, or a stack of matrices of one shape whose tiles lie one matrix after another.
struct Packed {
    int32_t format;
    int64_t count;       // matrices
    int64_t n, k;        // rows, columns of each
    int64_t tiles;       // of each: ceil(n / 16)
    int64_t tile_bytes;  // a multiple of 64
    uint8_t* data;       // 64-byte aligned
    int32_t shift;       // int4, int8, fp8: log2 of a group's blocks

    const uint8_t* tile(int64_t i) const { return data + i * tile_bytes; }
};

// Where block `b` of a tile lies.
struct Block {
    const uint16_t *scale, *min;  // [16] f16; min: of q4_1 and q5_1 only
    const uint8_t *quant, *high;  // high: of q5_0 and q5_1 only
};

static inline bool has_fifth_bits(int32_t format) {
    return format >= kQ5_0 && format <= kQ5_K;
}

// Formats whose blocks have a minimum of their own.
static inline bool has_block_mins(int32_t format) {
    return format == kQ4_1 || format == kQ5_1;
}

// Bytes of a block's quants with their high bits, for sixteen rows.
static inline int64_t quant_bytes(int32_t format) {
    return format == kQ8_0 || format == kInt8 || format == kFp8 ? 512 : has_fifth_bits(format) ? 320 : 256;
}

static inline Block block_at(int32_t format, const uint8_t* tile, int64_t b) {
    const int64_t quants = quant_bytes(format), odd = b & 1;
    if (has_block_mins(format)) {
        const uint8_t* p = tile + (64 + quants) * b;
        return {reinterpret_cast<const uint16_t*>(p), reinterpret_cast<const uint16_t*>(p + 32), p + 64,
                p + 64 + 256};
    }
    const uint8_t *pair = tile + (b >> 1) * (64 + 2 * quants), *quant = pair + 64 + odd * quants;
    return {reinterpret_cast<const uint16_t*>(pair + 32 * odd), nullptr, quant, quant + 256};
}

static inline bool has_superblocks(int32_t format) {
    return format == kQ4_K || format == kQ5_K || format == kQ6_K || (format >= kIQ4_XS && format <= kQ3_K);
}

// Where block `b` of a tile of superblocks lies, and what its superblock has for it.
struct SubBlock {
    const uint16_t *scale, *min;   // [16] f16, of the superblock; min: unused by q6_k, q3_k and iq4_xs
    const uint8_t *scales, *mins;  // q4_k, q5_k: [16] u8 each; iq4_xs: [16] i8; the others: [2][16], no mins
    const uint8_t *quant, *high;   // high: of q5_k and q6_k only
};

// Bytes of a superblock, for sixteen rows.
static constexpr int64_t super_bytes(int32_t format) {
    return 64 + 256 + 8 * (format == kQ5_K ? 320 : format == kQ6_K ? 384 : 256);
}

static inline SubBlock sub_block_at(int32_t format, const uint8_t* tile, int64_t b) {
    const uint8_t *p = tile + b / 8 * super_bytes(format), *groups = p + 64, *quants = groups + 256;
    const auto* scale = reinterpret_cast<const uint16_t*>(p);
    const int64_t i = b % 8;
    if (format == kQ6_K)
        return {scale, nullptr, groups + 32 * i, nullptr, quants + 384 * i, quants + 384 * i + 256};
    const uint8_t* quant = quants + quant_bytes(format) * i;
    if (format == kQ2_K || format == kQ3_K)
        return {scale, scale + 16, groups + 32 * i, nullptr, quant, nullptr};
    return {scale, scale + 16, groups + 16 * i, groups + 128 + 16 * i, quant, quant + 256};
}

static inline bool has_words(int32_t format) {
    return format >= kInt4 && format <= kFp8;
}

// Formats whose groups of 32, 64 or 128 columns differ in the shift.
static inline bool has_groups(int32_t format) {
    return format == kInt4 || format == kInt8 || format == kFp8;
}

// Bytes before the quants of a group of int4, int8, fp4 or fp8, for sixteen rows.
static inline int64_t word_bytes(int32_t format) {
    return format == kFp4_16 ? 128 : 64;
}

// Where block `b` of a tile of int4, int8, fp4 or fp8 lies: its group's words and its quants.
struct GroupBlock {
    const uint8_t *words, *quant;
};

static inline GroupBlock group_block_at(int32_t format, int32_t shift, const uint8_t* tile, int64_t b) {
    const int64_t quants = quant_bytes(format), head = word_bytes(format);
    const uint8_t* p = tile + (b >> shift) * (head + (quants << shift));
    return {p, p + head + (b & ((1 << shift) - 1)) * quants};
}

static inline bool is_quantised(int32_t format) {
    return format >= kQ8_0;
}

static inline float bits_to_float(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t float_to_bits(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}

static inline float bf16_to_float(uint16_t h) {
    return bits_to_float(static_cast<uint32_t>(h) << 16);
}

// To the nearest, ties to even; NaN stays NaN.
static inline uint16_t float_to_bf16(float f) {
    const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7fffffffu;
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<uint16_t>(magnitude > 0x7f800000u ? 0x7fc0u : nearest);
}

static inline float f16_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (magnitude << 13));  // inf, NaN
    // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and is exact for subnormals too.
    return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * bits_to_float(0x77800000u)));
}

// What a KV cache or a recurrent state holds.
enum KvFormat : int32_t { kKvF32 = 0, kKvF16 = 1, kKvE4M3 = 2, kStateBF16 = 3 };

constexpr int kv_bytes(int32_t format) {
    return format == kKvF32 ? 4 : format == kKvF16 ? 2 : 1;
}

// An 8-bit float of 4 bits of exponent and 3 of mantissa, without infinities. As a float16 whose exponent is
// 8 too small it keeps its small values; NaN is all ones.
static inline float e4m3_to_float(uint8_t x) {
    const uint32_t magnitude = x & 0x7fu, nan = magnitude == 0x7fu ? 0x7c00u : 0;
    return 256 * f16_to_float(static_cast<uint16_t>((x & 0x80u) << 8 | magnitude << 7 | nan));
}

constexpr float kLargestE4M3 = 448;

// Rounds to the nearest, ties to even. What lies past the largest becomes the largest; NaN stays.
static inline uint8_t float_to_e4m3(float f) {
    const uint32_t bits = float_to_bits(f), sign = bits >> 24 & 0x80u;
    uint32_t a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
    if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448
    if (a < 0x3c800000u) {  // below 2^-6: steps of 2^-9, which are float32's from 2^14 on
        const float shifted = bits_to_float(a) + 16384.0f;
        return static_cast<uint8_t>(sign | (float_to_bits(shifted) - 0x46800000u));
    }
    a += 0xc407ffffu + ((a >> 20) & 1u);  // rebias by -120, round
    return static_cast<uint8_t>(sign | (a >> 20));
}

// 2^-8 times the value of an E4M3 code as float16, which is exact. NaN codes do not occur in weights.
constexpr float kHalfOfE4M3 = 256;
static inline uint16_t e4m3_to_half(uint8_t code) {
    return static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
}

// Rounds to the nearest, ties to even, as VCVTPS2PH does.
static inline uint16_t float_to_f16(float f) {
    const uint32_t bits = float_to_bits(f);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x1ffu));
    if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
    if (a < 0x38800000u) {  // subnormal: add 0.5, read the low bits
        const float shifted = bits_to_float(a) + 0.5f;
        return static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
    }
    a += 0xc8000fffu + ((a >> 13) & 1u);  // rebias by -112, round
    return static_cast<uint16_t>(sign | (a >> 13));
}

}  // namespace pega
