// The order of a work list of prefilled tiles.
#pragma once
#include "attention.cuh"

namespace attention {

// Prefilled tiles go out by how many keys they see, the longest first, so that short ones fill the gaps at
// the end: classes of a sixteenth of a power of two, from 16 keys on. Within a class the order may differ
// from run to run, which changes the schedule but not the results.
constexpr int CLASSES = 256;
__device__ __forceinline__ int class_of(int keys) {
    const int k = max(keys, 16), power = 31 - __clz(k);
    return CLASSES - 1 - min(CLASSES - 1, (power - 4) * 16 + (k >> (power - 4) & 15));
}

// Writes the items that `cut(emit)` gives to emit(item, keys of a part, where the tile is merged), the
// longest first, and the first part of each that has several to `merges`. Returns their number. Every one of
// a block's CLASSES threads takes part; `places`: shared memory for as many numbers.
template <typename Cut>
__device__ __forceinline__ int sort_items(Item* items, Item* merges, int* places, int* scratch, Cut cut) {
    __syncthreads();
    places[threadIdx.x] = 0;
    __syncthreads();
    cut([&](const Item&, int keys, int) { atomicAdd(places + class_of(keys), 1); });
    __syncthreads();
    int total;
    const int first = block_exclusive_scan(places[threadIdx.x], scratch, total);
    __syncthreads();
    places[threadIdx.x] = first;
    __syncthreads();
    cut([&](const Item& item, int keys, int merge) {
        items[atomicAdd(places + class_of(keys), 1)] = item;
        if (item.parts() > 1 && item.part() == 0) merges[merge] = item;
    });
    return total;
}

}  // namespace attention
