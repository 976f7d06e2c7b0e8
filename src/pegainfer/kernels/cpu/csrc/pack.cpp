#include "pack.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace pega {

namespace {

struct Layout {
    int elements, bytes;  // a block in the file
    int scales, mins;     // bytes before the values: f16 scale, f16 minimum
    int fifths;           // then bytes of fifth bits, bit i of element i
};

constexpr Layout kLayouts[] = {
    {1, 4, 0, 0, 0},     {1, 2, 0, 0, 0},     {1, 2, 0, 0, 0},      // f32, f16, bf16
    {32, 34, 2, 0, 0},   {32, 20, 2, 2, 0},   {32, 18, 2, 0, 0},    // q8_0, q4_1, q4_0
    {256, 144, 0, 0, 0}, {256, 210, 0, 0, 0},                       // q4_k, q6_k
    {32, 22, 2, 0, 4},   {32, 24, 2, 2, 4},   {256, 176, 0, 0, 0},  // q5_0, q5_1, q5_k
    {32, 18, 2, 0, 0},   {256, 136, 0, 0, 0},                       // iq4_nl, iq4_xs
    {256, 84, 0, 0, 0},  {256, 110, 0, 0, 0},                       // q2_k, q3_k
    {32, 20, 0, 0, 0},   {32, 36, 0, 0, 0},                         // int4, int8 in groups of 32
    {32, 24, 0, 0, 0},   {32, 20, 0, 0, 0},   {32, 17, 0, 0, 0},    // fp4_g16, fp4_g32, mxfp4
    {32, 36, 0, 0, 0},                                              // fp8 in groups of 32
};

int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

// Whether all sixteen rows of a tile exist.
bool is_full(const uint8_t* const rows[kTile]) {
    return std::all_of(rows, rows + kTile, [](const uint8_t* row) { return row != nullptr; });
}

constexpr int kWords = 16;  // 32-bit words of a cache line

// Transposes the sixteen words at byte `at` of each row: [16 rows][16] -> [16][16 rows]. A row is read a
// cache line at a time, which is twice as fast as a word at a time.
void transpose_words(const uint8_t* const rows[kTile], int64_t at, uint8_t* out) {
    uint32_t words[kTile][kWords], turned[kWords][kTile];
    for (int r = 0; r < kTile; r++) std::memcpy(words[r], rows[r] + at, sizeof words[r]);
    for (int i = 0; i < kWords; i++)
        for (int r = 0; r < kTile; r++) turned[i][r] = words[r][i];
    std::memcpy(out, turned, sizeof turned);
}

// The first `words` 32-bit words of each row, as far as they are whole cache lines of all sixteen rows.
// Returns how many words of a row that were.
int64_t pack_lines(const uint8_t* const rows[kTile], uint8_t* out, int64_t words) {
    if (!is_full(rows)) return 0;
    int64_t done = 0;
    for (; done + kWords <= words; done += kWords) transpose_words(rows, 4 * done, out + 4 * kTile * done);
    return done;
}

// One element of `size` bytes per column: [16][k] -> [k][16].
void pack_plain(const Packed& w, const uint8_t* const rows[kTile], uint8_t* out, int64_t size) {
    int64_t k = size == 4 ? pack_lines(rows, out, w.k) : 0;
    for (out += size * kTile * k; k < w.k; k++)
        for (int r = 0; r < kTile; r++, out += size)
            if (rows[r] != nullptr) std::memcpy(out, rows[r] + k * size, static_cast<size_t>(size));
}

// bf16 two columns at a time: [16][k] -> [k / 2][16][2]; an odd last column has a zero beside it.
void pack_pairs(const Packed& w, const uint8_t* const rows[kTile], uint8_t* out) {
    int64_t k = 2 * pack_lines(rows, out, w.k / 2);
    for (out += 2 * kTile * k; k < w.k; k += 2)
        for (int r = 0; r < kTile; r++, out += 4)
            if (rows[r] != nullptr) std::memcpy(out, rows[r] + 2 * k, k + 1 < w.k ? 4 : 2);
}

// high: [16][4] of the tile, at the row's four bytes. `set` says whether element i has its fifth bit.
template <class Set>
void pack_fifths(uint8_t* high, Set set) {
    for (int i = 0; i < kBlock; i++) high[i % 4] |= static_cast<uint8_t>(set(i) << i / 4);
}

// Of a format that is known to the compiler, so that copies of a few bytes are moves.
template <int32_t kFormat>
void pack_blocks_of(const Packed& w, const uint8_t* const rows[kTile], uint8_t* tile) {
    constexpr Layout f = kLayouts[kFormat];
    constexpr int data = f.bytes - f.scales - f.mins - f.fifths;
    for (int r = 0; r < kTile; r++) {
        if (rows[r] == nullptr) continue;
        for (int64_t b = 0; b < w.k / kBlock; b++) {
            const uint8_t* in = rows[r] + b * f.bytes;
            const Block to = block_at(kFormat, tile, b);
            // The block is within the tile that is being written.
            std::memcpy(const_cast<uint16_t*>(to.scale) + r, in, 2);
            if (f.mins != 0) std::memcpy(const_cast<uint16_t*>(to.min) + r, in + 2, 2);
            auto* out = const_cast<uint8_t*>(to.quant) + 4 * r;
            for (int i = 0; i < data / 4; i++) std::memcpy(out + 64 * i, in + f.bytes - data + 4 * i, 4);
            if (f.fifths == 0) continue;
            const uint8_t* fifth = in + f.scales + f.mins;
            pack_fifths(const_cast<uint8_t*>(to.high) + 4 * r,
                        [fifth](int i) { return fifth[i / 8] >> i % 8 & 1; });
        }
    }
}

void pack_blocks(const Packed& w, const uint8_t* const rows[kTile], uint8_t* tile) {
    switch (w.format) {
        case kQ8_0:
            return pack_blocks_of<kQ8_0>(w, rows, tile);
        case kQ4_1:
            return pack_blocks_of<kQ4_1>(w, rows, tile);
        case kQ4_0:
            return pack_blocks_of<kQ4_0>(w, rows, tile);
        case kQ5_0:
            return pack_blocks_of<kQ5_0>(w, rows, tile);
        case kQ5_1:
            return pack_blocks_of<kQ5_1>(w, rows, tile);
        case kIQ4_NL:
            return pack_blocks_of<kIQ4_NL>(w, rows, tile);
        default:
            break;
    }
}

// The 6-bit scale and minimum of group g, out of the twelve bytes of a q4_k or q5_k superblock: those of the
// first four groups have a byte each, whose two high bits complete the nibbles of the others.
void group_scales(const uint8_t* s, int g, uint8_t* scale, uint8_t* min) {
    const bool late = g >= 4;
    *scale = static_cast<uint8_t>(late ? (s[g + 4] & 15) | s[g - 4] >> 6 << 4 : s[g] & 63);
    *min = static_cast<uint8_t>(late ? s[g + 4] >> 4 | s[g] >> 6 << 4 : s[g + 4] & 63);
}

// A q4_k or q5_k superblock of a row as eight blocks, its groups.
void pack_groups(int32_t format, const uint8_t* in, uint8_t* tile, int64_t super, int r) {
    const uint8_t *fifths = in + 16, *nibbles = format == kQ5_K ? fifths + 32 : fifths;
    for (int g = 0; g < 8; g++) {
        const SubBlock to = sub_block_at(format, tile, 8 * super + g);
        std::memcpy(const_cast<uint16_t*>(to.scale) + r, in, 2);
        std::memcpy(const_cast<uint16_t*>(to.min) + r, in + 2, 2);
        group_scales(in + 4, g, const_cast<uint8_t*>(to.scales) + r, const_cast<uint8_t*>(to.mins) + r);
        auto* out = const_cast<uint8_t*>(to.quant) + 4 * r;
        const uint8_t* q = nibbles + 32 * (g / 2);  // group g is in the low or the high nibbles
        const int shift = 4 * (g % 2);
        for (int i = 0; i < 16; i++)
            out[64 * (i / 4) + i % 4] =
                static_cast<uint8_t>((q[i] >> shift & 15) | (q[16 + i] >> shift & 15) << 4);
        if (format == kQ5_K)
            pack_fifths(const_cast<uint8_t*>(to.high) + 4 * r, [=](int i) { return fifths[i] >> g & 1; });
    }
}

// A q6_k superblock: per half 64 bytes of nibbles and 32 of bit pairs; row g of 32 elements takes bits 2g, 2g
// + 1.
void pack_q6_k(const uint8_t* in, uint8_t* tile, int64_t super, int r) {
    for (int b = 0; b < 8; b++) {
        const SubBlock to = sub_block_at(kQ6_K, tile, 8 * super + b);
        const int half = b / 4, g = b % 4;
        const uint8_t *low = in + 64 * half + 32 * (g % 2), *pairs = in + 128 + 32 * half;
        std::memcpy(const_cast<uint16_t*>(to.scale) + r, in + 208, 2);
        auto* scales = const_cast<uint8_t*>(to.scales) + r;
        scales[0] = in[192 + 2 * b];
        scales[16] = in[192 + 2 * b + 1];
        auto *out = const_cast<uint8_t*>(to.quant) + 4 * r, *high = const_cast<uint8_t*>(to.high) + 4 * r;
        for (int i = 0; i < kBlock; i++) {
            const int nibble = low[i] >> (g < 2 ? 0 : 4) & 15, pair = pairs[i] >> 2 * g & 3, j = i % 16 / 4;
            out[64 * j + i % 4] |= static_cast<uint8_t>(nibble << (i < 16 ? 0 : 4));
            high[64 * (i / 16) + i % 4] |= static_cast<uint8_t>(pair << 2 * j);
        }
    }
}

// Elements 0 … 31 of a block, of which `at` gives each, as nibbles at the row's bytes of the tile.
template <class At>
void pack_nibbles(uint8_t* out, At at) {
    for (int i = 0; i < 16; i++) out[64 * (i / 4) + i % 4] = static_cast<uint8_t>(at(i) | at(16 + i) << 4);
}

// The 6-bit scales of q3_k's sixteen groups: low nibbles in eight bytes, then high pairs in four.
int q3_scale(const uint8_t* s, int g) {
    const int nibble = s[g % 8] >> (g < 8 ? 0 : 4) & 15, pair = s[8 + g % 4] >> 2 * (g / 4) & 3;
    return (nibble | pair << 4) - 32;
}

// Superblocks of two or three bits: pairs as q6_k's, in 64 bytes; q3_k's third bit i of row g stands at bit g
// of byte i.
void pack_few_bits(int32_t format, const uint8_t* in, uint8_t* tile, int64_t super, int r) {
    const bool three = format == kQ3_K;
    const uint8_t *pairs = in + (three ? 32 : 16), *d = in + (three ? 108 : 80);
    for (int b = 0; b < 8; b++) {
        const SubBlock to = sub_block_at(format, tile, 8 * super + b);
        std::memcpy(const_cast<uint16_t*>(to.scale) + r, d, 2);
        if (!three) std::memcpy(const_cast<uint16_t*>(to.min) + r, d + 2, 2);
        auto* scales = const_cast<uint8_t*>(to.scales) + r;
        for (int h = 0; h < 2; h++)
            scales[16 * h] = three ? static_cast<uint8_t>(q3_scale(in + 96, 2 * b + h)) : in[2 * b + h];
        const uint8_t* q = pairs + 32 * (b / 4);
        pack_nibbles(const_cast<uint8_t*>(to.quant) + 4 * r,
                     [=](int i) { return (q[i] >> 2 * (b % 4) & 3) | (three ? (in[i] >> b & 1) << 2 : 0); });
    }
}

void pack_iq4_xs(const uint8_t* in, uint8_t* tile, int64_t super, int r) {
    uint16_t high;
    std::memcpy(&high, in + 2, 2);
    for (int b = 0; b < 8; b++) {
        const SubBlock to = sub_block_at(kIQ4_XS, tile, 8 * super + b);
        std::memcpy(const_cast<uint16_t*>(to.scale) + r, in, 2);
        const int low = in[4 + b / 2] >> 4 * (b % 2) & 15, scale = (low | (high >> 2 * b & 3) << 4) - 32;
        const_cast<uint8_t*>(to.scales)[r] = static_cast<uint8_t>(scale);
        for (int i = 0; i < 4; i++)
            std::memcpy(const_cast<uint8_t*>(to.quant) + 64 * i + 4 * r, in + 8 + 16 * b + 4 * i, 4);
    }
}

// Half the scale of a block of mxfp4, 2^(e - 128), which is subnormal for e below 2.
float half_of_e8m0(uint8_t e) {
    return bits_to_float(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23);
}

// Groups of int4, int8 and fp8, and blocks of fp4: float32 words, then quants.
void pack_words(const Packed& w, const uint8_t* const rows[kTile], uint8_t* tile, int bytes) {
    const int64_t quants = quant_bytes(w.format) / kTile, heads = w.format == kFp4_16 ? 2 : 1;
    const bool is_int8 = w.format == kInt8, is_mxfp4 = w.format == kMXFP4;
    const int64_t head = is_mxfp4 ? 1 : 4 * heads;
    const int64_t each = head + ((bytes - head) << w.shift);
    for (int r = 0; r < kTile; r++)
        for (int64_t b = 0; rows[r] != nullptr && b < w.k / kBlock; b++) {
            const uint8_t* in = rows[r] + (b >> w.shift) * each;
            const GroupBlock to = group_block_at(w.format, w.shift, tile, b);
            auto *words = const_cast<uint8_t*>(to.words) + 4 * r, *quant = const_cast<uint8_t*>(to.quant),
                 *out = quant + 4 * r;
            for (int64_t h = 0; h < heads; h++) {
                float scale = is_mxfp4 ? half_of_e8m0(in[0]) : 0;
                if (!is_mxfp4) std::memcpy(&scale, in + 4 * h, 4);
                if (w.format == kFp4_16 || w.format == kFp4_32) scale *= 0.5f;
                std::memcpy(words + 64 * h, &scale, 4);
            }
            const uint8_t* q = in + head + (b & ((1 << w.shift) - 1)) * quants;
            if (w.format == kFp8) {
                for (int i = 0; i < kBlock; i++) quant[kTile * i + r] = q[i];
                continue;
            }
            for (int64_t i = 0; i < quants; i++)
                out[64 * (i / 4) + i % 4] = static_cast<uint8_t>(is_int8 ? q[i] ^ 0x80 : q[i]);
        }
}

void pack_superblocks(const Packed& w, const uint8_t* const rows[kTile], uint8_t* tile, int bytes) {
    for (int r = 0; r < kTile; r++)
        for (int64_t s = 0; rows[r] != nullptr && s < w.k / kSuper; s++) {
            if (w.format == kQ6_K) {
                pack_q6_k(rows[r] + s * bytes, tile, s, r);
            } else if (w.format == kIQ4_XS) {
                pack_iq4_xs(rows[r] + s * bytes, tile, s, r);
            } else if (w.format == kQ2_K || w.format == kQ3_K) {
                pack_few_bits(w.format, rows[r] + s * bytes, tile, s, r);
            } else {
                pack_groups(w.format, rows[r] + s * bytes, tile, s, r);
            }
        }
}

// Element i of row r: its nibble, and its fifth bit where the format has them.
int level(int32_t format, const uint8_t* quant, const uint8_t* high, int64_t r, int i) {
    const int byte = quant[64 * (i % 16 / 4) + 4 * r + i % 4], nibble = i < 16 ? byte & 15 : byte >> 4;
    return has_fifth_bits(format) ? nibble | (high[4 * r + i % 4] >> i / 4 & 1) << 4 : nibble;
}

void unpack_words(const Packed& w, const GroupBlock& b, int64_t r, float* out) {
    for (int i = 0; i < kBlock; i++) {
        const int64_t half = w.format == kFp4_16 ? i / 16 : 0;
        uint32_t bits;
        std::memcpy(&bits, b.words + 64 * half + 4 * r, 4);
        if (w.format == kFp8) {
            out[i] = f16_to_float(e4m3_to_half(b.quant[kTile * i + r])) * (kHalfOfE4M3 * bits_to_float(bits));
        } else if (w.format == kInt4 || w.format == kInt8) {
            const int q = w.format == kInt4 ? level(w.format, b.quant, nullptr, r, i)
                                            : b.quant[64 * (i / 4) + 4 * r + i % 4] ^ 0x80;
            out[i] = static_cast<float>(q - static_cast<int>(bits & 255)) * bits_to_float(bits & ~255u);
        } else {
            const int q = level(w.format, b.quant, nullptr, r, i);
            out[i] = static_cast<float>(kFp4Table[q]) * bits_to_float(bits);
        }
    }
}

// Superblocks of nibbles that have no fifth bits or minima of 6 bits: iq4_xs, q2_k, q3_k.
void unpack_table(int32_t format, const SubBlock& b, int64_t r, float* out) {
    const float d = f16_to_float(b.scale[r]);
    for (int i = 0; i < kBlock; i++) {
        const int q = level(format, b.quant, nullptr, r, i);
        const uint8_t scale = b.scales[(format == kIQ4_XS ? 0 : i / 16 * 16) + r];
        if (format == kQ2_K) {
            const float m = f16_to_float(b.min[r]) * static_cast<float>(scale >> 4);
            out[i] = d * static_cast<float>(scale & 15) * static_cast<float>(q) - m;
        } else {
            const int8_t x = format == kIQ4_XS ? kIQ4Table[q] : kQ3Table[q];
            out[i] = d * static_cast<float>(static_cast<int8_t>(scale)) * static_cast<float>(x);
        }
    }
}

void unpack_sub_block(int32_t format, const SubBlock& b, int64_t r, float* out) {
    if (format >= kIQ4_XS) return unpack_table(format, b, r, out);
    const float d = f16_to_float(b.scale[r]);
    const float m = format == kQ6_K ? 0 : f16_to_float(b.min[r]) * static_cast<float>(b.mins[r]);
    for (int i = 0; i < kBlock; i++) {
        const int nibble = level(format, b.quant, b.high, r, i);
        if (format != kQ6_K) {
            out[i] = d * static_cast<float>(b.scales[r]) * static_cast<float>(nibble) - m;
            continue;
        }
        const int pair = b.high[64 * (i / 16) + 4 * r + i % 4] >> 2 * (i % 16 / 4) & 3;
        const auto scale = static_cast<float>(static_cast<int8_t>(b.scales[i / 16 * 16 + r]));
        out[i] = d * scale * static_cast<float>((nibble | pair << 4) - 32);
    }
}

}  // namespace

