// Attention over cached latents (MLA) on tensor cores. All heads share one row of 576 numbers a token; its
// first 512 are the values too. Queries are absorbed, so they have 576 channels as well.
//
// A block takes a tile of 16 MG consecutive (token, head) pairs and a part of their keys. Rows of q follow
// each other in memory, so a decoded token's heads and a prefilled chunk are the same case. Keys pass through
// a ring of cp.async stages. Warp (mg, cg) computes the scores of 16 rows with 1 / CG of a stage's keys, and
// 1 / CG of the value channels of those rows with all keys of the stage; the CG warps of the same rows
// exchange maxima and weights through shared memory. A key is read from shared memory once for its scores
// and once for its values where MG is 1.
#pragma once
#include "../attention/attention.cuh"

namespace latent {

using attention::Args;
using attention::Item;

constexpr int WIDTH = 576, RANK = 512;  // of a cached row; of its values
constexpr int PITCH = WIDTH * 2;        // bytes
constexpr int PIECES = PITCH / 16;

// Where 16-byte piece c of row r lies. Rows are nine lines of 128 bytes; pieces are swizzled by the number of
// their line, so that eight rows of the same piece are in different banks.
__device__ __forceinline__ uint32_t piece(int r, int c) {
    const int line = PITCH / 128 * r + (c >> 3);
    return line * 128 + (((c ^ line) & 7) << 4);
}

// Where piece c of row r of the queries' last channels lies, 16 pieces a row.
__device__ __forceinline__ uint32_t rest_piece(int r, int c) {
    return r * 256 + (c >> 3) * 128 + (((c ^ r) & 7) << 4);
}

// Where piece c (of eight keys) of row r of the weights lies.
template <int KEYS>
__device__ __forceinline__ uint32_t weight_piece(int r, int c) {
    return KEYS == 64 ? r * 128 + ((c ^ (r & 7)) << 4) : r * 64 + ((c ^ (r >> 1 & 3)) << 4);
}

// One warp copies eight rows that follow each other in memory: `valid` of them, and zeros for the others,
// because memory behind a row's last key may hold NaN.
__device__ __forceinline__ void copy_rows(uint32_t to, const void* from, int valid) {
    const int lane = threadIdx.x & 31;
    const char* mine = static_cast<const char*>(from) + lane * 16;
    const uint32_t line = to + (lane >> 3) * 128;
#pragma unroll
    for (int j = 0; j < PIECES * 8 / 32; j++) {
        const uint32_t at = line + j * 512 + (((lane ^ (4 * j + (lane >> 3))) & 7) << 4);
        const bool there = j * 32 + lane < valid * PIECES;
        cp_async16(at, there ? mine + j * 512 : from, there);
    }
}

// HOLD: most channels of the queries stay in registers; else all are in shared memory.
template <int MG_, int CG_, int KEYS_, int STAGES_, bool HOLD_>
struct Shape {
    static constexpr int MG = MG_, CG = CG_, KEYS = KEYS_, STAGES = STAGES_;
    static constexpr bool HOLD = HOLD_;
    static constexpr int WARPS = MG * CG, THREADS = 32 * WARPS, ROWS = 16 * MG;
    static constexpr int HELD = HOLD ? 28 : 0;            // steps of 16 channels; more do not fit
    static constexpr int REST = (WIDTH - 16 * HELD) / 8;  // pieces of a row of the others
    static constexpr int STAGE = KEYS * PITCH, QUERY = ROWS * REST * 16;  // bytes
    static constexpr int WEIGHTS = ROWS * KEYS * 2, ENDS = ROWS * CG * 4;
    static constexpr int SHARED = QUERY + STAGES * STAGE + WEIGHTS + ENDS;
    static constexpr int NK = KEYS / CG / 8, NC = RANK / CG / 8;  // of a warp: key and channel tiles of eight
    static_assert(KEYS / 8 <= WARPS && NK >= 1 && STAGES >= 2 && (KEYS == 64 || KEYS == 32));
};

// A tile of rows and a part of their keys.
struct Work {
    int row, row0, rows;     // the sequence; its first (token, head) pair of the tile, and how many there are
    int first, end, before;  // keys of the part; keys that all queries of the sequence see
    int64_t at, place;       // the tile's first row in q and out, and of the sums; -1: the only part

