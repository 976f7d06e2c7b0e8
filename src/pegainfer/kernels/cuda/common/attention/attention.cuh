// What the attention kernels share: operands, the work list, and the sums of a row's parts.
//
// A page holds [2, G, S, D] of one layer: keys, then values. Token i of a row is in page block_table[row, i / S].
// A row with one query token is decoded, a row with several is prefilled. Long rows are cut into parts along
// their keys; each part leaves its maximum, its sum of weights and its unnormalised output, and the part that
// arrives last adds them in their order, so the result does not depend on who comes when.
#pragma once
#include "ptx.cuh"
#include "reduce.cuh"

namespace attention {

constexpr int DECODE_CHUNK = 128;  // keys of a part, unless the row would then have too many parts
constexpr int DECODE_PARTS = 32;
constexpr int PREFILL_PARTS = 16;
constexpr int PREFILL_KEYS = 512;    // no part of a prefill is made for fewer
constexpr int PREFILL_BLOCKS = 256;  // a row whose tiles alone give so many blocks is not cut

// One block's share: part `part` of `parts` of a row (prefill: of its tile of queries). Its sums go to
// `slot` + part; slot is -1 where there is one part only.
struct Item {
  int row, tile, part_of, slot;
  __device__ __forceinline__ int part() const { return part_of & 0xffff; }
  __device__ __forceinline__ int parts() const { return part_of >> 16; }
};

// The work list of a step: counts, then decode items, then prefill items.
struct Plan {
  int decode, prefill, pad[2];
  __device__ __forceinline__ const Item* decode_items() const {
    return reinterpret_cast<const Item*>(this + 1);
  }
};

struct Args {
  void* out;                // [T, H, D]
  const void* q;            // [T, H, D]
  const void* kv;           // the layer's part of the first page
  const int* query_starts;  // [R]
  const int* query_lens;    // [R]
  const int* context_lens;  // [R]
  const int* block_table;   // [R, W]
  const Plan* plan;
  const Item* items;  // of this kernel
  float* sums;        // [slots, ...]: weighted values, float32
  float2* heads;      // [slots, ...]: (maximum, sum of weights)
  int* arrivals;      // [slots, G, subgroups] zeros, and zeros again afterwards
  int64_t page_stride;  // elements
  int h, g, block_size, table_width;
  float scale_log2;  // of the scores, for powers of two
};

// Depends on the row's own length only: whoever shares the batch, the row's bits are the same.
__device__ __forceinline__ int decode_chunk(int context) {
  const int even = (context + DECODE_PARTS - 1) / DECODE_PARTS;
  return max(DECODE_CHUNK, (even + 15) / 16 * 16);
}

// Swizzled place of 16-byte piece c of row r in a tile with D elements a row: eight rows, eight banks.
template <int D>
__device__ __forceinline__ uint32_t piece(int r, int c) {
  return r * (D * 2) + ((c ^ (r & 7)) << 4);
}

// Whether this block is the last of `parts` to arrive; its threads may then read what the others wrote.
__device__ __forceinline__ bool arrive_last(int* arrivals, int parts, bool* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *flag = atomicAdd(arrivals, 1) == parts - 1;
    if (*flag) *arrivals = 0;
    __threadfence();
  }
  __syncthreads();
  return *flag;
}

}  // namespace attention