bool describe(Packed* w, int32_t format, int64_t count, int64_t n, int64_t k) {
    const int32_t shift = format >> kGroupShift;
    format &= (1 << kGroupShift) - 1;
    if (format < kF32 || format > kLastFormat || count <= 0 || n <= 0 || k <= 0) return false;
    if (shift < 0 || shift > (has_groups(format) ? 2 : 0)) return false;
    const Layout& f = kLayouts[format];
    if (k % (static_cast<int64_t>(f.elements) << shift) != 0) return false;
    const int64_t blocks = k / kBlock;
    int64_t bytes = round_up(k * kTile * f.bytes, 64);
    if (format == kBF16) bytes = (k + 1) / 2 * 64;
    if (has_superblocks(format)) {
        bytes = k / kSuper * super_bytes(format);
    } else if (has_words(format)) {
        bytes = (blocks >> shift) * (word_bytes(format) + (quant_bytes(format) << shift));
    } else if (has_block_mins(format)) {
        bytes = blocks * (64 + quant_bytes(format));
    } else if (is_quantised(format)) {
        bytes = (blocks + 1) / 2 * (64 + 2 * quant_bytes(format));
    }
    *w = {format, count, n, k, (n + kTile - 1) / kTile, bytes, nullptr, shift};
    return true;
}

