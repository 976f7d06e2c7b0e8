// op attention: the step's work list, made once a step on the device (lengths may be known only there).
#include "attention.cuh"

using namespace attention;

struct PlanArgs {
    Plan* plan;
    int2* row_parts;  // [R]: a decoded row's first slot and its parts; 0 parts where one block has it all
    Item* merges;     // prefilled tiles in several parts
    Item* decode;     // room for all
    Item* prefill;    // likewise
    const int* query_starts;
    const int* query_lens;
    const int* context_lens;
    int rows;
    int group;  // query heads a KV head
    int kv_heads;
    int tile_rows;                    // of the prefill kernel: (token, head of the group) pairs
    int decode_slots, prefill_slots;  // room for the sums of parts
};

// variant attention_plan: block=256
extern "C" __global__ void __launch_bounds__(256) attention_plan(PlanArgs a) {
    __shared__ int scratch[32];
    pdl_wait();
    pdl_launch();
    int decode = 0, prefill = 0, merges = 0, decode_slots = 0, prefill_slots = 0;
    for (int r0 = 0; r0 < a.rows; r0 += blockDim.x) {
        const int row = r0 + threadIdx.x;
        const bool real = row < a.rows;
        const int len = real ? a.query_lens[row] : 0, context = real ? a.context_lens[row] : 0;
        const int first = real ? a.query_starts[row] : 0, chunk = decode_chunk(context);
        const int parts = len == 1 && context > 0 ? (context + chunk - 1) / chunk : 0;
        int total;
        const int at = decode + block_exclusive_scan(parts, scratch, total);
        decode += total;
        const int slot = decode_slots + block_exclusive_scan(parts > 1 ? parts : 0, scratch, total);
        decode_slots += total;
        if (real) a.row_parts[row] = make_int2(slot, parts > 1 ? parts : 0);
        for (int i = 0; i < parts; i++) {
            const int begin = i * chunk, end = min(context, begin + chunk);
            a.decode[at + i] = {row, 0, i | parts << 16, parts > 1 ? slot : -1, context, first, begin, end};
        }

        int tiles = 0, cuts = 1;
        if (len > 1) {
            tiles = (len * a.group + a.tile_rows - 1) / a.tile_rows;
            cuts = min(min(PREFILL_BLOCKS / (tiles * a.kv_heads), context / PREFILL_KEYS), PREFILL_PARTS);
            cuts = max(cuts, 1);
        }
        const int want = cuts > 1 ? tiles * cuts : 0;
        int base = prefill_slots + block_exclusive_scan(want, scratch, total);
        prefill_slots += total;
        if (base + want > a.prefill_slots) cuts = 1;  // no room: slower, not wrong
        const int start = prefill + block_exclusive_scan(tiles * cuts, scratch, total);
        prefill += total;
        const int merge = merges + block_exclusive_scan(cuts > 1 ? tiles : 0, scratch, total);
        merges += total;
        // Late tiles see more keys: they go first, so that the short ones fill the gaps.
        for (int i = 0; i < tiles * cuts; i++) {
            const int tile = tiles - 1 - i / cuts, place = cuts > 1 ? base + tile * cuts : -1;
            const Item item = {row, tile, i % cuts | cuts << 16, place, context, first, 0, len};
            a.prefill[start + i] = item;
            if (cuts > 1 && i % cuts == 0) a.merges[merge + tile] = item;
        }
    }
    if (threadIdx.x == 0) *a.plan = {decode, prefill, merges, 0};
}
