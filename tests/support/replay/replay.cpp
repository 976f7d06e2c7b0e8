// Runs recorded programs on the kernels where no Python runs: under an emulator of another processor.
//
// Requests come on standard input, answers go to standard output, one after another until the input ends.
// Numbers are int64, little-endian; text is padded with zeros to the length in brackets.
//
// At the start, once:   hash of the library's sources [64], of its declarations [64]
// A request:            isa [16] (empty: the best), threads, int8,
//                       instructions, words of them, sizes, tensors (how many of each),
//                       greatest sizes, the step's sizes,
//                       instructions (csrc/program.h; operand i is tensor i),
//                       tensors
// A tensor:             format (-1: plain memory; else matrices to be packed), count, n, k,
//                       bytes, given (0: filled with 0xFF), wanted, then the bytes if given
// An answer:            isa that ran [16], fault [256] (empty: none), then the wanted tensors' bytes if none
//
// Every tensor lies amid guard bytes. A fault is what the library refused, a guard byte that was written, or
// a tensor that was given, not wanted back, and changed.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

extern "C" {
const char* pega_declaration_hash();
const char* pega_source_hash();
const void* pega_kernels(const char* name);
const char* pega_isa_name(const void* kernels);
void* pega_pool_create(int32_t threads, int32_t spin_us);
void pega_pool_destroy(void* pool);
int64_t pega_packed_bytes(int32_t format, int64_t count, int64_t n, int64_t k);
void* pega_pack(int32_t format, int64_t count, int64_t n, int64_t k, const uint8_t* const* rows,
                uint8_t* memory, int32_t threads);
void pega_packed_free(void* weight);
void* pega_exec_create(void* pool, const void* kernels, int32_t int8, int32_t bf16, const int64_t* program,
                       int64_t count, void* const* table, const int64_t* sizes, int64_t num_sizes,
                       char* error);
void pega_exec_destroy(void* exec);
const char* pega_exec_error(const void* exec);
int32_t pega_exec_run(void* exec, const int64_t* sizes, int64_t num_sizes, int64_t first, int64_t last,
                      int64_t* nanoseconds);
}

namespace {

constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0xFF;  // as floats: NaN
constexpr int32_t kSpinUs = 50;

void read_exactly(void* to, size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(3);  // the asker has gone within a request
}

int64_t read_number() {
    int64_t n;
    read_exactly(&n, sizeof n);
    return n;
}

std::vector<int64_t> read_numbers(int64_t count) {
    std::vector<int64_t> numbers(static_cast<size_t>(count) + 1);  // data() is never null
    read_exactly(numbers.data(), static_cast<size_t>(count) * 8);
    return numbers;
}

// 64-byte aligned memory amid guard bytes.
class Guarded {
  public:
    explicit Guarded(size_t bytes)
        : bytes_(bytes),
          whole_(static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 2 * kGuard + 63) / 64 * 64))) {
        std::memset(whole_.get(), kGuardByte, bytes + 2 * kGuard);
    }
    uint8_t* data() const { return whole_.get() + kGuard; }
    size_t size() const { return bytes_; }
    bool hurt() const {
        for (size_t i = 0; i < kGuard; i++)
            if (whole_.get()[i] != kGuardByte || data()[bytes_ + i] != kGuardByte) return true;
        return false;
    }

  private:
    struct Free {
        void operator()(uint8_t* p) const { std::free(p); }
    };
    size_t bytes_;
    std::unique_ptr<uint8_t, Free> whole_;
};

struct Tensor {
    int64_t format, count, n, k, bytes, given, wanted;
    std::vector<uint8_t> content;  // as given
    std::unique_ptr<Guarded> memory;
    void* weight = nullptr;

    Tensor() = default;
    Tensor(Tensor&& o) noexcept
        : format(o.format),
          count(o.count),
          n(o.n),
          k(o.k),
          bytes(o.bytes),
          given(o.given),
          wanted(o.wanted),
          content(std::move(o.content)),
          memory(std::move(o.memory)),
          weight(o.weight) {
        o.weight = nullptr;
    }
    ~Tensor() {
        if (weight != nullptr) pega_packed_free(weight);
    }
};

struct Request {
    char isa[16];
    int32_t threads, int8;
    int64_t count, words, num_sizes;
    std::vector<int64_t> greatest, sizes, program;
    std::vector<Tensor> tensors;
};

