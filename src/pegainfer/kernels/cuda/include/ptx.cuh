// The instructions that C++ has no words for. Those of one architecture fall away on the others.
#pragma once
#include "types.cuh"

// Programmatic dependent launch. `pdl_wait` returns when the kernel before this one has ended and its writes
// are visible; every kernel calls it in every thread that reads or writes what others touch, and lets the
// next one start (`pdl_launch`) only after it. So whatever runs ahead of a kernel's `pdl_wait` may read what
// the kernel before the last one wrote, and constants; the last one's work is not done yet.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier of THREADS of the block's threads, whole warps, by number (0 is __syncthreads): some wait for
// all, others may go on once they have arrived.
template <int THREADS>
__device__ __forceinline__ void named_wait(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void named_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 16 bytes from global to shared memory past L1; with `valid` false, zeros instead (nothing is read).
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most N of this thread's groups are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
// The same for a number known at run time; beyond seven it waits for more than it must.
__device__ __forceinline__ void cp_async_wait_upto(int n) {
    switch (n) {
        case 0:
            cp_async_wait<0>();
            break;
        case 1:
            cp_async_wait<1>();
            break;
        case 2:
            cp_async_wait<2>();
            break;
        case 3:
            cp_async_wait<3>();
            break;
        case 4:
            cp_async_wait<4>();
            break;
        case 5:
            cp_async_wait<5>();
            break;
        case 6:
            cp_async_wait<6>();
            break;
        default:
            cp_async_wait<7>();
    }
}

__device__ __forceinline__ uint4 load_shared16(uint32_t p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_shared8(uint32_t p) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_shared16(uint32_t p, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void store_shared4(uint32_t p, uint32_t v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared8(uint32_t p, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(p), "r"(v.x), "r"(v.y) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(p)
                 : "memory");
}
// Two of them; lanes from 16 on count for nothing.
__device__ __forceinline__ void ldmatrix2(uint32_t (&r)[2], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(p)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix2_trans(uint32_t (&r)[2], uint32_t p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(p)
                 : "memory");
}
// Transposes the 8x8 matrix of 16-bit elements that the warp holds.
__device__ __forceinline__ uint32_t movmatrix(uint32_t v) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// Among four lanes, word i of lane t becomes word t of lane i.
__device__ __forceinline__ void transpose4(uint32_t (&v)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
        (odd ? v[i] : v[i + 1]) = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
        (high ? v[i] : v[i + 2]) = got;
    }
}

// d[16x8] += a[16x16] · b[16x8], float32 sums. With g = lane / 4, t = lane % 4:
//   a: (g, 2t) (g+8, 2t) (g, 2t+8) (g+8, 2t+8), each with the element to its right
//   b: (2t, g) (2t+8, g), each with the element below;   d: (g, 2t) (g, 2t+1) (g+8, 2t) (g+8, 2t+1)
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                    uint32_t b0, uint32_t b1);
#define PEGA_MMA(T, NAME)                                                                        \
    template <>                                                                                  \
    __device__ __forceinline__ void mma<T>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, \
                                           uint32_t a3, uint32_t b0, uint32_t b1) {              \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                      \
                     ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                            \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                    \
    }
PEGA_MMA(bf16, "bf16")
PEGA_MMA(f16, "f16")
#undef PEGA_MMA

// a · b + c of two bf16 numbers each, rounded once.
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

#if __CUDA_ARCH__ >= 890
// Two values as E4M3 codes, rounded to the nearest, saturating; the low byte is the first.
__device__ __forceinline__ uint16_t to_e4m3x2(float first, float second) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
}
#endif
// What one GPU writes for another one, or reads of the host's memory. The release makes visible all writes
// that the thread knows of, those before a barrier of its block included.
__device__ __forceinline__ void store_release(int64_t* p, int64_t v) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ int64_t load_acquire(const int64_t* p) {
    int64_t v;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ int load_system(const int* p) {
    int v;
    asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void store_system(int* p, int v) {
    asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Words that say themselves that they have arrived: each half of 8 bytes is written and read as one.
__device__ __forceinline__ void store_words(uint4* p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ uint4 load_words(const uint4* p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v));
    return v;
}
