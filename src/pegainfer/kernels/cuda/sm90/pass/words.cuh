// How the blocks of a pass over one row exchange results.
#pragma once
#include "../../common/rope/rope.cuh"
#include "operands.cuh"

namespace pass {

// Blocks exchange results in words that hold 16 bits of value and a tag. The tag differs for every GEMM of a
// launch and for every launch, so a reader polls the word until it has the expected tag. No fence is needed,
// which would wait for all outstanding copies, and no barrier. No block overwrites a word that another still
// reads: before a block writes it again, it has results that depend on every reader. (Therefore a block
// without rows in a GEMM must not read that GEMM's input, and attention waits for k and v even where it reads
// no key.)
__device__ __forceinline__ void store_tagged(uint32_t* to, uint16_t value, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value | tag << 16) : "memory");
}
template <typename T>
__device__ __forceinline__ void store_tagged(uint32_t* to, T value, uint32_t tag) {
    store_tagged(to, *reinterpret_cast<uint16_t*>(&value), tag);
}
__device__ __forceinline__ bool tagged(uint4 v, uint32_t tag) {
    return (v.x >> 16 == tag) & (v.y >> 16 == tag) & (v.z >> 16 == tag) & (v.w >> 16 == tag);
}
__device__ __forceinline__ uint4 poll(const uint32_t* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
// The values of two words in one.
__device__ __forceinline__ uint32_t values(uint32_t low, uint32_t high) {
    return __byte_perm(low, high, 0x5410);
}
// Polls until the lane's part of a head has arrived, and returns it.
template <typename T, int D>
__device__ __forceinline__ HeadPart<T, D> await_head(const uint32_t* head, uint32_t tag) {
    constexpr int N = HeadLanes<D>::N;
    const uint32_t* from = head + (threadIdx.x & 31) * N;
    HeadPart<T, D> x;
    uint32_t words[2 * N];
    bool there;
    do {
        there = true;
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const uint32_t* p = from + i / N * (D / 2) + i % N;
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(words[i]) : "l"(p) : "memory");
            there &= words[i] >> 16 == tag;
        }
    } while (!there);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const uint16_t low = words[i], high = words[N + i];
        x.low.v[i] = *reinterpret_cast<const T*>(&low), x.high.v[i] = *reinterpret_cast<const T*>(&high);
    }
    return x;
}
// The same for a float, with a tag of 32 bits.
__device__ __forceinline__ void store_tagged(uint2* to, float value, uint32_t tag) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to),
                 "l"(static_cast<uint64_t>(tag) << 32 | __float_as_uint(value))
                 : "memory");
}
__device__ __forceinline__ float await_float(const uint2* from, uint32_t tag) {
    uint64_t v;
    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
    } while (v >> 32 != tag);
    return __uint_as_float(static_cast<uint32_t>(v));
}

// Where words of each kind lie.
struct Words {
    const Args& a;
    int d;  // of a head
    __device__ __forceinline__ uint32_t* x() const { return a.words; }
    __device__ __forceinline__ uint32_t* qkv() const { return x() + a.m; }
    __device__ __forceinline__ uint32_t* attn() const { return qkv() + (a.h + 2 * a.g) * d; }
    __device__ __forceinline__ uint32_t* act() const { return attn() + a.h * d; }
};

}  // namespace pass
