// Instructions of sm_90a: mbarriers that count bytes, TMA copies, and wgmma.
#pragma once
#include "ptx.cuh"

// mbarriers in shared memory. `parity`: of the phase to wait for, 0 for the first; a wait for parity 1 on an
// mbarrier that was just initialised returns at once.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised mbarriers visible to TMA. The thread that initialised them calls it before it
// synchronises with the others.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Whether mbarrier_wait would return at once.
__device__ __forceinline__ bool mbarrier_ready(uint32_t barrier, uint32_t parity) {
    uint32_t ready;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ready)
        : "r"(barrier), "r"(parity)
        : "memory");
    return ready;
}

// Makes earlier stores to shared memory visible to wgmma and TMA. Without `.shared::cta` it would be a fence
// of the device's memory, which takes a microsecond.
__device__ __forceinline__ void async_proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// L2's treatment of copied lines: streamed once, or wanted again.
__device__ __forceinline__ uint64_t l2_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t l2_evict_last() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Issues a TMA copy of contiguous bytes, a multiple of 16 on both sides, and counts them at the mbarrier.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// Issues a TMA copy of the box at the given coordinates (elements, innermost first) and counts its bytes at
// the mbarrier.
__device__ __forceinline__ void tma_load2(uint32_t to, const void* map, int x0, int x1, uint32_t barrier,
                                          uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x0), "r"(x1), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_load3(uint32_t to, const void* map, int x0, int x1, int x2,
                                          uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_load5(uint32_t to, const void* map, int x0, int x1, int x2, int x3,
                                          int x4, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(map), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void tma_prefetch(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Registers of a warpgroup, moved between its warps' shares of the SM.
template <int N>
__device__ __forceinline__ void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void registers_drop() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// An operand of wgmma in shared memory: rows of 128 bytes, swizzled as TMA does (16-byte piece c
// of row r at c ^ r % 8), eight rows one after the other. `group`: bytes from eight rows to the next eight.
// An operand whose rows run along the GEMM's sum (transposed) has its 64-element columns `column` bytes
// apart.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t at, uint32_t group, uint32_t column = 16) {
    return static_cast<uint64_t>((at & 0x3ffff) >> 4) | static_cast<uint64_t>(column >> 4) << 16 |
           static_cast<uint64_t>(group >> 4) << 32 | 1ull << 62;
}

// Before a warpgroup's first GEMM and wherever it has touched registers that the next one uses.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N committed groups are under way.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving uses of a GEMM's registers across a fence or a wait.
template <int N>
__device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// d[64 x N] (+)= a[64 x 16] · b[16 x N], float32 sums, by a warpgroup; lane l of warp w holds rows 16w + l /
// 4 and 8 more of every column pair 8j + 2(l % 4), as mma does. `ss`: a [64 rows of K] and b [N rows of K] in
// shared memory; `ss_k_rows`: b as [K rows of N]. `rs`: a in registers, laid out as mma's, and b in shared
// memory as [K rows of N]; `rs_rows`: b as [N rows of K]. E4M3 (type e4m3) has 32 columns of K, and `ss`
// alone.
template <typename T, int N>
struct Wgmma;

// The registers of d as text and as operands, by their number.
#define PEGA_R4 "%0,%1,%2,%3"
#define PEGA_R8 PEGA_R4 ",%4,%5,%6,%7"
#define PEGA_R16 PEGA_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define PEGA_R32 PEGA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PEGA_R44 PEGA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43"
#define PEGA_R48 PEGA_R44 ",%44,%45,%46,%47"
#define PEGA_R64                                                                    \
    PEGA_R32                                                                        \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
    "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PEGA_R76 PEGA_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75"
#define PEGA_R80 PEGA_R76 ",%76,%77,%78,%79"
#define PEGA_R128                                                                       \
    PEGA_R76                                                                            \
    ",%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95," \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
    "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define PEGA_FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PEGA_D4 PEGA_FOUR(0)
#define PEGA_D8 PEGA_D4, PEGA_FOUR(4)
#define PEGA_D16 PEGA_D8, PEGA_FOUR(8), PEGA_FOUR(12)
#define PEGA_D32 PEGA_D16, PEGA_FOUR(16), PEGA_FOUR(20), PEGA_FOUR(24), PEGA_FOUR(28)
#define PEGA_D44 PEGA_D32, PEGA_FOUR(32), PEGA_FOUR(36), PEGA_FOUR(40)
#define PEGA_D48 PEGA_D44, PEGA_FOUR(44)
#define PEGA_D64                                                                                        \
    PEGA_D32, PEGA_FOUR(32), PEGA_FOUR(36), PEGA_FOUR(40), PEGA_FOUR(44), PEGA_FOUR(48), PEGA_FOUR(52), \
        PEGA_FOUR(56), PEGA_FOUR(60)
#define PEGA_D76 PEGA_D64, PEGA_FOUR(64), PEGA_FOUR(68), PEGA_FOUR(72)
#define PEGA_D80 PEGA_D76, PEGA_FOUR(76)
#define PEGA_D128                                                                                       \
    PEGA_D76, PEGA_FOUR(76), PEGA_FOUR(80), PEGA_FOUR(84), PEGA_FOUR(88), PEGA_FOUR(92), PEGA_FOUR(96), \
        PEGA_FOUR(100), PEGA_FOUR(104), PEGA_FOUR(108), PEGA_FOUR(112), PEGA_FOUR(116), PEGA_FOUR(120), \
        PEGA_FOUR(124)
// A to F: the numbers of the operands behind d's.
#define PEGA_WGMMA(T, NAME, N, HALF, A, B, C, D, E, F)                                                      \
    template <>                                                                                             \
    struct Wgmma<T, N> {                                                                                    \
        static __device__ __forceinline__ void ss(float (&d)[HALF], uint64_t a, uint64_t b, bool add) {     \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                            \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" PEGA_R##HALF  \
                         "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}"                                           \
                         : PEGA_D##HALF                                                                     \
                         : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                     \
        }                                                                                                   \
        static __device__ __forceinline__ void ss_k_rows(float (&d)[HALF], uint64_t a, uint64_t b,          \
                                                         bool add) {                                        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                            \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" PEGA_R##HALF  \
                         "}, %" #A ", %" #B ", p, 1, 1, 0, 1;\n}"                                           \
                         : PEGA_D##HALF                                                                     \
                         : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                     \
        }                                                                                                   \
        static __device__ __forceinline__ void rs(float (&d)[HALF], const uint32_t* a, uint64_t b,          \
                                                  bool add) {                                               \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F                                            \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" PEGA_R##HALF  \
                         "}, {%" #A ",%" #B ",%" #C ",%" #D "}, %" #E ", p, 1, 1, 1;\n}"                    \
                         : PEGA_D##HALF                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
        }                                                                                                   \
        static __device__ __forceinline__ void rs_rows(float (&d)[HALF], const uint32_t* a, uint64_t b,     \
                                                       bool add) {                                          \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #F                                            \
                         ", 0;\n"                                                                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" PEGA_R##HALF  \
                         "}, {%" #A ",%" #B ",%" #C ",%" #D "}, %" #E ", p, 1, 1, 0;\n}"                    \
                         : PEGA_D##HALF                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
        }                                                                                                   \
    };