void pack(const Packed& w, const uint8_t* const* all, int threads) {
    const Layout& f = kLayouts[w.format];
    const auto part = [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            uint8_t* tile = w.data + t * w.tile_bytes;
            std::memset(tile, 0, static_cast<size_t>(w.tile_bytes));
            const uint8_t* rows[kTile];
            for (int r = 0; r < kTile; r++) {
                const int64_t row = t % w.tiles * kTile + r;
                rows[r] = row < w.n ? all[t / w.tiles * w.n + row] : nullptr;
            }
            if (has_superblocks(w.format)) {
                pack_superblocks(w, rows, tile, f.bytes);
            } else if (has_words(w.format)) {
                pack_words(w, rows, tile, f.bytes);
            } else if (is_quantised(w.format)) {
                pack_blocks(w, rows, tile);
            } else if (w.format == kBF16) {
                pack_pairs(w, rows, tile);
            } else {
                pack_plain(w, rows, tile, f.bytes);
            }
        }
    };
    std::vector<std::thread> others;
    const int64_t tiles = w.count * w.tiles;
    const int64_t each = std::max<int64_t>(1, (tiles + threads - 1) / threads);
    for (int64_t first = each; first < tiles; first += each)
        others.emplace_back(part, first, std::min(first + each, tiles));
    part(0, std::min(each, tiles));
    for (std::thread& t : others) t.join();
}