    template <int KEYS>
    __device__ __forceinline__ int tiles() const {
        return (end - first + KEYS - 1) / KEYS;
    }

    // Heads subgroup · ROWS … of a decoded token.
    template <int ROWS>
    static __device__ __forceinline__ Work decode(const Args& a, const Item& item, int subgroup) {
        const int row0 = subgroup * ROWS;
        const int64_t slot = static_cast<int64_t>(item.slot + item.part()) * a.h + row0;
        return {item.row,
                row0,
                min(ROWS, a.h - row0),
                item.begin,
                item.end,
                item.context - 1,
                static_cast<int64_t>(item.start) * a.h + row0,
                item.slot < 0 ? -1 : slot};
    }
    template <int ROWS, int KEYS>
    static __device__ __forceinline__ Work prefill(const Args& a, const Item& item) {
        const int len = item.end, row0 = item.tile * ROWS, before = item.context - len;
        const int keys = before + min(len - 1, (row0 + ROWS - 1) / a.h) + 1;
        const int stages = (keys + KEYS - 1) / KEYS;
        const int64_t slot = static_cast<int64_t>(item.slot + item.part()) * ROWS;
        return {item.row,
                row0,
                min(ROWS, len * a.h - row0),
                stages * item.part() / item.parts() * KEYS,
                min(keys, stages * (item.part() + 1) / item.parts() * KEYS),
                before,
                static_cast<int64_t>(item.start) * a.h + row0,
                item.slot < 0 ? -1 : slot};
    }
};

// Which tiles a block takes. `prefill`: of rows of several tokens; else parts of decoded rows.
template <typename S>
struct Schedule {
    const Args& a;
    bool prefill;
    int units, unit, step, total;
    __device__ __forceinline__ Schedule(const Args& args, bool is_prefill) : a(args), prefill(is_prefill) {
        // A unit is a part and, of a decoded row, a tile of its heads. The parts of a share go to the blocks
        // of its group, one for each tile of heads; without shares any block takes any unit.
        units = prefill ? 1 : (a.h + S::ROWS - 1) / S::ROWS;
        unit = blockIdx.x, step = gridDim.x, total = (prefill ? a.plan->prefill : a.plan->decode) * units;
        if (!prefill && a.firsts) {
            const int* share = a.firsts + blockIdx.x / units;
            unit = share[0] * units + blockIdx.x % units, step = units, total = share[1] * units;
        }
    }
    __device__ __forceinline__ bool more() const { return unit < total; }
    __device__ __forceinline__ Work next() {
        const Item item = attention::load_item(a.items + unit / units);
        const int subgroup = unit % units;
        unit += step;
        return prefill ? Work::prefill<S::ROWS, S::KEYS>(a, item) : Work::decode<S::ROWS>(a, item, subgroup);
    }
};

// A block's way through its tiles: one ring of stages over the keys of all of them, so that the next tile's
// keys are under way while a tile ends.
template <typename T, typename S>
struct Ring {
    static constexpr int KEYS = S::KEYS, STAGES = S::STAGES;
    const Args& a;
    Schedule<S> schedule;  // of the tiles whose keys are copied
    uint32_t stages;       // address of the first
    Work work = {};        // the tile whose keys are copied
    int tile = 0;          // of KEYS keys of it: the next that is copied
    int taken = 0;         // stages copied so far
    int entry = 0;         // which block holds this warp's next keys
    int warp = threadIdx.x >> 5;

