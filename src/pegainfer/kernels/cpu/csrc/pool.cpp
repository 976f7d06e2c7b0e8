#include "pool.h"

#include <chrono>

namespace pega {

namespace {

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

uint32_t phase_of(uint64_t ticket) {
    return static_cast<uint32_t>(ticket >> 32);
}
uint32_t left_in(uint64_t ticket) {
    return static_cast<uint32_t>(ticket);
}

}  // namespace

Pool::Pool(int threads, int spin_us) : spin_us_(spin_us), shares_(new Share[static_cast<size_t>(threads)]) {
    for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::work, this, i);
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
}

void Pool::run(const Phase* phases, int count, const void* context, int64_t* nanoseconds) {
    if (count == 0) return;
    // No phase is open and every claim has ended: nobody reads these fields now.
    phases_ = phases;
    count_ = count;
    context_ = context;
    nanoseconds_ = nanoseconds;
    first_ = phase_of(ticket_.load()) + 1;
    end_ = first_ + static_cast<uint32_t>(count);
    opened_ = nanoseconds != nullptr ? now_ns() : 0;
    open_phase(first_);
    while (phase_of(ticket_.load()) != end_)
        if (!help(0)) idle(true);
}

// Opens phase `id`, or the empty phase that follows a step's last, and wakes who has something to do in it.
void Pool::open_phase(uint32_t id) {
    const bool ended = id == end_;
    const uint64_t chunks = ended ? 0 : static_cast<uint64_t>(phases_[id - first_].chunks);
    done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < threads(); i++)
        shares_[static_cast<size_t>(i)].taken.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(id) << 32 | chunks);
    if (ended ? caller_asleep_.load() : sleepers_.load() > 0) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
        }
        wake_.notify_all();
    }
}

// A chunk for who has claimed one: of the thread's own share, else of the next ones'. There are as many
// claims as chunks, so one is left.
int64_t Pool::take(int64_t chunks, int thread) {
    const int64_t all = threads();
    for (int64_t i = thread;; i = (i + 1) % all) {
        const int64_t first = chunks * i / all, size = chunks * (i + 1) / all - first;
        std::atomic<int64_t>& taken = shares_[static_cast<size_t>(i)].taken;
        if (taken.load(std::memory_order_relaxed) >= size) continue;
        const int64_t mine = taken.fetch_add(1, std::memory_order_relaxed);
        if (mine < size) return first + mine;
    }
}

// Does one chunk if one is to be had.
bool Pool::help(int thread) {
    uint64_t seen = ticket_.load();
    do {
        if (left_in(seen) == 0) return false;
    } while (!ticket_.compare_exchange_weak(seen, seen - 1));
    const uint32_t id = phase_of(seen);
    const Phase& phase = phases_[id - first_];
    const int64_t chunks = phase.chunks;
    phase.run(context_, phase, take(chunks, thread), thread);
    if (done_.fetch_add(1) + 1 == chunks) {
        if (nanoseconds_ != nullptr) {
            const int64_t now = now_ns();
            nanoseconds_[phase.instr] += now - opened_;
            opened_ = now;
        }
        open_phase(id + 1);
    }
    return true;
}

// Waits until there is a chunk to do or, for the caller of `run`, the step has ended: spins, then sleeps.
void Pool::idle(bool caller) {
    const auto wanted = [&] {
        const uint64_t t = ticket_.load();
        return left_in(t) != 0 || (caller && phase_of(t) == end_) || stop_.load();
    };
    const int64_t stop_at = now_ns() + spin_us_ * 1000;
    do {
        for (int i = 0; i < 32; i++) {
            if (wanted()) return;
            relax();
        }
    } while (now_ns() < stop_at);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    if (caller) caller_asleep_.store(true);
    wake_.wait(lock, wanted);
    if (caller) caller_asleep_.store(false);
    sleepers_.fetch_sub(1);
}

void Pool::work(int thread) {
    while (!stop_.load())
        if (!help(thread)) idle(false);
}

}  // namespace pega
