// The C interface, loaded with ctypes. Functions that can fail return null, or 0 with pega_exec_error set.
#include <memory>
#include <new>
#include <system_error>

#include "exec.h"
#include "pack.h"

#define PEGA_API extern "C" __attribute__((visibility("default")))

using pega::Exec;
using pega::Kernels;
using pega::Packed;
using pega::Pool;

// The hash of the declaration that instructions.h was generated from.
PEGA_API const char* pega_declaration_hash() {
    return pega::kDeclarationHash;
}

// The hash of the sources that this library was built from.
PEGA_API const char* pega_source_hash() {
    return PEGA_SOURCE_HASH;
}

// Kernels by name, or the best that this processor runs where name is empty; null if it has no such.
PEGA_API const Kernels* pega_kernels(const char* name) {
    return pega::choose_kernels(name);
}

PEGA_API const char* pega_isa_name(const Kernels* k) {
    return k->name;
}

// Null where the system gives no more threads.
PEGA_API Pool* pega_pool_create(int32_t threads, int32_t spin_us) {
    try {
        return new Pool(threads, spin_us);
    } catch (const std::system_error&) {
        return nullptr;
    }
}

PEGA_API void pega_pool_destroy(Pool* pool) {
    delete pool;
}

// Bytes that a weight takes when packed; 0 where format and shape do not fit.
PEGA_API int64_t pega_packed_bytes(int32_t format, int64_t count, int64_t n, int64_t k) {
    Packed w;
    return pega::describe(&w, format, count, n, k) ? w.count * w.tiles * w.tile_bytes : 0;
}

// Packs `count` matrices [n, k], whose count · n rows lie at `rows`, into `memory`, which is 64-byte aligned
// and outlives the weight; null where they do not fit.
PEGA_API Packed* pega_pack(int32_t format, int64_t count, int64_t n, int64_t k, const uint8_t* const* rows,
                           uint8_t* memory, int32_t threads) {
    std::unique_ptr<Packed> w(new (std::nothrow) Packed);
    if (w == nullptr || !pega::describe(w.get(), format, count, n, k)) return nullptr;
    w->data = memory;
    pega::pack(*w, rows, threads);
    return w.release();
}

// Rows first … first + count as float32.
PEGA_API void pega_unpack(const Packed* w, int64_t first, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i++) pega::unpack_row(*w, first + i, out + i * w->k);
}

PEGA_API void pega_packed_free(Packed* w) {
    delete w;
}

// Whether the kernels multiply bf16 by bf16.
PEGA_API int32_t pega_has_bf16(const Kernels* k) {
    return k->gemm_bf16 != nullptr ? 1 : 0;
}

// program: `count` words (program.h). int8, bf16: whether activations that meet quantised weights, and those
// that meet bf16 ones, are rounded so.
PEGA_API Exec* pega_exec_create(Pool* pool, const Kernels* kernels, int32_t int8, int32_t bf16,
                                const int64_t* program, int64_t count, void* const* table,
                                const int64_t* sizes, int64_t num_sizes, char* error) {
    return pega::exec_create(pool, kernels, int8 != 0, bf16 != 0, program, count, table, sizes, num_sizes,
                             error);
}

// Makes the executor that of a rank of a group. memory: see ranks.h; seconds: how long it waits for the
// others.
PEGA_API void pega_exec_join(Exec* e, uint8_t* memory, int32_t rank, int32_t ranks, double seconds) {
    e->ranks = {memory, rank, ranks, seconds};
}

PEGA_API void pega_exec_destroy(Exec* e) {
    delete e;
}

PEGA_API const char* pega_exec_error(const Exec* e) {
    return e->error;
}

// Values that were past the largest of the KV cache's 8-bit format, over all steps.
PEGA_API int64_t pega_exec_clipped(const Exec* e) {
    return e->clipped.load();
}

// Runs instructions first … last of a step; `nanoseconds` ([instructions], may be null) is added to.
PEGA_API int32_t pega_exec_run(Exec* e, const int64_t* sizes, int64_t num_sizes, int64_t first, int64_t last,
                               int64_t* nanoseconds) {
    return pega::exec_run(e, sizes, num_sizes, first, last, nanoseconds) ? 1 : 0;
}
