// The experts that up to 8 tokens meet, as a list that every block makes for itself.
#pragma once
#include "../../common/moe/route.cuh"

namespace choice {

constexpr int TOKENS = 8;

// In shared memory: of each expert, the tokens that chose it; of each expert of the list, its number, its
// tokens and their gates. Shared experts, which every token meets, come first, numbered by themselves.
struct List {
    int n, shared;
    uint32_t* chosen_by;  // [N]: bit t for token t
    int* experts;         // [most], ascending
    uint32_t* tokens;     // [most]
    float* gates;         // [most, TOKENS]
    int* in_use;          // [1]

    __device__ __forceinline__ List(const route::Args& r, int shared, void* memory) : n(r.n), shared(shared) {
        const int most = shared + min(r.tokens * r.k, r.n);
        chosen_by = static_cast<uint32_t*>(memory), experts = reinterpret_cast<int*>(chosen_by + n);
        tokens = reinterpret_cast<uint32_t*>(experts + most), gates = reinterpret_cast<float*>(tokens + most);
        in_use = reinterpret_cast<int*>(gates + most * TOKENS);
    }
    __device__ __forceinline__ int count() const { return *in_use; }
    __device__ __forceinline__ int expert(int i) const { return experts[i]; }
    __device__ __forceinline__ bool has(int i, int token) const { return tokens[i] >> token & 1; }
    __device__ __forceinline__ float gate(int i, int token) const { return gates[i * TOKENS + token]; }

    // By all threads, which meet before `make`.
    __device__ __forceinline__ void clear() const {
        for (int e = threadIdx.x; e < n; e += blockDim.x) chosen_by[e] = 0;
    }
    // By all threads; the list is there afterwards. shared_gates: [T] of the shared experts; null: 1.
    // `leave`: the choice also goes to r.experts.
    template <int R>
    __device__ __forceinline__ void make(const route::Args& r, const float* shared_gates, bool leave) const {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        route::Chosen mine = {};
        const bool chooses = warp < r.tokens, has = chooses && lane < r.k;
        if (chooses) {
            float logits[R];
#pragma unroll
            for (int i = 0; i < R; i++) {
                const int e = i * 32 + lane;
                logits[i] = e < n ? __ldcg(r.logits + static_cast<int64_t>(warp) * n + e) : -INFINITY;
            }
            mine = route::choose<R>(r, logits);
        }
        if (has) {
            atomicOr(chosen_by + mine.expert, 1u << warp);
            if (leave) r.experts[warp * r.k + mine.place] = mine.expert;
        }
        for (int i = threadIdx.x; i < shared * TOKENS; i += blockDim.x) {
            const int token = i % TOKENS, at = i / TOKENS;
            if (token < r.tokens) gates[i] = shared_gates != nullptr ? __ldcg(shared_gates + token) : 1.f;
            if (token == 0) experts[at] = at, tokens[at] = (1u << r.tokens) - 1;
        }
        __syncthreads();
        if (chooses) {
            int before = shared;  // experts of the list ahead of mine
            int all = shared;
#pragma unroll
            for (int i = 0; i < R; i++) {
                const int e = i * 32 + lane;
                const uint32_t word = __ballot_sync(~0u, e < n && chosen_by[e]);
                const int own = mine.expert - i * 32;  // of this word's experts, those below mine
                const uint32_t below = own <= 0 ? 0 : own >= 32 ? ~0u : (1u << own) - 1;
                before += __popc(word & below), all += __popc(word);
            }
            if (warp == 0 && lane == 0) *in_use = all;
            if (has) {
                const uint32_t who = chosen_by[mine.expert];
                gates[before * TOKENS + warp] = mine.gate;
                if (__ffs(who) - 1 == warp) experts[before] = mine.expert, tokens[before] = who;
            }
        }
        __syncthreads();
    }
};

}  // namespace choice
