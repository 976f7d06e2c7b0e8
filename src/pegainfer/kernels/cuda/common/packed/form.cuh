// Quantised matrices in the layout that the kernels of this folder read.
//
// A matrix [N, K] is cut into tiles of 16 rows by 128 columns, tile after tile along K. A tile holds its
// levels as fragments of mma.m16n8k16, then the scales of its groups. The order of k within a GEMM is free as
// long as both operands share it: lane 4 g + t of a warp holds columns 8 t … 8 t + 7 of every 32, of rows g
// and g + 8, so that a lane reads 16 contiguous bytes. Rows and columns past the matrix have scale 0.
//
//   4 bits: [2 halves of 64 columns][32 lanes][2 blocks of 32 columns][rows g, g + 8]: words of 8 levels, of
//           which the low half holds the even ones
//   8 bits: [4 blocks of 32 columns][32 lanes][rows g, g + 8][2]: words of 4 levels, in the order 0 2 1 3
//   scales: [groups of the 128 columns][g][rows g, g + 8] words; Full: two scales, then two offsets
//
// In groups of 16 columns, lane 4 g + t holds columns 4 t … 4 t + 3 of either 16 of a block instead, so that
// each product of 16 columns is within a group.
//
// A level q is worth (q - zero) · scale (Zero), q · scale (Plain), or q · scale + offset (Pair, Full). 8-bit
// levels of Zero are stored less 128, as signed bytes. The zero point of 4-bit levels is at most 128: files
// have 0 … 16.
#pragma once
#include "ptx.cuh"

namespace packed {

enum class Scales {
    Plain,  // a float32; 8-bit levels are signed bytes
    Zero,   // a float32 whose low byte is the zero point
    Pair,   // scale and offset in float16
    Full,   // scale and offset in float32
};

constexpr int ROWS = 16, COLUMNS = 128;  // of a tile

template <int BITS_, Scales SCALES_, int GROUP_>
struct Form {
    static constexpr int BITS = BITS_, GROUP = GROUP_;  // GROUP: columns that share a scale
    static constexpr Scales SCALES = SCALES_;
    static constexpr bool OFFSET = SCALES == Scales::Pair || SCALES == Scales::Full;
    static constexpr int LEVELS = ROWS * COLUMNS * BITS / 8;  // bytes
    static constexpr int WORD = SCALES == Scales::Full ? 8 : 4;
    static constexpr int BYTES = LEVELS + COLUMNS / GROUP * ROWS * WORD;  // of a tile
};

// What a group's levels are multiplied by, and what is added.
struct Scale {
    float scale, offset;
};

// The scale of row r and the group of column k, both within the tile. For Zero the offset is the zero point.
template <typename F>
__device__ __forceinline__ Scale scale_of(const uint8_t* tile, int r, int k) {
    const int at = k / F::GROUP * 8 + (r & 7), half = r >> 3;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(tile + F::LEVELS);
    if constexpr (F::SCALES == Scales::Full)
        return {__uint_as_float(words[4 * at + half]), __uint_as_float(words[4 * at + 2 + half])};
    const uint32_t word = words[2 * at + half];
    if constexpr (F::SCALES == Scales::Plain) return {__uint_as_float(word), 0};
    if constexpr (F::SCALES == Scales::Zero)
        return {__uint_as_float(word & 0xffffff00u), static_cast<float>(word & 0xff)};
    const float2 pair = unpack2<f16>(word);
    return {pair.x, pair.y};
}

// Where the word of row r that begins with column k lies in a tile: of 8 levels of 4 bits, 4 of 8 bits.
template <typename F>
__device__ __forceinline__ int word_at(int r, int k) {
    const int block = k / 32, half = r >> 3;
    const int lane = (r & 7) * 4 + (F::GROUP == 16 ? k % 16 / 4 : k % 32 / 8);
    const int second = F::GROUP == 16 ? k % 32 / 16 : k % 8 / 4;
    return F::BITS == 4 ? block / 2 * 512 + lane * 16 + (block % 2 * 2 + half) * 4
                        : block * 512 + lane * 16 + half * 8 + second * 4;
}

// Where level i of eight lies in its words, in bits from the first word's lowest.
template <typename F>
__device__ __forceinline__ int level_shift(int i) {
    if constexpr (F::BITS == 4) return i / 2 * 4 + i % 2 * 16;
    return i / 4 * 32 + i % 4 / 2 * 8 + i % 2 * 16;
}

// The values of row r and columns k … k + 7 of a tile.
template <typename F>
__device__ __forceinline__ void values(const uint8_t* tile, int r, int k, float (&out)[8]) {
    const Scale s = scale_of<F>(tile, r, k);
    const uint32_t low = *reinterpret_cast<const uint32_t*>(tile + word_at<F>(r, k));
    const uint32_t high = F::BITS == 8 ? *reinterpret_cast<const uint32_t*>(tile + word_at<F>(r, k + 4)) : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int shift = level_shift<F>(i);
        const uint32_t word = shift < 32 ? low >> shift : high >> (shift - 32);
        const float q = F::BITS == 4 ? static_cast<int>(word & 15) : static_cast<int8_t>(word & 255);
        constexpr float BASE = F::BITS == 8 ? 128.f : 0.f;
        out[i] = F::SCALES == Scales::Zero ? (q + (BASE - s.offset)) * s.scale : fmaf(q, s.scale, s.offset);
    }
}

// The tile of a packed matrix with `across` tiles of columns that holds row `row` and column k.
template <typename F>
__device__ __forceinline__ const uint8_t* tile_at(const void* w, int row, int k, int across) {
    return static_cast<const uint8_t*>(w) +
           (static_cast<int64_t>(row / ROWS) * across + k / COLUMNS) * F::BYTES;
}

}  // namespace packed