Request read_request(const char* isa) {
    Request r;
    std::memcpy(r.isa, isa, sizeof r.isa);
    r.threads = static_cast<int32_t>(read_number());
    r.int8 = static_cast<int32_t>(read_number());
    r.count = read_number();
    r.words = read_number();
    r.num_sizes = read_number();
    const int64_t num_tensors = read_number();
    r.greatest = read_numbers(r.num_sizes);
    r.sizes = read_numbers(r.num_sizes);
    r.program = read_numbers(r.words);
    for (int64_t i = 0; i < num_tensors; i++) {
        Tensor t;
        for (int64_t* field : {&t.format, &t.count, &t.n, &t.k, &t.bytes, &t.given, &t.wanted})
            *field = read_number();
        if (t.given != 0) {
            t.content.resize(static_cast<size_t>(t.bytes));
            read_exactly(t.content.data(), t.content.size());
        }
        r.tensors.push_back(std::move(t));
    }
    return r;
}

struct Answer {
    char isa[16] = "";
    char fault[256] = "";

    __attribute__((format(printf, 2, 3))) bool fail(const char* format, ...) {
        va_list args;
        va_start(args, format);
        std::vsnprintf(fault, sizeof fault, format, args);
        va_end(args);
        return false;
    }
};

// Gives every tensor its memory and its place in the table.
bool place(Request& r, std::vector<void*>& table, Answer& a) {
    for (size_t i = 0; i < r.tensors.size(); i++) {
        Tensor& t = r.tensors[i];
        if (t.format < 0) {
            t.memory = std::make_unique<Guarded>(static_cast<size_t>(t.bytes));
            if (!t.content.empty()) std::memcpy(t.memory->data(), t.content.data(), t.content.size());
            table.push_back(t.memory->data());
            continue;
        }
        const auto format = static_cast<int32_t>(t.format);
        t.memory =
            std::make_unique<Guarded>(static_cast<size_t>(pega_packed_bytes(format, t.count, t.n, t.k)));
        std::vector<const uint8_t*> rows;
        const auto all_rows = static_cast<size_t>(t.count * t.n);
        const size_t row_bytes = t.content.size() / all_rows;
        for (size_t row = 0; row < all_rows; row++) rows.push_back(t.content.data() + row * row_bytes);
        t.weight = pega_pack(format, t.count, t.n, t.k, rows.data(), t.memory->data(), r.threads);
        if (t.weight == nullptr) return a.fail("tensor %zu does not pack", i);
        table.push_back(t.weight);
    }
    return true;
}

bool intact(const Request& r, Answer& a) {
    for (size_t i = 0; i < r.tensors.size(); i++) {
        const Tensor& t = r.tensors[i];
        if (t.memory->hurt()) return a.fail("tensor %zu: bytes around it were written", i);
        const bool constant = t.format < 0 && t.given != 0 && t.wanted == 0;
        if (constant && std::memcmp(t.memory->data(), t.content.data(), t.content.size()) != 0)
            return a.fail("tensor %zu: only to be read, but was written", i);
    }
    return true;
}

bool run(Request& r, Answer& a) {
    const void* kernels = pega_kernels(r.isa);
    if (kernels == nullptr) return a.fail("no kernels for %s", r.isa);
    std::strncpy(a.isa, pega_isa_name(kernels), sizeof a.isa - 1);
    std::vector<void*> table;
    if (!place(r, table, a)) return false;
    const std::unique_ptr<void, void (*)(void*)> pool(pega_pool_create(r.threads, kSpinUs),
                                                      pega_pool_destroy);
    if (pool == nullptr) return a.fail("no %d threads", r.threads);
    const std::unique_ptr<void, void (*)(void*)> exec(
        pega_exec_create(pool.get(), kernels, r.int8, 0, r.program.data(), r.words, table.data(),
                         r.greatest.data(), r.num_sizes, a.fault),
        pega_exec_destroy);
    if (exec == nullptr) return false;
    if (pega_exec_run(exec.get(), r.sizes.data(), r.num_sizes, 0, r.count, nullptr) == 0)
        return a.fail("%s", pega_exec_error(exec.get()));
    return intact(r, a);
}

void write_exactly(const void* from, size_t bytes) {
    if (std::fwrite(from, 1, bytes, stdout) != bytes) std::exit(3);
}

}  // namespace

int main() {
    write_exactly(pega_source_hash(), 64);
    write_exactly(pega_declaration_hash(), 64);
    std::fflush(stdout);
    char isa[16];
    while (std::fread(isa, 1, sizeof isa, stdin) == sizeof isa) {
        Request r = read_request(isa);
        Answer a;
        const bool ran = run(r, a);
        write_exactly(a.isa, sizeof a.isa);
        write_exactly(a.fault, sizeof a.fault);
        for (const Tensor& t : r.tensors)
            if (ran && t.wanted != 0) write_exactly(t.memory->data(), t.memory->size());
        std::fflush(stdout);
    }
    return 0;
}