void unpack_row(const Packed& w, int64_t row, float* out) {
    const int64_t in_matrix = row % w.n, r = in_matrix % kTile;
    const uint8_t* tile = w.tile(row / w.n * w.tiles + in_matrix / kTile);
    const auto* values = reinterpret_cast<const uint16_t*>(tile) + r;
    switch (w.format) {
        case kF32:
            for (int64_t k = 0; k < w.k; k++) std::memcpy(out + k, tile + 4 * (16 * k + r), 4);
            return;
        case kF16:
            for (int64_t k = 0; k < w.k; k++) out[k] = f16_to_float(values[16 * k]);
            return;
        case kBF16:
            for (int64_t k = 0; k < w.k; k++) out[k] = bf16_to_float(values[k / 2 * 32 + k % 2 + r]);
            return;
        default:
            break;
    }
    for (int64_t b = 0; b < w.k / kBlock; b++, out += kBlock) {
        if (has_superblocks(w.format)) {
            unpack_sub_block(w.format, sub_block_at(w.format, tile, b), r, out);
            continue;
        }
        if (has_words(w.format)) {
            unpack_words(w, group_block_at(w.format, w.shift, tile, b), r, out);
            continue;
        }
        const Block block = block_at(w.format, tile, b);
        const uint8_t* q = block.quant + 4 * r;
        const float d = f16_to_float(block.scale[r]);
        const float m = has_block_mins(w.format) ? f16_to_float(block.min[r]) : 0;
        for (int i = 0; i < kBlock; i++) {
            if (w.format == kQ8_0) {
                out[i] = static_cast<float>(static_cast<int8_t>(q[64 * (i / 4) + i % 4])) * d;
                continue;
            }
            const int nibble = level(w.format, block.quant, block.high, r, i);
            if (w.format == kIQ4_NL) {
                out[i] = static_cast<float>(kIQ4Table[nibble]) * d;
                continue;
            }
            const auto x = static_cast<float>(nibble);
            out[i] = has_block_mins(w.format) ? x * d + m : (x - (w.format == kQ5_0 ? 16 : 8)) * d;
        }
    }
}

}  // namespace pega
