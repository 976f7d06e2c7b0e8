// Preloaded: counts the process's allocations, of all threads, while `counted_calls` runs.
#include <atomic>
#include <cstddef>
#include <cstdint>

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

static std::atomic<bool> counting{false};
static std::atomic<int64_t> allocations{0};

static void note() {
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
}

void* malloc(size_t n) {
    note();
    return __libc_malloc(n);
}
void* calloc(size_t n, size_t size) {
    note();
    return __libc_calloc(n, size);
}
void* realloc(void* p, size_t n) {
    note();
    return __libc_realloc(p, n);
}
int posix_memalign(void** p, size_t align, size_t n) {
    note();
    *p = __libc_memalign(align, n);
    return *p == nullptr;
}

typedef int32_t (*Run)(void*, const int64_t*, int64_t, int64_t, int64_t, int64_t*);

// pega_exec_run `times` over; the number of allocations meanwhile, -1 where a run failed.
int64_t counted_calls(Run run, void* exec, const int64_t* sizes, int64_t num_sizes, int64_t last,
                      int64_t times) {
    allocations = 0;
    counting = true;
    bool fine = true;
    for (int64_t i = 0; i < times; i++) fine = run(exec, sizes, num_sizes, 0, last, nullptr) != 0 && fine;
    counting = false;
    return fine ? allocations.load() : -1;
}
}
