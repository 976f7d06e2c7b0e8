// What LoRA adapters add to the sums of a GEMM of few tokens (skinny.cuh), inside of its launch.
//
//   sums[n, token] += sum over r of up[n, r] · h[token, r],   h = inputs · down, of each token's own adapter
//
// Two warps of each block, which have little else to do, compute a share of h while the weight is streamed:
// (adapter, up to 8 of its tokens, GEMM, 16 channels, slice of k) is one share. Shares go through global
// memory; a counter says how many warps have left theirs, and each block fetches h when all have. The warps
// that multiply then add up · h to their sums. All blocks of the launch must run at once, because they wait
// for each other.
#pragma once
#include <type_traits>
#include <utility>

#include "lora_arguments.cuh"
#include "ptx.cuh"

namespace lora {

constexpr int WARPS = 2, THREADS = 32 * WARPS;  // of a block that compute h
constexpr int LISTED = 4;                       // named barrier of these warps
constexpr int NO_TOKEN = 0xff;

__device__ __forceinline__ void add_release(unsigned* p, unsigned v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned load_acquire_gpu(const unsigned* p) {
    unsigned v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

// 16 bytes, or zeros. Volatile, so that loads are issued in program order, ahead of the uses.
__device__ __forceinline__ uint4 load16(const void* p, bool valid) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(p), "r"(static_cast<int>(valid))
        : "memory");
    return v;
}

// 4 bytes of a constant, or 2 in their low half; or zero. OFFSET: bytes.
template <int OFFSET>
__device__ __forceinline__ uint32_t load4(const void* p, bool valid) {
    uint32_t v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.b32 %0, [%1+%3];\n}"
        : "=&r"(v)
        : "l"(p), "r"(static_cast<int>(valid)), "n"(OFFSET));
    return v;
}
template <int OFFSET>
__device__ __forceinline__ uint32_t load2(const void* p, bool valid) {
    uint32_t v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.nc.u16 %0, [%1+%3];\n}"
        : "=&r"(v)
        : "l"(p), "r"(static_cast<int>(valid)), "n"(OFFSET));
    return v;
}

// Calls `body` with 0 to COUNT - 1 as constants.
template <int... I, typename Body>
__device__ __forceinline__ void each_of(std::integer_sequence<int, I...>, Body&& body) {
    (body(std::integral_constant<int, I>()), ...);
}
template <int COUNT, typename Body>
__device__ __forceinline__ void each(Body&& body) {
    each_of(std::make_integer_sequence<int, COUNT>(), body);
}

// A kernel without adapters.
struct None {
    static constexpr bool ON = false;
    static constexpr int REGISTERS = 0;
};

// The adapters of one launch as one block sees them. `NT`: tokens that the kernel takes.
template <typename T, int NT>
struct Adapters {
    static constexpr bool ON = true;
    static constexpr int REGISTERS = 80;  // of the warps that multiply, beside the sums
    static constexpr int WORDS = (NT + 31) / 32;

    // What the block's tokens need, in shared memory. A team is an adapter with up to 8 of its tokens.
    struct Lists {
        uint32_t members[NT][WORDS];  // tokens of each adapter
        uint8_t team_tokens[NT][8];
        uint8_t ranks[NT][4];  // of each adapter, by factor
        uint8_t team[NT];      // its adapter, as a number in this list
        uint8_t of[NT];        // a token's adapter likewise
        int adapter[NT];       // each once
        int count, teams;
    };

    const Fused& p;
    Lists& lists;
    T* h;           // [factors, NT, room]
    int low, high;  // factors whose outputs this block has: low … high - 1

    // shared: of the block. first, last: the layer's outputs that this block has.
    __device__ __forceinline__ Adapters(const Fused& p, uint8_t* shared, int first, int last)
        : p(p),
          lists(*reinterpret_cast<Lists*>(shared + p.shared)),
          h(reinterpret_cast<T*>(shared + p.shared + (sizeof(Lists) + 15) / 16 * 16)) {
        low = 0, high = p.factors;
        if (p.step == 1) {
            while (low < p.factors && p.factor[low].first + p.factor[low].n <= first) low++;
            while (high > low && p.factor[high - 1].first >= last) high--;
        }
    }

