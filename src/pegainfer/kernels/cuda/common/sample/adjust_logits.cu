// op adjust_logits, append_tokens: what comes before and after the draw. Grid of adjust_logits: (chunks, L).
#include "arguments.cuh"
#include "sample.cuh"

using namespace sample;

// Whether the draw may read the logits themselves.
__device__ __forceinline__ bool is_plain(const AdjustArgs& a, int row) {
    return !a.bias_lens[row] && !a.banned_lens[row] && a.mask_rows[row] < 0 &&
           a.repetition_penalty[row] == 1.f && a.frequency_penalty[row] == 0.f &&
           a.presence_penalty[row] == 0.f;
}

constexpr uint32_t SEEN = 1u << 30, BANNED = 1u << 31, COUNT = SEEN - 1;

// variant adjust_logits: chunk=4096 block=256
extern "C" __global__ void __launch_bounds__(THREADS) adjust_logits(AdjustArgs a) {
    __shared__ float s[CHUNK];
    __shared__ uint32_t info[CHUNK];  // how often a token was generated, and the flags above
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.y, column = blockIdx.x * CHUNK, n = min(CHUNK, a.columns - column);
    const int v0 = a.first + column;  // id of the chunk's first column
    const int64_t at = static_cast<int64_t>(row) * a.columns + column;
    if (a.plain) {
        const bool plain = is_plain(a, row);
        if (blockIdx.x == 0 && threadIdx.x == 0) a.plain[row] = plain;
        if (plain) return;
    }
    for (int i = threadIdx.x; i < n; i += THREADS) s[i] = a.logits[at + i], info[i] = 0;
    __syncthreads();
    for (int j = threadIdx.x; j < a.bias_lens[row]; j += THREADS) {
        const int id = a.bias_ids[a.bias_starts[row] + j] - v0;
        if (id >= 0 && id < n) s[id] = __fadd_rn(s[id], a.bias_values[a.bias_starts[row] + j]);
    }
    const int slot = a.slots[row], known = slot < 0 ? 0 : a.history_lens[row];
    const int* history = a.history + static_cast<int64_t>(max(slot, 0)) * a.width;
    for (int j = threadIdx.x; j < a.banned_lens[row]; j += THREADS) {
        const int sequence = a.banned_starts[row] + j, len = a.banned_seq_lens[sequence];
        const int* tokens = a.banned_tokens + a.banned_seq_starts[sequence];
        const int id = tokens[len - 1] - v0;
        if (id < 0 || id >= n || len > known + 1) continue;
        bool match = true;
        for (int i = 0; i < len - 1 && match; i++) match = tokens[i] == history[known - len + 1 + i];
        if (match) atomicOr(&info[id], BANNED);
    }
    const float repetition = a.repetition_penalty[row], frequency = a.frequency_penalty[row],
                presence = a.presence_penalty[row];
    if (repetition != 1.f || frequency != 0.f || presence != 0.f) {
        const int prompt = a.prompt_lens[row];
        for (int i = threadIdx.x; i < known; i += THREADS) {
            const int id = history[i] - v0;
            if (id < 0 || id >= n) continue;
            atomicOr(&info[id], SEEN);
            if (i >= prompt) atomicAdd(&info[id], 1);
        }
    }
    __syncthreads();
    const int mask_row = a.mask_rows[row];
    const uint32_t* mask = a.masks + static_cast<int64_t>(max(mask_row, 0)) * a.mask_words;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float v = s[i];
        const uint32_t flags = info[i];
        const int id = v0 + i;
        const bool token = id < a.vocab;  // the mask has no bit for others
        const bool masked = token && mask_row >= 0 && !(mask[id >> 5] >> (id & 31) & 1);
        if ((masked || flags & BANNED) && v < INFINITY)
            v = -INFINITY;  // NaN and +inf stay, for the draw to report
        if (flags & SEEN) v = v > 0 ? __fdiv_rn(v, repetition) : __fmul_rn(v, repetition);
        if (flags & COUNT) {
            v = __fsub_rn(v, __fmul_rn(frequency, static_cast<float>(flags & COUNT)));
            v = __fsub_rn(v, presence);
        }
        a.scores[at + i] = token ? v : -INFINITY;
    }
}

// history[slots[l], history_lens[l]] = tokens[l]; a negative slot is padding.
// variant append_tokens: block=256
extern "C" __global__ void __launch_bounds__(256)
    append_tokens(int* history, const int* tokens, const int* slots, const int* history_lens, int rows,
                  int width) {
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows || slots[row] < 0 || history_lens[row] >= width) return;
    history[static_cast<int64_t>(slots[row]) * width + history_lens[row]] = tokens[row];
}
