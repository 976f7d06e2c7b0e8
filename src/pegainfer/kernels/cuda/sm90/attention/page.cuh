// A page of 16 cached tokens in shared memory as TMA brings it (Hopper), and what a warp makes of
// it for one token's queries.
#pragma once
#include "../../common/attention/decode.cuh"
#include "hopper.cuh"

namespace attention {

// 16-byte piece c of row r of a page's keys or values, as a box of [2][D / 64][8][64] with swizzle lies.
template <int D>
__device__ __forceinline__ uint32_t boxed(int r, int c) {
    return ((r >> 3) * (D / 64) + (c >> 3)) * 1024 + (r & 7) * 128 + (((c & 7) ^ (r & 7)) << 4);
}

template <typename T, int D, typename Address>
__device__ __forceinline__ void place_head(const HeadPart<T, D>& x, uint8_t* to, Address address) {
    constexpr int N = HeadLanes<D>::N, LANES = 8 / N;  // of a piece
    const int lane = threadIdx.x & 31, c = lane / LANES, within = lane % LANES * N * 2;
    store(reinterpret_cast<T*>(to + address(c) + within), x.low);
    store(reinterpret_cast<T*>(to + address(c + D / 16) + within), x.high);
}

// The newest token's key and value, as the warp that comes to its page keeps them.
template <typename T, int D>
struct NewestPair {
    HeadPart<T, D> key, value;
};

// Puts the newest token's key and value where the page has it last (`valid` tokens), and zeros behind its
// values: what lies there is not ours and may be NaN.
template <typename T, int D, bool RAW>
__device__ __forceinline__ void complete_page(uint8_t* page, const NewestPair<T, D>& newest, int valid) {
    constexpr int VALUES = 16 * D * 2;
    if constexpr (RAW) {
        auto row = [&](int c) { return boxed<D>(valid - 1, c); };
        place_head(newest.key, page, row), place_head(newest.value, page + VALUES, row);
    }
    for (int j = threadIdx.x & 31; j < (16 - valid) * (D / 8); j += 32)
        store_shared16(shared_address(page) + VALUES + boxed<D>(valid + j / (D / 8), j % (D / 8)),
                       make_uint4(0, 0, 0, 0));
    __syncwarp();
}

}  // namespace attention