    __device__ __forceinline__ const T* down(int factor, int adapter, int channel) const {
        return static_cast<const T*>(p.factor[factor].down) +
               (static_cast<int64_t>(adapter) * p.most + channel) * p.k;
    }
    __device__ __forceinline__ const T* up(int factor, int adapter, int channel) const {
        return static_cast<const T*>(p.factor[factor].up) +
               (static_cast<int64_t>(adapter) * p.most + channel) * p.factor[factor].n;
    }

    // By one warp: which adapters the tokens have.
    __device__ __forceinline__ void list() const {
        const int lane = threadIdx.x & 31;
        int mine[WORDS];
        uint32_t rest[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const int token = i * 32 + lane;
            mine[i] = token < p.tokens ? p.adapters[token] : -1;
            if (token < NT) lists.of[token] = NO_TOKEN;
            rest[i] = __ballot_sync(~0u, mine[i] >= 0);
        }
        int count = 0, teams = 0;
        while (true) {
            int next = -1;
#pragma unroll
            for (int i = WORDS - 1; i >= 0; i--) {
                const int there = __shfl_sync(~0u, mine[i], rest[i] ? __ffs(rest[i]) - 1 : 0);
                if (rest[i]) next = there;
            }
            if (next < 0) break;
            int before = 0;
#pragma unroll
            for (int i = 0; i < WORDS; i++) {
                const bool is = mine[i] == next;
                const uint32_t these = __ballot_sync(~0u, is);
                const int at = before + __popc(these & ((1u << lane) - 1));
                if (is) lists.team_tokens[teams + at / 8][at % 8] = i * 32 + lane;
                if (is) lists.of[i * 32 + lane] = count;
                if (lane == 0) lists.members[count][i] = these;
                before += __popc(these);
                rest[i] &= ~these;
            }
            const int more = (before + 7) / 8;
            if (before + lane < more * 8)
                lists.team_tokens[teams + (before + lane) / 8][(before + lane) % 8] = NO_TOKEN;
            if (lane < more) lists.team[teams + lane] = count;
            if (lane == 0) lists.adapter[count] = next;
            count++, teams += more;
        }
        if (lane == 0) lists.count = count, lists.teams = teams;
        __syncwarp();
        for (int i = lane; i < count * p.factors; i += 32) {
            const int number = i / p.factors, factor = i % p.factors;
            lists.ranks[number][factor] = max(0, min(p.factor[factor].ranks[lists.adapter[number]], p.most));
        }
    }

    // Calls `body` with team, factor, first channel, and slice of the warp's shares of h.
    template <typename Body>
    __device__ __forceinline__ void each_share(int warp, Body&& body) const {
        const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
        const int groups = p.room / 16, shares = lists.teams * p.factors * groups * p.slices;
#pragma unroll 1
        for (int share = warp * blocks + block; share < shares; share += WARPS * blocks) {
            const int slice = share % p.slices, rest = share / p.slices;
            const int channel = rest % groups * 16, factor = rest / groups % p.factors;
            const int team = rest / groups / p.factors;
            if (channel < lists.ranks[lists.team[team]][factor]) body(team, factor, channel, slice);
        }
    }
    // Columns of k in chunks of 32 that a slice has.
    __device__ __forceinline__ int slice_begin(int slice) const {
        return (p.k + 31) / 32 * slice / p.slices * 32;
    }

    // Brings into L2 what this block will read of the factors, while the launch before still runs: the
    // factors are constant. `first`, `rows`: outputs of this block's tile.
    __device__ __forceinline__ void prefetch(int warp, int first, int rows) const {
        const int lane = threadIdx.x & 31;
        each_share(warp, [&](int team, int factor, int channel, int slice) {
            const int number = lists.team[team], adapter = lists.adapter[number];
            const int begin = slice_begin(slice), end = min(slice_begin(slice + 1), p.k);
            const int lines = ((end - begin) * 2 + 127) / 128;
            const int channels = min(16, lists.ranks[number][factor] - channel);
#pragma unroll 1
            for (int i = lane; i < lines * channels; i += 32)
                prefetch_l2(down(factor, adapter, channel + i / lines) + begin + i % lines * 64);
        });
#pragma unroll 1
        for (int q = blockIdx.x * WARPS + warp; q < lists.count * (high - low); q += gridDim.x * WARPS) {
            const int number = q / (high - low), factor = low + q % (high - low);
            const Factor& f = p.factor[factor];
            const int from = max(0, (first - f.first) / p.step);
            const int to = min(f.n, (first + rows - f.first + p.step - 1) / p.step);
            const int lines = max(1, (max(0, to - from) * 2 + 127) / 128);
#pragma unroll 1
            for (int i = lane; i < lines * lists.ranks[number][factor]; i += 32)
                prefetch_l2(up(factor, lists.adapter[number], i / lines) + from + i % lines * 64);
        }
    }

