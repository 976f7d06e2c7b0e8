// What a pass over one row works on, and which part of it is whose.
#pragma once
#include <cstdint>

namespace pass {

constexpr int WARPS = 8, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int PART_PAGES = 8;                  // no part of a row's keys is made for fewer
constexpr int ROUND = 256;                     // rows whose sums wait in shared memory
constexpr int MAX_CHUNKS = 6, FEW_CHUNKS = 2;  // of 8 columns a thread
constexpr int MAX_LAYERS = 80;                 // of the kernel's parameters, 5 KB
constexpr int MEET = 1, MADE = 2;  // named barriers: of the consumers; of all, when the ring's are there

enum Kind : int { QKV, O, GATE_UP, DOWN, HEAD };

struct Layer {
    const void *qkv, *o, *gate_up, *down;                 // [rows, k]; gate_up in (gate, up) pairs of rows
    const float *attn_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm, k_norm: null without
};
struct Layers {
    Layer layer[MAX_LAYERS];
};

struct Args {
    const void* embedding;  // [V, M]
    const void* head;       // [V, M]
    const float* norm;      // [M]
    const int* token_ids;   // [1], as the next six
    const int* positions;
    const int* slots;  // negative: nothing is cached
    const int* query_lens;
    const int* context_lens;
    const int* block_table;  // [1, W]
    const float* cos_sin;    // [P, D]
    void* kv;                // [N, Y, 2, G, S, D]
    void* x;                 // [M]
    float* logits;           // [V]
    uint32_t* words;         // what blocks exchange: x [M], qkv [(H + 2 G) D], attn [H D], act [F]
    uint2* parts;            // attention's parts: [parts, H, D + 1]
    // [2]: how many launches there have been on these words; blocks that have ended, 0 before and after.
    unsigned* launches;
    int layers, m, h, g, f, v, block_size;
    int stage, depth;  // of the ring: bytes of a stage, a multiple of 1024; stages
    int window;        // stages that may be on their way at a time
    float eps, scale_log2;
};

// One GEMM: out[n] = sum over k of in[k] · w[n, k].
struct Gemm {
    const void* w;
    int k, rows;
    int unit;  // rows that a block takes together
    __device__ __forceinline__ Gemm(const Args& a, const Layers& layers, int layer, int kind, int d) {
        const Layer& l = layers.layer[layer];
        switch (kind) {
            case QKV:
                w = l.qkv, k = a.m, rows = (a.h + 2 * a.g) * d, unit = 1;
                break;
            case O:
                w = l.o, k = a.h * d, rows = a.m, unit = 1;
                break;
            case GATE_UP:
                w = l.gate_up, k = a.m, rows = 2 * a.f, unit = 2;
                break;
            case DOWN:
                w = l.down, k = a.f, rows = a.m, unit = 1;
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
        const int fit = a.stage / (2 * k);
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
