// op token_logprobs: whole logits of the rows whose log-probabilities are wanted; every rank has made some of
// their columns, and sends them to all others.
#include "ranks.cuh"

using namespace ranks;

namespace {

__device__ __forceinline__ bool is_wanted(const GatherArgs& a, int row) {
    return a.wanted[row] >= 0;
}

// Visits the wanted rows of one round, a.most of them at most, from `first` on; returns the row behind them.
template <typename Visit>
__device__ __forceinline__ int each_wanted(const GatherArgs& a, int first, Visit visit) {
    int row = first;
    for (int place = 0; row < a.rows && place < a.most; row++)
        if (is_wanted(a, row)) visit(row, place++);
    return row;
}

}  // namespace

// Grid: the columns of a rank.

// variant gather_ranks: dtype=f32 multiple=4
extern "C" __global__ void __launch_bounds__(THREADS) gather_ranks(const __grid_constant__ GatherArgs a) {
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    const Span span(a.each);
    const int64_t before = c.joined, start = static_cast<int64_t>(c.rank) * a.each;
    const int own = min(a.each, static_cast<int>(a.columns - start));
    int all = 0;
    for (int row = 0; row < a.rows; row++) all += is_wanted(a, row);
    const int rounds = (all + a.most - 1) / a.most;
    __syncthreads();  // every thread has read the number
    if (!c.alone && rounds > 0) count(a.control, before + rounds);
    int first = 0;
    for (int round = 0; round < rounds; round++) {
        const int64_t number = before + 1 + round;
        const int last = each_wanted(a, first, [&](int row, int place) {
            EACH(j, span) {
                if (j >= own) break;
                const auto v = load<float, WIDTH>(a.part + static_cast<int64_t>(row) * own + j);
                store(a.out + static_cast<int64_t>(row) * a.columns + start + j, v);
                for (int i = 1; i < c.count && !c.alone; i++) {
                    const int peer = (c.rank + i) % c.count;
                    auto* const to = reinterpret_cast<float*>(slot(c, c.peers[peer].base, 0, number, c.rank));
                    store(to + static_cast<int64_t>(place) * a.each + j, v);
                }
            }
        });
        if (!c.alone) {
            meet(nullptr, c, 0, number);
            each_wanted(a, first, [&](int row, int place) {
                for (int i = 1; i < c.count; i++) {
                    const int peer = (c.rank + i) % c.count;
                    const auto* const from =
                        reinterpret_cast<const float*>(slot(c, c.peers[c.rank].base, 0, number, peer));
                    EACH(j, span) {
                        const int64_t at = static_cast<int64_t>(peer) * a.each + j;
                        if (at >= a.columns) break;
                        const auto v =
                            received<Vec<float, WIDTH>>(from + static_cast<int64_t>(place) * a.each + j);
                        store(a.out + static_cast<int64_t>(row) * a.columns + at, v);
                    }
                }
            });
        }
        first = last;
    }
}