    // This warp's shares of h, and a count of the warps that have left theirs.
    __device__ __forceinline__ void shrink(int warp) const {
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        each_share(warp, [&](int team, int factor, int channel, int slice) {
            const int number = lists.team[team], adapter = lists.adapter[number];
            const int most = lists.ranks[number][factor] - channel;
            const int begin = slice_begin(slice), end = min(slice_begin(slice + 1), p.k);
            const int token = lists.team_tokens[team][g];
            const T* x =
                static_cast<const T*>(p.a) + static_cast<int64_t>(token == NO_TOKEN ? 0 : token) * p.k;
            const T* w = down(factor, adapter, channel + min(g, most - 1));
            const T* w8 = down(factor, adapter, channel + min(g + 8, most - 1));
            float sums[2][4] = {};
            constexpr int CHUNKS = 4;
#pragma unroll 1
            for (int k = begin + t * 8; k - t * 8 < end; k += CHUNKS * 32) {
                uint4 in[CHUNKS], a[CHUNKS], b[CHUNKS];
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    const int at = k + c * 32;
                    const bool inside = at < end;
                    in[c] = load16(x + at, inside && token != NO_TOKEN);
                    a[c] = load16(w + at, inside && g < most);
                    b[c] = load16(w8 + at, inside && g + 8 < most);
                }
                // k runs in another order than in memory, in both operands alike.
#pragma unroll
                for (int c = 0; c < CHUNKS; c++) {
                    mma<T>(sums[0], a[c].x, b[c].x, a[c].y, b[c].y, in[c].x, in[c].y);
                    mma<T>(sums[1], a[c].z, b[c].z, a[c].w, b[c].w, in[c].z, in[c].w);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int to = lists.team_tokens[team][2 * t + i % 2];
                const int64_t row = (static_cast<int64_t>(slice) * p.tokens + to) * p.factors + factor;
                if (to != NO_TOKEN) p.sums[row * p.room + channel + g + i / 2 * 8] = sums[0][i] + sums[1][i];
            }
        });
        __syncwarp();
        if (lane == 0) add_release(p.arrivals, 1);
    }

    // By the warps that compute h, before they do anything that waits for the launch before.
    __device__ __forceinline__ void begin(int warp, int first, int rows) const {
        if (warp == 0) list();
        named_wait<THREADS>(LISTED);
        prefetch(warp, first, rows);
        pdl_wait();
        shrink(warp);
    }

    // By all warps that compute h: fetches h of this block's factors when every block has left its shares.
    // The last block that has seen them all sets the counts back to zero.
    __device__ __forceinline__ void gather(int warp) const {
        const unsigned blocks = gridDim.x * gridDim.y;
        const int thread = warp * 32 + (threadIdx.x & 31);
        if (thread == 0)
            while (load_acquire_gpu(p.arrivals) < WARPS * blocks) {
            }
        named_wait<THREADS>(LISTED);
        if (thread == 0 && atomicAdd(p.arrivals + 1, 1) == blocks - 1) p.arrivals[0] = 0, p.arrivals[1] = 0;
        const int quads = p.room / 4, all = p.tokens * (high - low) * quads;
        const int64_t slice = static_cast<int64_t>(p.tokens) * p.factors * p.room;
#pragma unroll 1
        for (int i = thread; i < all; i += THREADS) {
            const int channel = i % quads * 4, rest = i / quads;
            const int factor = low + rest % (high - low), token = rest / (high - low);
            const int number = lists.of[token];
            float4 sum = make_float4(0, 0, 0, 0);
            if (number != NO_TOKEN && channel / 16 * 16 < lists.ranks[number][factor]) {
                const float* from =
                    p.sums + (static_cast<int64_t>(token) * p.factors + factor) * p.room + channel;
#pragma unroll 8
                for (int s = 0; s < p.slices; s++, from += slice) {
                    const float4 part = __ldcg(reinterpret_cast<const float4*>(from));
                    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
                }
            }
            *reinterpret_cast<uint2*>(h + (factor * NT + token) * p.room + channel) =
                make_uint2(pack2<T>(sum.x, sum.y), pack2<T>(sum.z, sum.w));
        }
    }

