// What this machine does at the most: bytes read, float32, 8-bit and bf16 operations a second. The
// kernels are held against these ceilings, so each is measured on the kernels' own threads and vectors.
#include <chrono>

#include "kernels.h"
#include "pool.h"

#ifdef PEGA_X86
#include <immintrin.h>
#endif
#ifdef PEGA_ARM64
#include <arm_neon.h>
#endif

#define PEGA_API extern "C" __attribute__((visibility("default")))

namespace pega {

namespace {

constexpr int kChains = 12;            // independent sums: more than latency times throughput of any FMA unit
constexpr int64_t kPiecesAThread = 8;  // a thread that starts late leaves pieces to the others

// One instruction set's ceilings. `read` returns something that depends on every byte.
struct Ceiling {
    const char* isa;
    uint64_t (*read)(const uint8_t* p, int64_t bytes);  // bytes: a multiple of 512
    void (*f32)(int64_t rounds);
    int64_t f32_ops;  // multiplications and additions a round
    void (*int8)(int64_t rounds);
    int64_t int8_ops;
    void (*bf16)(int64_t rounds);  // null: no products of bf16 in this instruction set
    int64_t bf16_ops;
};

typedef float F4 __attribute__((vector_size(16)));
typedef int16_t S8 __attribute__((vector_size(16)));
typedef uint64_t U2 __attribute__((vector_size(16)));

uint64_t read_portable(const uint8_t* p, int64_t bytes) {
    U2 s[8] = {};
    const auto* v = reinterpret_cast<const U2*>(p);
    for (int64_t i = 0; i < bytes / 16; i += 8)
        for (int j = 0; j < 8; j++) s[j] ^= v[i + j];
    for (int j = 1; j < 8; j++) s[0] ^= s[j];
    return s[0][0] ^ s[0][1];
}

// A value that the compiler must have at hand, though nothing reads it.
template <class V>
void keep(const V& v) {
    asm volatile("" : : "m"(v));
}

void f32_portable(int64_t rounds) {
    F4 s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = F4{} + static_cast<float>(j);
    const F4 x = F4{} + 0.999f, y = F4{} + 0.001f;
    for (; rounds > 0; rounds--)
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = s[j] * x + y;
    keep(s);
}

// Without an instruction for it, 8-bit numbers are multiplied as 16-bit ones.
void int8_portable(int64_t rounds) {
    S8 s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = S8{} + static_cast<int16_t>(j);
    S8 x = S8{} + int16_t{3};
    for (; rounds > 0; rounds--) {
        asm volatile("" : "+m"(x));  // else the products would leave the loop
        const S8 w = x;
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = s[j] * w + w;
    }
    keep(s);
}

#ifdef PEGA_X86

#define PEGA_AVX2 __attribute__((target("avx2,fma")))
#define PEGA_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define PEGA_AVX512_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

PEGA_AVX2 uint64_t read_avx2(const uint8_t* p, int64_t bytes) {
    __m256i s[8];
    for (int j = 0; j < 8; j++) s[j] = _mm256_setzero_si256();
    for (int64_t i = 0; i < bytes; i += 256)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            s[j] =
                _mm256_xor_si256(s[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    for (int j = 1; j < 8; j++) s[0] = _mm256_xor_si256(s[0], s[j]);
    uint64_t out[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), s[0]);
    return out[0] ^ out[1] ^ out[2] ^ out[3];
}

PEGA_AVX2 void f32_avx2(int64_t rounds) {
    __m256 s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = _mm256_set1_ps(static_cast<float>(j));
    const __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = _mm256_fmadd_ps(s[j], x, y);
    keep(s);
}

// Four products of bytes summed in 16 bits before they are widened: nibbles fit there, exactly.
PEGA_AVX2 void int8_avx2(int64_t rounds) {
    __m256i s[3], w[4];
    for (int j = 0; j < 3; j++) s[j] = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) w[i] = _mm256_set1_epi8(static_cast<char>(3 + i));
    const __m256i x = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1);
    for (; rounds > 0; rounds--) {
        asm volatile("" : "+x"(w[0]), "+x"(w[1]), "+x"(w[2]), "+x"(w[3]));  // else products leave the loop
#pragma GCC unroll 3
        for (int j = 0; j < 3; j++) {
            __m256i v = x;
            asm volatile("" : "+x"(v));
            const __m256i low =
                _mm256_add_epi16(_mm256_maddubs_epi16(w[0], v), _mm256_maddubs_epi16(w[1], v));
            const __m256i high =
                _mm256_add_epi16(_mm256_maddubs_epi16(w[2], v), _mm256_maddubs_epi16(w[3], v));
            s[j] = _mm256_add_epi32(s[j], _mm256_madd_epi16(_mm256_add_epi16(low, high), ones));
        }
    }
    keep(s);
}

PEGA_AVX512 uint64_t read_avx512(const uint8_t* p, int64_t bytes) {
    __m512i s[8];
    for (int j = 0; j < 8; j++) s[j] = _mm512_setzero_si512();
    for (int64_t i = 0; i < bytes; i += 512)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) s[j] = _mm512_xor_si512(s[j], _mm512_loadu_si512(p + i + 64 * j));
    for (int j = 1; j < 8; j++) s[0] = _mm512_xor_si512(s[0], s[j]);
    uint64_t out[8], all = 0;
    _mm512_storeu_si512(out, s[0]);
    for (uint64_t o : out) all ^= o;
    return all;
}

