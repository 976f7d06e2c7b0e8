// What a pass over one row works on, and which part of it is whose.
#pragma once
#include "arguments.cuh"

namespace pass {

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int PART_PAGES = 8;                  // no part of a row's keys is made for fewer
constexpr int ROUND = 256;                     // rows whose sums wait in shared memory
constexpr int MAX_CHUNKS = 6, FEW_CHUNKS = 2;  // of 8 columns a thread
constexpr int MEET = 1, MADE = 2;  // named barriers: of the consumers; of all, when the ring's are there

enum Kind : int { QKV, O, GATE_UP, DOWN, HEAD };

// One GEMM: out[n] = sum over k of in[k] · w[n, k].
struct Gemm {
    const void* w;
    const float* scales;  // of an FP8 weight, one a row
    int k, rows;
    int unit;  // rows that a block takes together
    int item;  // bytes of a weight's element
    // layer_item: of the layers' weights; the head's have 16 bits.
    __device__ __forceinline__ Gemm(const Args& a, const Layers& layers, int layer, int kind, int d,
                                    int layer_item)
        : scales(nullptr), item(kind == HEAD ? 2 : layer_item) {
        const Layer& l = layers.layer[layer];
        switch (kind) {
            case QKV:
                w = l.qkv, scales = l.qkv_scales, k = a.m, rows = (a.h + 2 * a.g) * d, unit = 1;
                break;
            case O:
                w = l.o, scales = l.o_scales, k = a.h * d, rows = a.m, unit = 1;
                break;
            case GATE_UP:
                w = l.gate_up, scales = l.gate_up_scales, k = a.m, rows = 2 * a.f, unit = 2;
                break;
            case DOWN:
                w = l.down, scales = l.down_scales, k = a.f, rows = a.m, unit = 1;
                break;
            default:
                w = a.head, k = a.m, rows = a.v, unit = 1;
        }
    }
    // A block's rows begin here (`block`: its number, or one more for their end).
    __device__ __forceinline__ int first(int block) const {
        return static_cast<int>(static_cast<unsigned>(rows / unit) * block / gridDim.x) * unit;
    }
    // Rows of a stage: as many as fit, in groups that a warp sums together.
    __device__ __forceinline__ int in_stage(const Args& a) const {
        const int fit = a.stage / (item * k);
        return fit >= 4 ? min(fit / 4 * 4, ROUND) : min(fit, 2);
    }
};

// This block's part of the row's keys: pages first … end of unit `unit`.
struct Share {
    int unit, part, parts, first, end, context;
    bool mine;
    __device__ __forceinline__ explicit Share(const Args& a) {
        context = a.query_lens[0] == 1 ? a.context_lens[0] : 0;
        const int pages = (context + 15) / 16, most = gridDim.x / a.g;
        for (parts = 1; 2 * parts <= min(most, min(32, pages / PART_PAGES)); parts *= 2) {
        }
        unit = blockIdx.x % a.g, part = blockIdx.x / a.g, mine = part < parts;
        first = mine ? pages * part / parts : 0, end = mine ? pages * (part + 1) / parts : 0;
    }
};

}  // namespace pass
