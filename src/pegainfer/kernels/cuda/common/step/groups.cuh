// KV groups as the kernels that make step inputs see them. Filled by runner/resident.py in this order.
#pragma once
#include "types.cuh"

constexpr int MAX_GROUPS = 8;

// A slot's tables lie in one row of `tables`: each group has `width` columns from `first` on. A null pointer
// means that the program does not read this input.
struct Group {
    int* by_row;    // pages: block table [rows, width]; states: state ids [rows]
    int* by_token;  // pages: place of each token; states: state that is saved after each token, or -1
    int first, width;
    int block_size;  // tokens a block; 0: a group of states, whose one column is the slot's state
    int unused;      // pads to a multiple of a pointer
};
static_assert(sizeof(Group) == 32, "runner/resident.py packs 32 bytes");
