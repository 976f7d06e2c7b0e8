// op attention: the step's work list, made once a step on the device (lengths may be known only there).
#include "sort.cuh"

using namespace attention;

// Cuts rows of several query tokens into tiles and parts and gives each to `emit(item, keys of a part)`.
// Every thread takes part; `merges` receives the number of tiles in several parts.
template <typename Emit>
__device__ __forceinline__ void cut_tiles(const PlanArgs& a, int* scratch, int& merges, Emit emit) {
    int slots = 0;
    merges = 0;
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        const int row = r0 + threadIdx.x;
        const int len = row < a.rows ? a.query_lens[row] : 0,
                  context = row < a.rows ? a.context_lens[row] : 0;
        int tiles = 0, cuts = 1;
        if (len > 1) {
            tiles = (len * a.group + a.tile_rows - 1) / a.tile_rows;
            cuts = min(min(PREFILL_BLOCKS / (tiles * a.kv_heads), (context - len) / PREFILL_KEYS),
                       PREFILL_PARTS);
            cuts = max(cuts, 1);
        }
        int total;
        const int want = cuts > 1 ? tiles * cuts : 0;
        const int base = slots + block_exclusive_scan(want, scratch, total);
        slots += total;
        if (base + want > a.prefill_slots) cuts = 1;  // no room: slower, not wrong
        const int merge = merges + block_exclusive_scan(cuts > 1 ? tiles : 0, scratch, total);
        merges += total;
        for (int tile = tiles - 1; tile >= 0; tile--) {
            const int keys = context - len + min(len, (tile * a.tile_rows + a.tile_rows - 1) / a.group + 1);
            Item item = {row, tile, 0, cuts > 1 ? base + tile * cuts : -1, context, a.query_starts[row],
                         0,   len};
            for (int i = 0; i < cuts; i++) {
                item.part_of = i | cuts << 16;
                emit(item, keys / cuts, merge + tile);
            }
        }
    }
}

// Rows of one token each, one after the other, cut where one share ends and the next begins. Returns the
// number of items.
__device__ __forceinline__ int share_rows(const PlanArgs& a, int* scratch) {
    int total, sum = 0;
    auto length = [&](int row) { return row < a.rows && a.query_lens[row] == 1 ? a.context_lens[row] : 0; };
    auto steps_of = [&](int row) { return (length(row) + SHARE_KEYS - 1) / SHARE_KEYS; };
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        block_exclusive_scan(steps_of(r0 + threadIdx.x), scratch, total);
        sum += total;
    }
    const int share = max(1, (sum + a.shares - 1) / a.shares);
    int before = 0, items = 0, slots = 0, cuts = 0;
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        const int row = r0 + threadIdx.x, context = length(row), steps = steps_of(row);
        const int start = before + block_exclusive_scan(steps, scratch, total);
        before += total;
        const int first = start / share, parts = steps ? (start + steps - 1) / share - first + 1 : 0;
        const int item = items + block_exclusive_scan(parts, scratch, total);
        items += total;
        const int slot = slots + block_exclusive_scan(parts > 1 ? parts : 0, scratch, total);
        slots += total;
        const int cut = cuts + block_exclusive_scan(parts > 1 ? 1 : 0, scratch, total);
        cuts += total;
        const int token = parts ? a.query_starts[row] : 0;
        if (parts > 1) a.cuts[cut] = {slot, parts, token, 0};
        for (int i = 0; i < parts; i++) {
            const int from = max(start, (first + i) * share),
                      to = min(start + steps, (first + i + 1) * share);
            const int begin = (from - start) * SHARE_KEYS, end = min(context, (to - start) * SHARE_KEYS);
            a.decode[item + i] = {row, 0, i | parts << 16, parts > 1 ? slot : -1, context, token, begin, end};
            if (from == (first + i) * share) a.firsts[first + i] = item + i;
        }
    }
    for (int i = (sum + share - 1) / share + threadIdx.x; i <= a.shares; i += blockDim.x) a.firsts[i] = items;
    for (int i = cuts + threadIdx.x; i < min(a.rows, a.shares); i += blockDim.x) a.cuts[i] = {};
    return items;
}

// Cuts rows of one token by their own length.
__device__ __forceinline__ int cut_rows(const PlanArgs& a, int* scratch) {
    int items = 0, slots = 0;
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        const int row = r0 + threadIdx.x;
        const bool real = row < a.rows;
        const int len = real ? a.query_lens[row] : 0, context = real ? a.context_lens[row] : 0;
        const int token = real ? a.query_starts[row] : 0, chunk = decode_chunk(context, a.chunk);
        const int parts = len == 1 && context > 0 ? (context + chunk - 1) / chunk : 0;
        int total;
        const int at = items + block_exclusive_scan(parts, scratch, total);
        items += total;
        const int slot = slots + block_exclusive_scan(parts > 1 ? parts : 0, scratch, total);
        slots += total;
        if (real) a.cuts[row] = {slot, parts > 1 ? parts : 0, token, 0};
        for (int i = 0; i < parts; i++) {
            const int begin = i * chunk, end = min(context, begin + chunk);
            a.decode[at + i] = {row, 0, i | parts << 16, parts > 1 ? slot : -1, context, token, begin, end};
        }
    }
    return items;
}

// variant attention_plan: block=256
extern "C" __global__ void __launch_bounds__(256) attention_plan(PlanArgs a) {
    __shared__ int scratch[32], places[CLASSES];
    pdl_wait();
    pdl_launch();
    const int decode = a.shares ? share_rows(a, scratch) : cut_rows(a, scratch);
    int prefill = 0, merges = 0;
    if (a.prefill_slots > 0)  // none: the step decodes only
        prefill = sort_items(a.prefill, a.merges, places, scratch,
                             [&](auto emit) { cut_tiles(a, scratch, merges, emit); });
    if (threadIdx.x == 0) *a.plan = {decode, prefill, merges, 0};
}
