#include "pack.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace pega {

namespace {

struct Layout {
    int elements, bytes;  // a block in the file
    int scales, mins;     // bytes before the values: f16 scale, f16 minimum
};

constexpr Layout kLayouts[] = {
    {1, 4, 0, 0},   {1, 2, 0, 0},   {1, 2, 0, 0},    // f32, f16, bf16
    {32, 34, 2, 0}, {32, 20, 2, 2}, {32, 18, 2, 0},  // q8_0, q4_1, q4_0
};

int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

// One element of `size` bytes per column: [16][k] -> [k][16].
void pack_plain(const Packed& w, const uint8_t* const rows[kTile], uint8_t* out, int64_t size) {
    for (int64_t k = 0; k < w.k; k++)
        for (int r = 0; r < kTile; r++, out += size)
            if (rows[r] != nullptr) std::memcpy(out, rows[r] + k * size, static_cast<size_t>(size));
}

void pack_blocks(const Packed& w, const uint8_t* const rows[kTile], uint8_t* tile, const Layout& f) {
    const int data = f.bytes - f.scales - f.mins;
    for (int r = 0; r < kTile; r++) {
        if (rows[r] == nullptr) continue;
        for (int64_t b = 0; b < w.k / kBlock; b++) {
            const uint8_t* in = rows[r] + b * f.bytes;
            const Block to = block_at(w.format, tile, b);
            // The block is within the tile that is being written.
            std::memcpy(const_cast<uint16_t*>(to.scale) + r, in, 2);
            if (f.mins != 0) std::memcpy(const_cast<uint16_t*>(to.min) + r, in + 2, 2);
            auto* out = const_cast<uint8_t*>(to.quant) + 4 * r;
            for (int i = 0; i < data / 4; i++) std::memcpy(out + 64 * i, in + f.bytes - data + 4 * i, 4);
        }
    }
}

}  // namespace

bool describe(Packed* w, int32_t format, int64_t n, int64_t k) {
    if (format < kF32 || format > kQ4_0 || n <= 0 || k <= 0) return false;
    const Layout& f = kLayouts[format];
    if (k % f.elements != 0) return false;
    const int64_t blocks = k / kBlock;
    int64_t bytes = round_up(k * kTile * f.bytes, 64);
    if (format == kQ4_1) bytes = 320 * blocks;
    if (format == kQ4_0 || format == kQ8_0) bytes = (blocks + 1) / 2 * (64 + 2 * quant_bytes(format));
    *w = {format, n, k, (n + kTile - 1) / kTile, bytes, nullptr};
    return true;
}

void pack(const Packed& w, const uint8_t* raw, const int64_t* order, int threads) {
    const Layout& f = kLayouts[w.format];
    const int64_t row_bytes = w.k / f.elements * f.bytes;
    const auto part = [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; t++) {
            uint8_t* tile = w.data + t * w.tile_bytes;
            std::memset(tile, 0, static_cast<size_t>(w.tile_bytes));
            const uint8_t* rows[kTile];
            for (int r = 0; r < kTile; r++) {
                const int64_t row = t * kTile + r;
                rows[r] = row >= w.n ? nullptr : raw + (order != nullptr ? order[row] : row) * row_bytes;
            }
            if (is_quantised(w.format)) {
                pack_blocks(w, rows, tile, f);
            } else {
                pack_plain(w, rows, tile, f.bytes);
            }
        }
    };
    std::vector<std::thread> others;
    const int64_t each = std::max<int64_t>(1, (w.tiles + threads - 1) / threads);
    for (int64_t first = each; first < w.tiles; first += each)
        others.emplace_back(part, first, std::min(first + each, w.tiles));
    part(0, std::min(each, w.tiles));
    for (std::thread& t : others) t.join();
}

void unpack_row(const Packed& w, int64_t row, float* out) {
    const uint8_t* tile = w.tile(row / kTile);
    const int64_t r = row % kTile;
    const auto* values = reinterpret_cast<const uint16_t*>(tile) + r;
    switch (w.format) {
        case kF32:
            for (int64_t k = 0; k < w.k; k++) std::memcpy(out + k, tile + 4 * (16 * k + r), 4);
            return;
        case kF16:
            for (int64_t k = 0; k < w.k; k++) out[k] = f16_to_float(values[16 * k]);
            return;
        case kBF16:
            for (int64_t k = 0; k < w.k; k++) out[k] = bf16_to_float(values[16 * k]);
            return;
        default:
            break;
    }
    for (int64_t b = 0; b < w.k / kBlock; b++, out += kBlock) {
        const Block block = block_at(w.format, tile, b);
        const uint8_t* q = block.quant + 4 * r;
        const float d = f16_to_float(block.scale[r]);
        const float m = w.format == kQ4_1 ? f16_to_float(block.min[r]) : 0;
        for (int i = 0; i < kBlock; i++) {
            if (w.format == kQ8_0) {
                out[i] = static_cast<float>(static_cast<int8_t>(q[64 * (i / 4) + i % 4])) * d;
                continue;
            }
            const int byte = q[64 * (i % 16 / 4) + i % 4];
            const auto x = static_cast<float>(i < 16 ? byte & 15 : byte >> 4);
            out[i] = w.format == kQ4_1 ? x * d + m : (x - 8) * d;
        }
    }
}

}  // namespace pega
