// Sums over ranks, and logits of which each rank makes some columns. Every rank copies its partial result to
// shared memory, waits until all have, and adds them up in the order of the ranks, so that all ranks get the
// same bits whoever comes first. Columns go the same way.
#include <algorithm>
#include <chrono>
#include <thread>

#include "exec.h"

namespace pega {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kValuesAChunk = 4096;
constexpr int64_t kBlock = 256;  // values that are summed up before they are added
constexpr std::chrono::microseconds kSpin{20}, kYield{500}, kSleep{50};

const Exec& exec_of(const void* context) {
    return *static_cast<const Exec*>(context);
}

// Values of a chunk: phase.a is the first of the round in partial and x, phase.b their number.
struct Span {
    int64_t first, count;  // within the round
};

Span span_of(const Phase& p, int64_t chunk) {
    const int64_t first = chunk * kValuesAChunk;
    return {first, std::min(p.b - first, kValuesAChunk)};
}

void publish(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<ReduceResidualArgs>();
    const Span s = span_of(p, chunk);
    float* slot = e.ranks.slot(static_cast<uint64_t>(p.c), e.ranks.rank);
    std::memcpy(slot + s.first, a.partial + p.a + s.first, static_cast<size_t>(s.count) * 4);
}

void meet(const void* context, const Phase& p, int64_t, int) {
    exec_of(context).ranks.meet(static_cast<uint64_t>(p.c));
}

// From one rank's own partial result where there are no others.
void add_up(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<ReduceResidualArgs>();
    const Span s = span_of(p, chunk);
    float sum[kBlock];
    for (int64_t at = s.first; at < s.first + s.count; at += kBlock) {
        const int64_t n = std::min(kBlock, s.first + s.count - at);
        for (int32_t rank = 0; rank < e.ranks.count; rank++) {
            const float* from =
                e.ranks.count == 1 ? a.partial + p.a : e.ranks.slot(static_cast<uint64_t>(p.c), rank);
            for (int64_t i = 0; i < n; i++) sum[i] = rank == 0 ? from[at + i] : sum[i] + from[at + i];
        }
        float* x = a.x + p.a + at;
        for (int64_t i = 0; i < n; i++) x[i] += sum[i];
    }
}

// Columns of the logits that rank `of` makes: whole tiles.
RankShare columns_of(const Exec& e, const LmHeadArgs& a, int32_t of) {
    const RankShare tiles = e.ranks.share((a.V + kTile - 1) / kTile, of);
    return {tiles.first * kTile, std::min(tiles.count * kTile, a.V - tiles.first * kTile)};
}

// Row `chunk` of a round of rows, of which phase.a is the first.
void publish_columns(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<LmHeadArgs>();
    const RankShare own = columns_of(e, a, e.ranks.rank);
    if (own.count <= 0) return;
    float* to = e.ranks.slot(static_cast<uint64_t>(p.c), e.ranks.rank) + chunk * own.count;
    std::memcpy(to, a.logits + (p.a + chunk) * a.V + own.first, static_cast<size_t>(own.count) * 4);
}

void take_columns(const void* context, const Phase& p, int64_t chunk, int) {
    const Exec& e = exec_of(context);
    const auto a = e.instr(p).args<LmHeadArgs>();
    for (int32_t of = 0; of < e.ranks.count; of++) {
        const RankShare theirs = columns_of(e, a, of);
        if (of == e.ranks.rank || theirs.count <= 0) continue;
        const float* from = e.ranks.slot(static_cast<uint64_t>(p.c), of) + chunk * theirs.count;
        std::memcpy(a.logits + (p.a + chunk) * a.V + theirs.first, from,
                    static_cast<size_t>(theirs.count) * 4);
    }
}

}  // namespace

void Ranks::meet(uint64_t sum) const {
    joined(rank).store(sum + 1, std::memory_order_release);
    const auto start = Clock::now();
    for (int32_t of = 0; of < count; of++) {
        while (joined(of).load(std::memory_order_acquire) <= sum) {
            if (failed().load(std::memory_order_relaxed) != 0) return;
            const auto waited = Clock::now() - start;
            if (waited < kSpin) continue;
            if (waited > std::chrono::duration<double>(seconds)) return fail(-1 - of);
            // Ranks may share cores: the one that is waited for may need this one.
            if (waited < kYield)
                std::this_thread::yield();
            else
                std::this_thread::sleep_for(kSleep);
        }
    }
}

bool plan_reduce(Exec& e, const Instr& in) {
    const auto a = in.args<ReduceResidualArgs>();
    const int64_t values = a.T * a.N;
    for (int64_t first = 0; first < values; first += kRankValues) {
        const int64_t count = std::min(kRankValues, values - first);
        const int64_t chunks = (count + kValuesAChunk - 1) / kValuesAChunk;
        const auto sum = static_cast<int64_t>(e.sums);
        if (e.ranks.count > 1) {
            e.add_phase(in, publish, chunks, first, count, sum);
            e.add_phase(in, meet, 1, first, count, sum);
            e.sums++;
        }
        e.add_phase(in, add_up, chunks, first, count, sum);
    }
    return true;
}

bool plan_gather(Exec& e, const Instr& in) {
    const auto a = in.args<LmHeadArgs>();
    const int64_t rows = kRankValues / columns_of(e, a, 0).count;  // the first rank has the most columns
    if (rows == 0)
        return e.fail("lm_head: expected at most %lld columns for each of %d ranks, got %lld in all",
                      static_cast<long long>(kRankValues), e.ranks.count, static_cast<long long>(a.V));
    for (int64_t first = 0; first < a.L; first += rows) {
        const int64_t count = std::min(rows, a.L - first);
        const auto number = static_cast<int64_t>(e.sums++);
        e.add_phase(in, publish_columns, count, first, count, number);
        e.add_phase(in, meet, 1, first, count, number);
        e.add_phase(in, take_columns, count, first, count, number);
    }
    return true;
}

}  // namespace pega
