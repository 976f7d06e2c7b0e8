// op mla_attention: which rows of a step are attended over expanded latents, made once a step on the device.
//
// A row of at least `least` query tokens is expanded. Its tiles of 128 keys follow those of the rows before
// it; a launch expands and attends one round of `tiles`. A row that does not fit into what is left of a round
// begins the next one, and takes several only if one is too small for it. Rows for which there is no room are
// left to absorbed attention: slower, not wrong.
#include "../../common/attention/sort.cuh"

using namespace attention;

namespace {

constexpr int KEYS = 128, QUERIES = 128, MOST = 256, ROUNDS = 8;

struct Expanded {
    int row, len, context, start;
    int at;           // its first tile of keys, of those of all rounds
    int slot, merge;  // of its first tile of queries; slot -1: no sums are kept
    int cuts;         // parts of each of its tiles of queries
    __device__ __forceinline__ int query_tiles() const { return (len + QUERIES - 1) / QUERIES; }
    __device__ __forceinline__ int key_tiles() const { return (context + KEYS - 1) / KEYS; }
};

// What one thread counts while it goes through the rows.
struct Room {
    int count, at, slots, merges;
    // Whether the row is expanded; then `to` says how, and `ends` [round] how many tiles of keys it has.
    __device__ __forceinline__ bool take(const ExpandPlanArgs& a, Expanded& to, int* ends) {
        const int keys = to.key_tiles(), queries = to.query_tiles(), left = a.tiles - at % a.tiles;
        const int first = keys > left && left < a.tiles ? at + left : at, end = first + keys;
        const bool several = first / a.tiles != (end - 1) / a.tiles;
        int cuts = 1;
        if (!several) {
            cuts = min(min(PREFILL_BLOCKS / (queries * a.heads), (to.context - to.len) / PREFILL_KEYS),
                       PREFILL_PARTS);
            cuts = max(cuts, 1);
            if (slots + queries * cuts > a.slots) cuts = 1;
        }
        const int kept = several || cuts > 1 ? queries * cuts : 0;
        if (end > a.tiles * a.rounds || slots + kept > a.slots) return false;
        to.at = first, to.slot = kept ? slots : -1, to.merge = merges, to.cuts = cuts;
        at = end, slots += kept, merges += cuts > 1 ? queries : 0;
        for (int round = first / a.tiles; round * a.tiles < end; round++)
            ends[round] = min(a.tiles, end - round * a.tiles);
        return true;
    }
};

// Gives the items of a round to emit(item, keys, where the tile is merged). Every thread takes part.
template <typename Emit>
__device__ __forceinline__ void cut_round(const ExpandPlanArgs& a, const Expanded* rows, int count, int round,
                                          Emit emit) {
    for (int i = 0; i < count; i++) {
        const Expanded& row = rows[i];
        const int queries = row.query_tiles(), at = row.at - round * a.tiles;
        for (int n = threadIdx.x; n < queries * row.cuts; n += blockDim.x) {
            const int tile = n / row.cuts, part = n % row.cuts;
            const int sees = row.context - row.len + min(row.len, (tile + 1) * QUERIES);
            const int lo = max(0, -at), hi = min((sees + KEYS - 1) / KEYS, a.tiles - at);
            if (hi <= lo) continue;
            const int b0 = lo + (hi - lo) * part / row.cuts, b1 = lo + (hi - lo) * (part + 1) / row.cuts;
            const int slot = row.slot < 0 ? -1 : row.slot + tile * row.cuts;
            emit(Item{at, tile, part | row.cuts << 16, slot, row.context, row.start, b0 | b1 << 16, row.len},
                 (b1 - b0) * KEYS, row.merge + tile);
        }
    }
}

}  // namespace

// variant mla_expand_plan: block=256
extern "C" __global__ void __launch_bounds__(256) mla_expand_plan(ExpandPlanArgs a) {
    __shared__ int scratch[32], places[CLASSES], lens[256], contexts[256], ends[ROUNDS], bounds[2];
    __shared__ Expanded rows[MOST];
    __shared__ Room room;
    pdl_wait();
    pdl_launch();
    if (threadIdx.x < ROUNDS) ends[threadIdx.x] = 0;
    if (threadIdx.x == 0) room = {}, bounds[0] = 1 << 30, bounds[1] = 0;
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        const int row = r0 + threadIdx.x;
        lens[threadIdx.x] = row < a.rows ? a.query_lens[row] : 0;
        contexts[threadIdx.x] = row < a.rows ? a.context_lens[row] : 0;
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < min(256, a.rows - r0); i++) {
                if (lens[i] < a.least || room.count == MOST) continue;
                Expanded& next = rows[room.count];
                next.row = r0 + i, next.len = lens[i], next.context = contexts[i];
                if (room.take(a, next, ends)) room.count++, lens[i] = 0;
            }
        __syncthreads();
        if (row < a.rows) {
            const int len = lens[threadIdx.x], start = a.query_starts[row];
            a.rest[row] = len;
            if (len) atomicMin(bounds, start), atomicMax(bounds + 1, start + len);
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < room.count; i += blockDim.x) rows[i].start = a.query_starts[rows[i].row];
    __syncthreads();
    for (int i = 0; i < room.count; i++)
        for (int tile = threadIdx.x; tile < rows[i].key_tiles(); tile += blockDim.x)
            a.sources[rows[i].at + tile] = make_int2(rows[i].row, tile);
    for (int round = 0; round < a.rounds; round++) {
        const int items =
            sort_items(a.items + static_cast<int64_t>(round) * a.item_room, a.merges, places, scratch,
                       [&](auto emit) { cut_round(a, rows, room.count, round, emit); });
        if (threadIdx.x == 0) a.plans[round] = {0, items, room.merges, ends[round]};
    }
    if (threadIdx.x == 0) *a.absorbed = make_int2(bounds[0], bounds[1]);
}
