// op lm_head: every rank's columns of the logits, which it has sent to all others.
#include "ranks.cuh"

using namespace ranks;

// Grid: the columns of a rank. Logits are read by kernels that know nothing of ranks, so they lie as one rank
// would have left them.

// variant gather_ranks: dtype=f32 multiple=4
extern "C" __global__ void __launch_bounds__(THREADS) gather_ranks(const __grid_constant__ GatherArgs a) {
    pdl_wait();
    const Control c = *a.control;
    pdl_launch();
    const Span span(a.each);
    const int64_t number = c.joined + 1, start = static_cast<int64_t>(c.rank) * a.each;
    const int own = min(a.each, static_cast<int>(a.columns - start));
    for (int row = 0; row < a.rows; row++) {
        const float* const from = a.part + static_cast<int64_t>(row) * own;
        EACH(j, span) {
            if (j >= own) break;
            const auto v = load<float, WIDTH>(from + j);
            store(a.out + static_cast<int64_t>(row) * a.columns + start + j, v);
            for (int i = 1; i < c.count; i++) {
                const int peer = (c.rank + i) % c.count;
                float* const to = reinterpret_cast<float*>(slot(c, c.peers[peer].base, 0, number, c.rank));
                if (!c.alone) store(to + static_cast<int64_t>(row) * a.each + j, v);
            }
        }
    }
    if (c.alone) return;
    meet(a.control, c, 0, number);
    for (int i = 1; i < c.count; i++) {
        const int peer = (c.rank + i) % c.count;
        const float* const from =
            reinterpret_cast<const float*>(slot(c, c.peers[c.rank].base, 0, number, peer));
        for (int row = 0; row < a.rows; row++) {
            EACH(j, span) {
                const int64_t at = static_cast<int64_t>(peer) * a.each + j;
                if (at >= a.columns) break;
                const auto v = received<Vec<float, WIDTH>>(from + static_cast<int64_t>(row) * a.each + j);
                store(a.out + static_cast<int64_t>(row) * a.columns + at, v);
            }
        }
    }
}
