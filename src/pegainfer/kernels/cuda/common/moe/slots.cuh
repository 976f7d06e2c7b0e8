// Slots sorted by expert. A slot is one of a token's K places for an expert.
#pragma once
#include "arguments.cuh"
#include "reduce.cuh"

namespace slots {

// Sorts slots by expert and cuts each expert's slots into blocks of at most a.tile, by a thread block of
// THREADS. The order of an expert's slots may differ from run to run, which changes no result: every slot's
// sums are its own. counts: [num_experts], scratch: [32] of shared memory.
template <int THREADS>
__device__ __forceinline__ void sort(const SortArgs& a, int* counts, int64_t* scratch) {
    for (int e = threadIdx.x; e < a.num_experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += THREADS) {
        const int e = a.experts[i];
        if (e >= 0 && e < a.num_experts) {
            atomicAdd(counts + e, 1);
            continue;
        }
        if (a.places != nullptr) a.places[i] = -1;
        if (a.zeroed != nullptr) {
            uint8_t* row = a.zeroed + static_cast<int64_t>(i) * a.row_bytes;
            for (int b = 0; b < a.row_bytes; b++) row[b] = 0;
        }
    }
    __syncthreads();
    int64_t before = 0;  // of the experts below: slots in the low half, blocks in the high half
    for (int first = 0; first < a.num_experts; first += THREADS) {
        const int e = first + threadIdx.x, count = e < a.num_experts ? counts[e] : 0;
        const int blocks = (count + a.tile - 1) / a.tile;
        int64_t all;
        const int64_t at =
            before + block_exclusive_scan<int64_t>(static_cast<int64_t>(blocks) << 32 | count, scratch, all);
        before += all;
        const int start = static_cast<int>(at);
        int4* to = a.blocks + (at >> 32);
        for (int b = 0; b < blocks; b++)
            to[b] = make_int4(e, start + b * a.tile, min(count - b * a.tile, a.tile), 0);
        if (e < a.num_experts) counts[e] = start;
    }
    if (threadIdx.x == 0) *a.in_use = static_cast<int>(before >> 32);
    __syncthreads();
    for (int i = threadIdx.x; i < a.slots; i += THREADS) {
        const int e = a.experts[i];
        if (e < 0 || e >= a.num_experts) continue;
        const int at = atomicAdd(counts + e, 1);
        a.order[at] = i;
        if (a.places != nullptr) a.places[i] = at;
    }
}

}  // namespace slots
