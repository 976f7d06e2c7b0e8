// Threads that replay the phases of a step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace pega {

// A parallel region: chunks are independent of each other and may run on any thread in any order. All chunks
// of a phase end before the next phase starts.
struct Phase {
    void (*run)(const void* context, const Phase& phase, int64_t chunk, int thread);
    int64_t chunks;      // at least 1
    int32_t instr;       // the instruction it belongs to
    int32_t serial;      // distinct within a step
    int64_t a, b, c, d;  // the instruction's own use
};

// Each thread starts on a share of its own, so that what it reads is contiguous and the same in every step,
// and takes from the others' shares when it is done: a thread that is late, or asleep, holds nobody up. Idle
// threads spin for a while, then sleep.
class Pool {
  public:
    // threads counts the caller of `run`. Raises std::system_error where the system gives no more threads.
    Pool(int threads, int spin_us);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs the phases in order and returns when the last has ended. One caller at a time; allocates nothing.
    // nanoseconds: [instr] counters that each phase's wall time is added to; null: not timed.
    void run(const Phase* phases, int count, const void* context, int64_t* nanoseconds);

  private:
    void work(int thread);
    bool help(int thread);
    void open_phase(uint32_t id);
    void idle(bool caller);
    int64_t take(int64_t chunks, int thread);

    // Chunks taken of one thread's share, [chunks · thread / threads, chunks · (thread + 1) / threads).
    struct alignas(64) Share {
        std::atomic<int64_t> taken{0};
    };

    // Phase number in the high half, unclaimed chunks in the low half. Phase numbers never repeat while a
    // thread can still hold an old one, so a claim (compare and swap) proves that the phase is still open;
    // what describes it stays put until its last chunk is done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};  // finished chunks of the open phase
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> caller_asleep_{false};
    std::atomic<bool> stop_{false};
    const Phase* phases_ = nullptr;
    int count_ = 0;
    uint32_t first_ = 0;  // number of phases_[0]
    uint32_t end_ = 0;    // number of the empty phase after the last
    const void* context_ = nullptr;
    int64_t* nanoseconds_ = nullptr;
    int64_t opened_ = 0;
    int spin_us_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Share[]> shares_;
    std::vector<std::thread> workers_;
};

}  // namespace pega
