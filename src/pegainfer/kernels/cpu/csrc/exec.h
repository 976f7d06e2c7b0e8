// A lowered program and everything a step of it needs. Buffers, states and weights belong to the caller.
#pragma once

#include <atomic>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "program.h"
#include "ranks.h"

namespace pega {

// Rows prepared for a product: as they are, normalised, or rounded to 8 bits or bf16.
struct Rows {
    const float* f32;
    int64_t ld;  // floats between rows
    QuantRows q;
    uint16_t* bf16;  // rows of an even number of values
};

// A thread's own memory; nothing in it outlives a chunk but the prepared rows.
struct Scratch {
    uint64_t prepared;  // stamp of the phase that `rows` was prepared for
    Rows rows;
    float* f32;      // [Limits::thread]
    float* state;    // [Limits::state]: a head's matrix whose stored form is narrower
    QuantRows q;     // the same many values
    uint16_t* bf16;  // likewise
    float* acc;      // [Limits::acc]
    float* decode;   // [kDecodeColumns, 16]
    float* scores;   // [kMaxQueries, kSegment]
    float* part;     // [kMaxQueries, D]: a segment's sums
    float* total;    // [kMaxQueries, D]: the running ones
    // Sampling, [V] each: times seen (zero between chunks), weights of the draw, ids of one histogram bin.
    int32_t* seen;
    uint64_t* weights;
    int32_t* ids;
};

// Greatest sizes over all instructions and steps, from which scratch is allocated once.
struct Limits {
    int64_t tokens = 1, rows = 1, width = 32, acc = 0, head_dim = 16, segments = 0, vocab = 0;
    int64_t small = 0;   // floats that a thread may prepare for itself
    int64_t thread = 0;  // floats that a thread has room for: at least as many
    int64_t states = 0, state = 0;
    // Mixture of experts. A slot is one of a token's places for an expert: T · K of them.
    int64_t slots = 0, slot_width = 0, experts = 0, expert_blocks = 0, slot_results = 0;
};

// Up to kTokensAChunk slots of one expert: order[first … first + count).
struct ExpertBlock {
    int32_t expert, first, count;
};

// A step's slots, sorted by expert; made anew for each op that needs them.
struct ExpertSlots {
    std::vector<int32_t> order;   // [slots] slot numbers t · K + j, by expert, then by slot
    std::vector<int32_t> starts;  // [experts + 1] where each expert's begin in `order`
    std::vector<ExpertBlock> blocks;
    int64_t num_slots = 0, num_blocks = 0;  // those with an expert
    Rows rows{};                            // their inputs, prepared, in that order
    float* results = nullptr;               // [slots, M] of expert_down, by slot number
};

struct QueryBlock {
    int64_t row, first, count;  // tokens first … first + count of the step
    int64_t seen;               // context tokens that the last of them sees
    int64_t segment;            // number of its first segment among all blocks' segments
};

struct Exec {
    Pool* pool = nullptr;
    const Kernels* kernels = nullptr;
    bool int8 = false, bf16 = false;  // what meets quantised and bf16 weights is rounded to these
    std::vector<int64_t> program;     // as it was encoded
    std::vector<int64_t> words;       // the same with the step's addresses and sizes
    void* const* table = nullptr;     // the caller's
    std::vector<Instr> step;
    std::vector<Phase> phases;
    std::vector<Scratch> scratch;  // one a thread
    std::vector<void*> owned;
    Limits limits;
    Rows shared{};  // rows prepared by all threads together: [tokens, width]
    ExpertSlots slots;
    std::vector<QueryBlock> blocks;
    int64_t num_blocks = 0, num_segments = 0, vocab = 0;
    const void* blocks_for = nullptr;  // the query_lens that `blocks` were made of in this step
    const void* states_for = nullptr;  // the state_ids whose rows were found in bounds in this step
    std::vector<uint8_t> named;        // [limits.states] states that the step's rows have named so far
    const void* checked[8] = {};       // index inputs found in bounds in this step
    int num_checked = 0;
    Ranks ranks;
    uint64_t sums = 0;          // number of the next sum over ranks; the group's executors count on
    float* partials = nullptr;  // [limits.segments, kMaxQueries, 2 + D]
    uint64_t steps = 0;
    mutable std::atomic<int64_t> clipped{0};  // values that the KV cache's format was too narrow for
    char error[256] = "";