// A to C: likewise.
#define PEGA_WGMMA8(N, HALF, A, B, C)                                                                   \
    template <>                                                                                         \
    struct Wgmma<e4m3, N> {                                                                             \
        static __device__ __forceinline__ void ss(float (&d)[HALF], uint64_t a, uint64_t b, bool add) { \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #C                                        \
                         ", 0;\n"                                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" PEGA_R##HALF      \
                         "}, %" #A ", %" #B ", p, 1, 1;\n}"                                             \
                         : PEGA_D##HALF                                                                 \
                         : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                 \
        }                                                                                               \
    };
#define PEGA_WGMMAS(T, NAME)                             \
    PEGA_WGMMA(T, NAME, 8, 4, 4, 5, 6, 7, 8, 9)          \
    PEGA_WGMMA(T, NAME, 16, 8, 8, 9, 10, 11, 12, 13)     \
    PEGA_WGMMA(T, NAME, 32, 16, 16, 17, 18, 19, 20, 21)  \
    PEGA_WGMMA(T, NAME, 64, 32, 32, 33, 34, 35, 36, 37)  \
    PEGA_WGMMA(T, NAME, 88, 44, 44, 45, 46, 47, 48, 49)  \
    PEGA_WGMMA(T, NAME, 96, 48, 48, 49, 50, 51, 52, 53)  \
    PEGA_WGMMA(T, NAME, 128, 64, 64, 65, 66, 67, 68, 69) \
    PEGA_WGMMA(T, NAME, 152, 76, 76, 77, 78, 79, 80, 81) \
    PEGA_WGMMA(T, NAME, 256, 128, 128, 129, 130, 131, 132, 133)
PEGA_WGMMAS(bf16, "bf16")
PEGA_WGMMAS(f16, "f16")
PEGA_WGMMA8(8, 4, 4, 5, 6)
PEGA_WGMMA8(16, 8, 8, 9, 10)
PEGA_WGMMA8(32, 16, 16, 17, 18)
PEGA_WGMMA8(64, 32, 32, 33, 34)
PEGA_WGMMA8(96, 48, 48, 49, 50)
PEGA_WGMMA8(128, 64, 64, 65, 66)
PEGA_WGMMA8(160, 80, 80, 81, 82)
#undef PEGA_WGMMAS
#undef PEGA_WGMMA
#undef PEGA_WGMMA8
