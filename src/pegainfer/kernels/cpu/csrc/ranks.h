// Memory that the ranks of a group share (runtime/rank_memory.py makes it), and how they wait for each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace pega {

constexpr int64_t kRankLine = 64;           // bytes: a cache line for each word that a rank writes alone
constexpr int64_t kRankPage = 4096;         // bytes: where the slots begin is a multiple of it
constexpr int64_t kRankValues = 1ll << 20;  // float32 that a rank passes to the others at once

// Consecutive units of something that ranks share out, such as tiles of a matrix.
struct RankShare {
    int64_t first, count;
};

// This rank's view of the memory: a word that says who failed, a line a rank with the number of sums that it
// has joined, and two slots a rank. Sums alternate between the slots: when all ranks have joined a sum, all
// of them have read the one before it, so its slots may be written again.
struct Ranks {
    uint8_t* base = nullptr;  // null: there is one rank
    int32_t rank = 0, count = 1;
    double seconds = 0;  // how long to wait for the others

    std::atomic<int32_t>& failed() const { return *reinterpret_cast<std::atomic<int32_t>*>(base); }
    std::atomic<uint64_t>& joined(int32_t of) const {
        return *reinterpret_cast<std::atomic<uint64_t>*>(base + kRankLine * (1 + of));
    }
    float* slot(uint64_t sum, int32_t of) const {
        const int64_t head = (kRankLine * (1 + count) + kRankPage - 1) / kRankPage * kRankPage;
        const auto number = static_cast<int64_t>(sum % 2) * count + of;
        return reinterpret_cast<float*>(base + head) + number * kRankValues;
    }

    // What rank `of` has of so many units: the last ranks have fewer where they do not divide.
    RankShare share(int64_t units, int32_t of) const {
        const int64_t each = (units + count - 1) / count, first = std::min(units, of * each);
        return {first, std::min(each, units - first)};
    }
    // Ends the group: 1 + rank of the first that failed, negative where it only did not come in time.
    void fail(int32_t why) const {
        int32_t none = 0;
        failed().compare_exchange_strong(none, why);
    }
    // Joins sum number `sum` and returns when all ranks have, or the group has failed.
    void meet(uint64_t sum) const;
};

}  // namespace pega
