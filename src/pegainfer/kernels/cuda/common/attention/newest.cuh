// Where decoding takes the newest token's q, k and v from: q is there and k and v are in the cache, or all
// three are as the projection left them and the warps that need them finish them (rope/norm_rope_append.cu
// does the same in a launch of its own, to the same bits).
//
// Each streaming warp normalises and rotates the query heads of its unit for itself, in shared memory that
// holds its outputs later: no warp waits for another. The one whose pages end with the newest token does so
// with its key, writes key and value to the cache, and puts them into its stage when it comes to that page.
// The page itself is fetched with zeros in the token's place, so it may come before they are known.
#pragma once
#include "../rope/store.cuh"
#include "attention.cuh"

namespace attention {

struct Stored {
    static constexpr bool RAW = false;
    // Heads of q from this one on, D elements apart.
    template <typename T>
    __device__ __forceinline__ const T* queries(const Args& a, int token, int head, int d) const {
        return static_cast<const T*>(a.q) + (static_cast<int64_t>(token) * a.h + head) * d;
    }
};

struct Projected : ProjectedArgs {
    static constexpr bool RAW = true;
    template <typename T>
    __device__ __forceinline__ const T* queries(const Args& a, int token, int head, int d) const {
        return static_cast<const T*>(qkv) + (static_cast<int64_t>(token) * width + head) * d;
    }
};

// One warp's share in it. C: what the cache holds.
template <typename T, typename C, int D>
struct Newest {
    static constexpr int AT_ONCE = 4;  // heads
    HeadPart<float, D> cos_sin, q_weight, k_weight;
    HeadPart<T, D> key, value;
    int slot;

    // What the launch before this one does not write.
    __device__ __forceinline__ void prepare(const Projected& p, int token) {
        const int lane = threadIdx.x & 31;
        cos_sin.load_from(p.cos_sin + static_cast<int64_t>(p.positions[token]) * D, lane);
        q_weight = load_weight<D>(p.q_norm, lane), k_weight = load_weight<D>(p.k_norm, lane);
        slot = p.slots[token];
    }
    // `heads` query heads from `first` on of a KV head's group go to `to`, swizzled rows; key and value stay.
    __device__ __forceinline__ void finish(const Args& a, const Projected& p, int token, int kv_head,
                                           int first, int heads, uint8_t* to) {
        const int lane = threadIdx.x & 31, head = kv_head * (a.h / a.g) + first;
        const T* q = p.queries<T>(a, token, head, D);
        const T* k = p.queries<T>(a, token, a.h + kv_head, D);
        key.load_from(k, lane), value.load_from(k + static_cast<int64_t>(a.g) * D, lane);
#pragma unroll 1
        for (int h0 = 0; h0 < heads; h0 += AT_ONCE) {
            HeadPart<T, D> x[AT_ONCE];
            float scale[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) x[i].load_from(q + min(h0 + i, heads - 1) * D, lane);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) scale[i] = p.q_norm ? head_scale(x[i], p.eps) : 1.f;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                apply_rope(x[i], scale[i], q_weight, cos_sin);
                if (h0 + i < heads) place(x[i], to + (h0 + i) * (D * 2), h0 + i);
            }
        }
        apply_rope(key, p.k_norm ? head_scale(key, p.eps) : 1.f, k_weight, cos_sin);
    }
    __device__ __forceinline__ void append(const Args& a, const Projected& p, int kv_head) const {
        if (slot < 0) return;
        C* to = static_cast<C*>(p.kv) + slot / a.block_size * a.page_stride +
                (static_cast<int64_t>(kv_head) * a.block_size + slot % a.block_size) * D;
        const int lane = threadIdx.x & 31;
        cached<C>(key, p.k_inverse).store_to(to, lane);
        cached<C>(value, p.v_inverse).store_to(to + static_cast<int64_t>(a.g) * a.block_size * D, lane);
    }
    // Into row `row` of a page of keys and values in shared memory.
    __device__ __forceinline__ void patch(const Projected& p, uint8_t* page, int row) const {
        constexpr int ROW = D * sizeof(C);
        place(cached<C>(key, p.k_inverse), page + row * ROW, row);
        place(cached<C>(value, p.v_inverse), page + (16 + row) * ROW, row);
    }

  private:
    // A lane's part of a tile's row, whose 16-byte pieces are swizzled as `piece_of` does.
    template <typename E>
    static __device__ __forceinline__ void place(const HeadPart<E, D>& x, uint8_t* to, int row) {
        constexpr int BYTES = HeadLanes<D>::N * sizeof(E), LANES = 16 / BYTES;  // of a piece
        constexpr int ROW = D * sizeof(E), HALF = ROW / 32;                     // pieces of half a row
        const int lane = threadIdx.x & 31, c = lane / LANES, within = lane % LANES * BYTES;
        store(reinterpret_cast<E*>(to + ((c ^ swizzle<ROW>(row)) << 4) + within), x.low);
        store(reinterpret_cast<E*>(to + (((c + HALF) ^ swizzle<ROW>(row)) << 4) + within), x.high);
    }
};

}  // namespace attention