PEGA_AVX512 void f32_avx512(int64_t rounds) {
    __m512 s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = _mm512_set1_ps(static_cast<float>(j));
    const __m512 x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = _mm512_fmadd_ps(s[j], x, y);
    keep(s);
}

PEGA_AVX512 void int8_avx512(int64_t rounds) {
    __m512i s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = _mm512_setzero_si512();
    const __m512i w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(5);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = _mm512_dpbusd_epi32(s[j], w, x);
    keep(s);
}

PEGA_AVX512_BF16 void bf16_avx512(int64_t rounds) {
    __m512 s[kChains];
    for (int j = 0; j < kChains; j++) s[j] = _mm512_setzero_ps();
    const auto w = (__m512bh)_mm512_set1_epi16(0x3f80), x = (__m512bh)_mm512_set1_epi16(0x3c00);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) s[j] = _mm512_dpbf16_ps(s[j], w, x);
    keep(s);
}

#endif

#ifdef PEGA_ARM64

#ifdef __clang__
#define PEGA_DOTPROD __attribute__((target("dotprod")))
#else
#define PEGA_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#endif

constexpr int kArmChains = 20;  // four units in the widest cores

void f32_neon(int64_t rounds) {
    float32x4_t s[kArmChains];
#pragma GCC unroll 20
    for (int j = 0; j < kArmChains; j++) s[j] = vdupq_n_f32(static_cast<float>(j));
    const float32x4_t x = vdupq_n_f32(0.999f), y = vdupq_n_f32(0.001f);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 20
        for (int j = 0; j < kArmChains; j++) s[j] = vfmaq_f32(s[j], x, y);
#pragma GCC unroll 20
    for (int j = 0; j < kArmChains; j++) asm volatile("" : : "w"(s[j]));  // keep() would hold it in memory
}

PEGA_DOTPROD void int8_neon(int64_t rounds) {
    int32x4_t s[kArmChains];
#pragma GCC unroll 20
    for (int j = 0; j < kArmChains; j++) s[j] = vdupq_n_s32(j);
    const int8x16_t w = vdupq_n_s8(3), x = vdupq_n_s8(5);
    for (; rounds > 0; rounds--)
#pragma GCC unroll 20
        for (int j = 0; j < kArmChains; j++) s[j] = vdotq_s32(s[j], w, x);
#pragma GCC unroll 20
    for (int j = 0; j < kArmChains; j++) asm volatile("" : : "w"(s[j]));  // keep() would hold it in memory
}

#endif

