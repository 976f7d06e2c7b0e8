// op append_tokens: all inputs of a decode step, made on the device from its tokens and tables.
#include "arguments.cuh"
#include "ptx.cuh"

__device__ __forceinline__ void store(int* to, int row, int value) {
    if (to) to[row] = value;
}

// One thread block a row. The position in `batch` is advanced, so that a next step of the same rows needs
// nothing from the host. A save applies to one step: it is cleared after it was read.
// variant decode_inputs: block=128
extern "C" __global__ void __launch_bounds__(128) decode_inputs(const __grid_constant__ DecodeInputs a) {
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.x;
    int* const mine = a.batch + 1 + a.batch_width * row;
    const bool valid = row < a.batch[0];
    const int slot = valid ? mine[0] : 0, position = valid ? mine[1] : 0;
    const int* const tables = a.tables + static_cast<int64_t>(slot) * a.table_width;
    if (valid) {
        for (int g = 0; g < a.num_groups; ++g) {
            const Group& group = a.groups[g];
            if (!group.block_size || !group.by_row) continue;
            int* const to = group.by_row + static_cast<int64_t>(row) * group.width;
            const int last = position / group.block_size;
            for (int i = threadIdx.x; i <= last; i += blockDim.x) to[i] = tables[group.first + i];
        }
    }
    __syncthreads();  // every thread has read the position
    if (threadIdx.x) return;
    // All loads are issued ahead of the stores, so that their latencies overlap.
    const int token = valid ? a.history[static_cast<int64_t>(slot) * a.history_width + position] : 0;
    const int logit_row = valid ? mine[2] : 0;
    const int history_len = a.history_lens[row], draws = a.draws[row];
    int adapter = -1, logit_adapter = -1;
    if (a.adapters && valid) {
        const int logit_slot = a.batch[1 + a.batch_width * logit_row];
        adapter = tables[a.adapter_column];
        logit_adapter = a.tables[static_cast<int64_t>(logit_slot) * a.table_width + a.adapter_column];
    }
    int* save = mine + 3;
    for (int g = 0; g < a.num_groups; ++g) {
        const Group& group = a.groups[g];
        if (group.block_size) {
            const int block = valid ? tables[group.first + position / group.block_size] : 0;
            store(group.by_token, row, valid ? block * group.block_size + position % group.block_size : -1);
        } else {
            store(group.by_row, row, valid ? tables[group.first] : -1);
            store(group.by_token, row, valid ? *save : -1);
            if (valid) *save = -1;
            ++save;
        }
    }
    store(a.token_ids, row, token);
    store(a.positions, row, position);
    store(a.query_starts, row, valid ? row : 0);
    store(a.query_lens, row, valid);
    store(a.context_lens, row, valid ? position + 1 : 0);
    store(a.logit_rows, row, logit_row);
    store(a.adapters, row, adapter);
    store(a.logit_adapters, row, logit_adapter);
    a.history_lens[row] = history_len + valid;
    a.draws[row] = draws + valid;
    if (valid) mine[1] = position + 1;
}