    ~Exec();
    // A cache-aligned block that lives as long as the executor.
    void* allocate(size_t bytes);
    bool fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    // Whether `index[0 … count)` lies in [least, limit); records what is wrong otherwise.
    bool check_indices(const char* what, const int32_t* index, int64_t count, int64_t limit,
                       int32_t least = 0);
    // The same for spans starts[i] … starts[i] + lens[i] of an array of `limit`.
    bool check_spans(const char* what, const int32_t* starts, const int32_t* lens, int64_t count,
                     int64_t limit);
    void add_phase(const Instr& in, void (*run)(const void*, const Phase&, int64_t, int), int64_t chunks,
                   int64_t a = 0, int64_t b = 0, int64_t c = 0, int64_t d = 0);
    void count_clipped(int64_t values) const {
        if (values != 0) clipped.fetch_add(values, std::memory_order_relaxed);
    }
    uint64_t stamp(const Phase& p) const { return steps << 32 | static_cast<uint32_t>(p.serial); }
    const Instr& instr(const Phase& p) const { return step[static_cast<size_t>(p.instr)]; }
};

// Creates an executor for a program of `count` words; sizes[i] are the greatest that a step will have.
// Null where memory runs out or an instruction is not one that these kernels do; `error` (256 bytes) says
// why.
Exec* exec_create(Pool* pool, const Kernels* kernels, bool int8, bool bf16, const int64_t* program,
                  int64_t count, void* const* table, const int64_t* sizes, int64_t num_sizes, char* error);

// Runs instructions first … last. False where an input is out of bounds, and nothing is computed then, or
// where the group of ranks has failed.
bool exec_run(Exec* e, const int64_t* sizes, int64_t num_sizes, int64_t first, int64_t last,
              int64_t* nanoseconds);

// One function an op family: checks the instruction's inputs and adds its phases.
bool plan_rows(Exec& e, const Instr& in);
// Of lm_head: every rank gets the columns of the logits that the others have made.
bool plan_gather(Exec& e, const Instr& in);
bool plan_linear(Exec& e, const Instr& in);
bool plan_attention(Exec& e, const Instr& in);
bool plan_sample(Exec& e, const Instr& in);
bool plan_recurrent(Exec& e, const Instr& in);
bool plan_moe(Exec& e, const Instr& in);
bool plan_lora(Exec& e, const Instr& in);
bool plan_reduce(Exec& e, const Instr& in);
bool plan_latent(Exec& e, const Instr& in);

// Where a head's K or V of a page lies: kv + ((block · Y + layer) · G + head) · 2 S D elements, K first. A
// cache of latents has one head and one part, rows [S, D] that are both.
struct KvView {
    uint8_t* base;
    int64_t layers, layer, heads, block_size, head_dim, bytes;  // bytes an element
    int64_t parts = 2;
    float k_inverse = 1, v_inverse = 1;  // 1 / scale

    uint8_t* keys(int64_t block, int64_t head) const {
        return base + ((block * layers + layer) * heads + head) * parts * block_size * head_dim * bytes;
    }
    uint8_t* values(int64_t block, int64_t head) const {
        return keys(block, head) + block_size * head_dim * bytes;
    }
    // Writes k and v of a token; either may be null. Scales are for e4m3 alone. Returns how many values were
    // past the largest that the cache's format has.
    int64_t append(int64_t slot, int64_t head, const float* k, const float* v) const;
};

// The cache of an op that has one.
template <class Args>
KvView kv_view(const Instr& in, const Args& a) {
    KvView kv{a.kv, a.Y, static_cast<int64_t>(a.layer), a.G, a.S, a.D, kv_bytes(in.kv_format)};
    kv.k_inverse = static_cast<float>(1 / a.k_scale), kv.v_inverse = static_cast<float>(1 / a.v_scale);
    return kv;
}

// The same of latents.
template <class Args>
KvView latent_view(const Instr& in, const Args& a) {
    return {a.kv, a.Y, static_cast<int64_t>(a.layer), 1, a.S, a.D, kv_bytes(in.kv_format), 1};
}

}  // namespace pega