const Ceiling kCeilings[] = {
#ifdef PEGA_X86
    {"avx512", read_avx512, f32_avx512, kChains * 16 * 2, int8_avx512, kChains * 64 * 2, bf16_avx512,
     kChains * 32 * 2},
    {"avx2", read_avx2, f32_avx2, kChains * 8 * 2, int8_avx2, 3 * 4 * 32 * 2, nullptr, 0},
#endif
#ifdef PEGA_ARM64
    {"neon", read_portable, f32_neon, kArmChains * 4 * 2, int8_neon, kArmChains * 16 * 2, nullptr, 0},
#endif
    {"portable", read_portable, f32_portable, kChains * 4 * 2, int8_portable, kChains * 8 * 2, nullptr, 0},
};

const Ceiling& ceiling(const Kernels* k) {
    for (const Ceiling& c : kCeilings)
        if (std::strcmp(c.isa, k->name) == 0) return c;
    return kCeilings[sizeof kCeilings / sizeof *kCeilings - 1];
}

struct Sweep {
    const Ceiling* ceiling;
    const uint8_t* data;
    std::atomic<uint64_t> sink{0};
};

void read_piece(const void* context, const Phase& p, int64_t chunk, int thread) {
    auto& sweep = *const_cast<Sweep*>(static_cast<const Sweep*>(context));
    const int64_t bytes = p.a, times = p.b;
    const uint8_t* data = sweep.data + (times > 1 ? thread : chunk) * bytes;
    for (int64_t i = 0; i < times; i++) sweep.sink.fetch_xor(sweep.ceiling->read(data, bytes));
}

// What is multiplied; numbers are shared with measure/cpu/roofline.py.
enum Numbers : int32_t { kFloats = 0, kBytes = 1, kHalves = 2 };

void compute_piece(const void* context, const Phase& p, int64_t, int) {
    const auto& c = *static_cast<const Ceiling*>(context);
    (p.b == kHalves ? c.bf16 : p.b == kBytes ? c.int8 : c.f32)(p.a);
}

double seconds_of(Pool* pool, const Phase& phase, const void* context) {
    const auto start = std::chrono::steady_clock::now();
    pool->run(&phase, 1, context, nullptr);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

}  // namespace pega

// GB/s of one reading of data[0 … bytes) by all threads. With times > 1 each thread reads a part of its own,
// bytes / threads long, so many times: from its cache if that holds it.
PEGA_API double pega_roofline_read(pega::Pool* pool, const pega::Kernels* kernels, const uint8_t* data,
                                   int64_t bytes, int64_t times) {
    const int64_t pieces = pool->threads() * (times > 1 ? 1 : pega::kPiecesAThread);
    const int64_t piece = bytes / pieces / 512 * 512;
    pega::Sweep sweep{&pega::ceiling(kernels), data, {}};
    const pega::Phase phase{pega::read_piece, pieces, 0, 0, piece, times, 0, 0};
    return static_cast<double>(pieces * piece * times) / pega::seconds_of(pool, phase, &sweep) * 1e-9;
}

// 10^9 multiplications and additions a second on all threads, of the given Numbers; 0 where these kernels do
// not multiply such.
PEGA_API double pega_roofline_compute(pega::Pool* pool, const pega::Kernels* kernels, int32_t numbers,
                                      int64_t rounds) {
    const pega::Ceiling& c = pega::ceiling(kernels);
    if (numbers == pega::kHalves && (c.bf16 == nullptr || kernels->gemm_bf16 == nullptr)) return 0;
    const int64_t pieces = pool->threads() * pega::kPiecesAThread;
    const pega::Phase phase{pega::compute_piece, pieces, 0, 0, rounds, numbers, 0, 0};
    const int64_t ops = numbers == pega::kHalves  ? c.bf16_ops
                        : numbers == pega::kBytes ? c.int8_ops
                                                  : c.f32_ops;
    return static_cast<double>(pieces * rounds * ops) / pega::seconds_of(pool, phase, &c) * 1e-9;
}