    // Each of the first KEYS / 8 warps copies eight keys of a stage; they are in one block.
    __device__ __forceinline__ int key() const { return work.first + tile * KEYS + 8 * warp; }
    __device__ __forceinline__ void find_entry() {
        const int* table = a.block_table + static_cast<int64_t>(work.row) * a.table_width;
        entry = warp < KEYS / 8 && key() < work.end ? table[key() / a.block_size] : 0;
    }
    // To the next tile that has keys.
    __device__ __forceinline__ void advance() {
        while (tile >= work.tiles<KEYS>() && schedule.more()) {
            work = schedule.next(), tile = 0;
            find_entry();
        }
    }
    // Whether the next stage has no key that the launch ahead caches: no row's newest.
    __device__ __forceinline__ bool older() {
        advance();
        return work.first + (tile + 1) * KEYS <= work.before;
    }
    // Requests the next stage of keys, or nothing behind the last tile.
    __device__ __forceinline__ void issue() {
        advance();
        if (tile < work.tiles<KEYS>()) {
            if (warp < KEYS / 8) {
                const int valid = min(8, work.end - key());
                const T* from = static_cast<const T*>(a.kv);
                if (valid > 0) from += entry * a.page_stride + key() % a.block_size * WIDTH;
                copy_rows(stages + taken % STAGES * S::STAGE + warp * 8 * PITCH, from, valid);
            }
            tile++;
            find_entry();  // a stage ahead: the copy must not wait for the table
        }
        taken++;
        cp_async_commit();
    }
};

// Computes the tile w, whose first stages have been requested. Every thread of the block takes part.
template <typename T, typename S>
__device__ __forceinline__ void attend(const Args& a, const Work& w, Ring<T, S>& ring, uint8_t* shared) {
    constexpr int KEYS = S::KEYS, STAGES = S::STAGES, NK = S::NK, NC = S::NC, CG = S::CG;
    // Sums side by side, so that products need not wait for each other.
    constexpr int CHAINS = NK == 1 ? 4 : 1;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int mg = warp / CG, cg = warp % CG;
    const uint32_t weights = ring.stages + STAGES * S::STAGE;
    float* ends = reinterpret_cast<float*>(shared + S::QUERY + STAGES * S::STAGE + S::WEIGHTS);
    const int tiles = w.tiles<KEYS>(), start = ring.taken - (STAGES - 1);  // of the tile's stages

    // Held channels pass through the stage that is filled next.
    const uint32_t query = ring.stages - S::QUERY;
    const uint32_t queries = S::HOLD ? ring.stages + ring.taken % STAGES * S::STAGE : query;
    const T* from = static_cast<const T*>(a.q) + w.at * WIDTH;
    for (int e = warp; e < S::ROWS / 8; e += S::WARPS)
        copy_rows(queries + e * 8 * PITCH, from + (8 * e < w.rows ? 8 * e : 0) * WIDTH, w.rows - 8 * e);
    if constexpr (S::HOLD) {
        static_assert(S::ROWS * S::REST == S::THREADS);
        const int r = threadIdx.x / S::REST, c = threadIdx.x % S::REST;
        const bool there = r < w.rows;
        cp_async16(query + rest_piece(r, c), there ? from + r * WIDTH + 16 * S::HELD + c * 8 : from, there);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const uint32_t q_rows = queries + mg * 16 * PITCH;
    uint32_t qf[S::HOLD ? S::HELD : 1][4];
    if constexpr (S::HOLD) {
#pragma unroll
        for (int k = 0; k < S::HELD; k++) ldmatrix4(qf[k], q_rows + piece(lane & 15, 2 * k + (lane >> 4)));
    }

    float o[NC][4] = {};
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {};  // of rows g and g + 8; l: of this lane's keys
    int sees[2];                                     // keys that these rows see
#pragma unroll
    for (int i = 0; i < 2; i++) sees[i] = min(w.end, w.before + (w.row0 + mg * 16 + g + 8 * i) / a.h + 1);
    const int full = min(w.end, w.before + w.row0 / a.h + 1);  // keys that every row sees
    float* my_ends = ends + (mg * 16 + g) * CG;
    for (int tile = 0; tile < tiles; tile++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage is there, and the one before it has been read by all
        ring.issue();
        const uint32_t stage = ring.stages + (start + tile) % STAGES * S::STAGE;
        const int key0 = w.first + tile * KEYS;

        float chains[NK][CHAINS][4] = {};
        const uint32_t keys_at = stage + cg * NK * 8 * PITCH;
#pragma unroll
        for (int k = 0; k < WIDTH / 32; k++) {
            uint32_t q[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int step = 2 * k + i;
                if constexpr (!S::HOLD)
                    ldmatrix4(q[i], q_rows + piece(lane & 15, 2 * step + (lane >> 4)));
                else if (step >= S::HELD)
                    ldmatrix4(q[i], query + rest_piece(lane & 15, 2 * (step - S::HELD) + (lane >> 4)));
            }
#pragma unroll
            for (int n = 0; n < NK; n++) {
                uint32_t r[4];
                ldmatrix4(r, keys_at + piece(n * 8 + (lane & 7), 4 * k + (lane >> 3)));
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int step = 2 * k + i;
                    const uint32_t (&f)[4] = step < S::HELD ? qf[step < S::HELD ? step : 0] : q[i];
                    mma<T>(chains[n][step % CHAINS], f[0], f[1], f[2], f[3], r[2 * i], r[2 * i + 1]);
                }
            }
        }
        float s[NK][4];
#pragma unroll
        for (int n = 0; n < NK; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[n][i] = chains[n][0][i];
#pragma unroll
                for (int c = 1; c < CHAINS; c++) s[n][i] += chains[n][c][i];
            }
        if (key0 + KEYS > full) {
#pragma unroll
            for (int n = 0; n < NK; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (key0 + (cg * NK + n) * 8 + 2 * t + (i & 1) >= sees[i >> 1]) s[n][i] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < NK; n++) top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            if (t == 0) my_ends[8 * i * CG + cg] = top * a.scale_log2;
        }
        named_wait<CG * 32>(1 + mg);
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = m[i];
#pragma unroll
            for (int c = 0; c < CG; c++) top = fmaxf(top, my_ends[8 * i * CG + c]);
            const float base = top == -INFINITY ? 0.f : top;  // a row that has seen no key yet
            scale[i] = exp2_fast(m[i] - base);
            m[i] = top;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < NK; n++) {
#pragma unroll
                for (int j = 2 * i; j < 2 * i + 2; j++) {
                    s[n][j] = exp2_fast(fmaf(s[n][j], a.scale_log2, -base));
                    sum += s[n][j];
                }
                const uint32_t to = weight_piece<KEYS>(mg * 16 + g + 8 * i, cg * NK + n) + 4 * t;
                *reinterpret_cast<uint32_t*>(shared + S::QUERY + STAGES * S::STAGE + to) =
                    pack2<T>(s[n][2 * i], s[n][2 * i + 1]);
            }
            l[i] = l[i] * scale[i] + sum;
        }
        named_wait<CG * 32>(1 + mg);
#pragma unroll
        for (int d = 0; d < NC; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[d][i] *= scale[i >> 1];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t p[4];
            ldmatrix4(p, weights + weight_piece<KEYS>(mg * 16 + (lane & 15), 2 * k + (lane >> 4)));
#pragma unroll
            for (int d = 0; d < NC / 2; d++) {
                uint32_t r[4];
                ldmatrix4_trans(r, stage + piece(k * 16 + (lane >> 3 & 1) * 8 + (lane & 7),
                                                 cg * NC + 2 * d + (lane >> 4)));
                mma<T>(o[2 * d], p[0], p[1], p[2], p[3], r[0], r[1]);
                mma<T>(o[2 * d + 1], p[0], p[1], p[2], p[3], r[2], r[3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(~0u, l[i], 1);
        l[i] += __shfl_xor_sync(~0u, l[i], 2);
        if (t == 0) my_ends[8 * i * CG + cg] = l[i];
    }
    named_wait<CG * 32>(1 + mg);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = mg * 16 + g + 8 * i;
        if (r >= w.rows) continue;
        float sum = 0;
#pragma unroll
        for (int c = 0; c < CG; c++) sum += my_ends[8 * i * CG + c];
        const int channel = cg * NC * 8 + 2 * t;
        if (w.place < 0) {
            const float inverse = 1.f / sum;
            T* to = static_cast<T*>(a.out) + (w.at + r) * RANK + channel;
#pragma unroll
            for (int d = 0; d < NC; d++)
                *reinterpret_cast<uint32_t*>(to + d * 8) =
                    pack2<T>(o[d][2 * i] * inverse, o[d][2 * i + 1] * inverse);
        } else {
            if (cg == 0 && t == 0) a.heads[w.place + r] = make_float2(m[i], sum);
            float* to = a.sums + (w.place + r) * RANK + channel;
#pragma unroll
            for (int d = 0; d < NC; d++)
                *reinterpret_cast<float2*>(to + d * 8) = make_float2(o[d][2 * i], o[d][2 * i + 1]);
        }
    }
    __syncthreads();  // the next tile's copies go to the same memory
}

// EARLY: keys were cached before the kernel ahead of this one began; OLDER: so were those of decoded rows but
// for each row's newest.
constexpr int PREFILL = 1, EARLY = 2, OLDER = 4;

template <typename T, typename S>
__device__ __forceinline__ void run(const Args& a, int flags) {
    extern __shared__ __align__(128) uint8_t shared[];
    if (!(flags & (EARLY | OLDER))) pdl_wait();
    Schedule<S> schedule(a, flags & PREFILL);
    Ring<T, S> ring{a, schedule, shared_address(shared) + S::QUERY};
    int ahead = 0;
    for (; ahead < S::STAGES - 1 && (!(flags & OLDER) || ring.older()); ahead++) ring.issue();
    if (flags & (EARLY | OLDER)) pdl_wait();
    for (; ahead < S::STAGES - 1; ahead++) ring.issue();
    pdl_launch();
    while (schedule.more()) attend<T, S>(a, schedule.next(), ring, shared);
    cp_async_wait<0>();
}

}  // namespace latent

#define LATENT_KERNEL(TYPE, T, NAME, SHARED_, ...)                                       \
    extern "C" __global__ void __launch_bounds__(latent::Shape<__VA_ARGS__>::THREADS, 1) \
        latent_attention_##TYPE##_##NAME(attention::Args a, int flags) {                 \
        static_assert(latent::Shape<__VA_ARGS__>::SHARED == SHARED_);                    \
        latent::run<T, latent::Shape<__VA_ARGS__>>(a, flags);                            \
    }
// Blocks of 227 KiB (Hopper, data-centre Blackwell), 163 KiB (A100) and 99 KiB (others). The last serves both
// decoded and prefilled rows.
#define LATENT_KERNELS(TYPE, T)                                    \
    LATENT_KERNEL(TYPE, T, r16_k64_s3, 227840, 1, 8, 64, 3, true)  \
    LATENT_KERNEL(TYPE, T, r64_k64_s2, 229888, 4, 2, 64, 2, false) \
    LATENT_KERNEL(TYPE, T, r16_k64_s2, 154112, 1, 8, 64, 2, true)  \
    LATENT_KERNEL(TYPE, T, r64_k32_s2, 152064, 4, 2, 32, 2, false) \
    LATENT_KERNEL(TYPE, T, r16_k32_s2, 93440, 1, 4, 32, 2, false)
