// What the attention kernels share: operands, the work list, and the sums of a row's parts.
//
// A page holds [2, G, S, D] of one layer: keys, then values. Token i of a row is in page block_table[row, i /
// S]. A row with one query token is decoded, a row with several is prefilled. Long rows are cut into parts
// along their keys; each part leaves its maximum, its sum of weights and its unnormalised output, and
// merge.cuh adds them in their order.
//
// Few decoded rows are cut by their own length, so that a row's bits are the same whoever shares the batch:
// (on Hopper one row alone is sm90/attention/row.cuh's). Many are cut into even shares of all that the step
// reads, one a group of blocks, so that all end together.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"
#include "reduce.cuh"

namespace attention {

// Decoded parts: few keys for short rows, so that one row alone fills the GPU, twice as many for long ones.
constexpr int DECODE_LONG = 1024, DECODE_PARTS = 32;
constexpr int SHARE_KEYS = 64;  // what shares are made of: a page for each of a block's warps
constexpr int PREFILL_PARTS = 16;
constexpr int PREFILL_KEYS = 512;    // no part of a prefill is made for fewer
constexpr int PREFILL_BLOCKS = 256;  // a row whose tiles alone give so many blocks is not cut

// One block's share: part `part` of `parts` of a row (prefill: of its tile of queries). Its sums go to
// `slot` + part; slot is -1 where there is one part only.
struct alignas(16) Item {
    int row, tile, part_of, slot;
    int context;     // keys of the row, this step's included
    int start;       // of the row's tokens in q and out
    int begin, end;  // decode: the part's keys; prefill: 0 and the row's number of query tokens
    __device__ __forceinline__ int part() const { return part_of & 0xffff; }
    __device__ __forceinline__ int parts() const { return part_of >> 16; }
};
static_assert(sizeof(Item) == 32);
__device__ __forceinline__ Item load_item(const Item* p) {
    Item item;
    reinterpret_cast<int4*>(&item)[0] = reinterpret_cast<const int4*>(p)[0];
    reinterpret_cast<int4*>(&item)[1] = reinterpret_cast<const int4*>(p)[1];
    return item;
}

// A decoded row in several parts: its first slot, how many, and its token in the output.
struct alignas(16) Cut {
    int slot, parts, token, pad;
};

// The work list of a step: how many items of each kind. `merges`: prefilled tiles in several parts.
// `expanded`: tiles of keys that sm90/mla expands first.
struct Plan {
    int decode, prefill, merges, expanded;
};

// Depends on the row's own length only: whoever shares the batch, the row's bits are the same.
__device__ __forceinline__ int decode_chunk(int context, int least) {
    const int even = (context + DECODE_PARTS - 1) / DECODE_PARTS;
    return max(context <= DECODE_LONG ? least : 2 * least, (even + 15) / 16 * 16);
}

// Swizzled place of 16-byte piece c of row r in a tile of ROW bytes a row: eight rows, eight banks.
template <int ROW>
__device__ __forceinline__ constexpr int swizzle(int r) {
    return ROW >= 128 ? r & 7 : r >> 1 & 3;
}
template <int ROW>
__device__ __forceinline__ uint32_t piece_of(int r, int c) {
    return r * ROW + ((c ^ swizzle<ROW>(r)) << 4);
}
// The same with D elements of 16 bits a row.
template <int D>
__device__ __forceinline__ uint32_t piece(int r, int c) {
    return piece_of<D * 2>(r, c);
}

}  // namespace attention