    // Adds what adapters add to a tile's sums, as wgmma left them, whose first row is output `first`. The
    // splits of a tile share the adapters among them.
    template <int MB>
    __device__ __forceinline__ void expand(float (&acc)[MB][NT / 2], int first, int split, int splits) const {
        if (p.step == 2) {
            expand_factors<MB, true>(acc, first, split, splits, 0);
            return;
        }
#pragma unroll 1
        for (int factor = low; factor < high; factor++)
            expand_factors<MB, false>(acc, first, split, splits, factor);
    }

    // PAIRS: of two outputs next to each other, the first is factor 0's and the second factor 1's. Otherwise
    // of one factor.
    template <int MB, bool PAIRS>
    __device__ __forceinline__ void expand_factors(float (&acc)[MB][NT / 2], int first, int split, int splits,
                                                   int factor) const {
        constexpr int BATCH = MB * NT > 96 ? 2 : 4;  // (adapter, factor) whose outputs are read at once
        const int lane = threadIdx.x & 31, g = lane / 4, t = lane % 4;
        const int all = lists.count * (1 + PAIRS), n = p.factor[factor].n;
        const int row = first + (threadIdx.x >> 5) * 16 + 2 * t;
        const int column = PAIRS ? row / 2 : row - p.factor[factor].first;
        const int64_t slot = static_cast<int64_t>(p.most) * n;  // elements of an adapter
#pragma unroll 1
        for (int channel = 0; channel < p.room; channel += 16) {
            const int64_t lane_at = static_cast<int64_t>(channel + g) * n + column;
#pragma unroll 1
            for (int q = split; q < all; q += BATCH * splits) {
                // All loads of the batch are issued before any is used. Values outside the factor are 0.
                uint32_t w[BATCH][MB][4];
                each<BATCH>([&](auto b) {
                    const int i = min(q + b * splits, all - 1), number = PAIRS ? i / 2 : i;
                    const int own = PAIRS ? i % 2 : factor, most = lists.ranks[number][own] - channel - g;
                    const T* low8 =
                        static_cast<const T*>(p.factor[own].up) + lists.adapter[number] * slot + lane_at;
                    const T* high8 = low8 + static_cast<int64_t>(8) * n;
                    each<MB>([&](auto m) {
                        each<4>([&](auto part) {
                            constexpr int next = (m * 64 + part % 2 * 8) / (1 + PAIRS);
                            const int at = column + next;
                            const bool has = at >= 0 && at < n && part / 2 * 8 < most;
                            const T* from = part < 2 ? low8 : high8;
                            if constexpr (PAIRS)
                                w[b][m][part] = load2<next * 2>(from, has);
                            else
                                w[b][m][part] = load4<next * 2>(from, has);
                        });
                    });
                });
#pragma unroll
                for (int b = 0; b < BATCH; b++) {
                    const int i = q + b * splits, number = PAIRS ? i / 2 : i, own = PAIRS ? i % 2 : factor;
                    if (i >= all) break;
                    if (lists.ranks[number][own] <= channel) continue;
#pragma unroll
                    for (int m = 0; m < MB; m++)
#pragma unroll
                        for (int part = 0; part < 4; part++)
                            w[b][m][part] = movmatrix(PAIRS ? w[b][m][part] << 16 * own : w[b][m][part]);
#pragma unroll
                    for (int j = 0; j < NT / 8; j++) {
                        const uint32_t these = lists.members[number][j / 4] >> (j % 4 * 8) & 0xff;
                        if (these == 0) continue;
                        const bool mine = these >> g & 1;
                        const T* from = h + (own * NT + j * 8 + g) * p.room + channel + 2 * t;
                        const uint32_t low8 = mine ? *reinterpret_cast<const uint32_t*>(from) : 0;
                        const uint32_t high8 = mine ? *reinterpret_cast<const uint32_t*>(from + 8) : 0;
#pragma unroll
                        for (int m = 0; m < MB; m++) {
                            float d[4] = {acc[m][4 * j], acc[m][4 * j + 1], acc[m][4 * j + 2],
                                          acc[m][4 * j + 3]};
                            mma<T>(d, w[b][m][0], w[b][m][1], w[b][m][2], w[b][m][3], low8, high8);
#pragma unroll
                            for (int c = 0; c < 4; c++) acc[m][4 * j + c] = d[c];
                        }
                    }
                }
            }
        }
    }
};

}  // namespace lora
