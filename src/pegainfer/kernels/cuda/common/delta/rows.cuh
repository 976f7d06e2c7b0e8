// Where the rows of a step and their states lie (ops/delta.py), and which tile of which row a block works on.
#pragma once
#include "arguments.cuh"
#include "ptx.cuh"

// A row of the step. Without a state (padding) its output is zeros.
struct Row {
    int id, first, count;
    bool fresh;  // its first token is at position 0: it starts from zeros
};
__device__ __forceinline__ Row row_at(const StepRows& rows, int row) {
    const int count = rows.lens[row];
    return {rows.ids[row], rows.starts[row], count, rows.contexts[row] == count};
}

__device__ __forceinline__ float silu(float v) {
    return v / (1.f + expf(-v));
}

struct Tile {
    int row, tile;
};

// The index-th tile of all tiles of `size` tokens of the rows that have `least` tokens or more, found by each
// warp for itself; row -1 past the last one. All lanes of the warp must call it.
__device__ __forceinline__ Tile find_tile(const int* lens, int num_rows, int index, int size, int least = 1) {
    const int lane = threadIdx.x & 31;
    int before = 0;
    for (int base = 0; base < num_rows; base += 32) {
        const int len = base + lane < num_rows ? lens[base + lane] : 0;
        const int tiles = len >= least ? (len + size - 1) / size : 0;
        int end = tiles;  // tiles of this group's rows up to and with this lane's
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int below = __shfl_up_sync(~0u, end, o);
            if (lane >= o) end += below;
        }
        const unsigned past = __ballot_sync(~0u, before + end > index);
        if (past != 0) {
            const int owner = __ffs(past) - 1;
            const int start = __shfl_sync(~0u, end - tiles, owner);
            return {base + owner, index - before - start};
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return {-1, 0};
}
