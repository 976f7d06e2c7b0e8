// op append_tokens: what a decode step reads, made where the tokens are: the host need not have seen them.
#include "ptx.cuh"

// Outputs bear the names of the forward pass's inputs, of which only rows below `count` have values of their
// own; the others hold what a captured step is padded with.
struct DecodeInputs {
    int *token_ids, *positions, *query_starts, *query_lens, *context_lens, *logit_rows, *slots;
    int* block_table;             // [rows, table_width]
    int *history_lens, *draws;    // of the sampler, counted on for a batch that goes on unchanged
    int* batch;                   // count, then each row's slot, position and logit row
    const int *history, *tables;  // [Z, history_width], [Z, table_width]
    int history_width, table_width, block_size;
};

// A block a row. Positions in `batch` are counted on: the next step of the same rows needs nothing sent.
// variant decode_inputs: block=128
extern "C" __global__ void __launch_bounds__(128) decode_inputs(const __grid_constant__ DecodeInputs a) {
    pdl_wait();
    pdl_launch();
    const int row = blockIdx.x;
    int* const mine = a.batch + 1 + 3 * row;
    const bool valid = row < a.batch[0];
    const int slot = valid ? mine[0] : 0, position = valid ? mine[1] : 0;
    const int* const table = a.tables + static_cast<int64_t>(slot) * a.table_width;
    if (valid) {
        int* const to = a.block_table + static_cast<int64_t>(row) * a.table_width;
        for (int i = threadIdx.x; i <= position / a.block_size; i += blockDim.x) to[i] = table[i];
    }
    __syncthreads();  // every thread has read the position
    if (threadIdx.x) return;
    const int block = valid ? table[position / a.block_size] : 0;
    a.token_ids[row] = valid ? a.history[static_cast<int64_t>(slot) * a.history_width + position] : 0;
    a.positions[row] = position;
    a.query_starts[row] = valid ? row : 0;
    a.query_lens[row] = valid;
    a.context_lens[row] = valid ? position + 1 : 0;
    a.logit_rows[row] = valid ? mine[2] : 0;
    a.slots[row] = valid ? block * a.block_size + position % a.block_size : -1;
    a.history_lens[row] += valid;
    a.draws[row] += valid;
    if (valid) mine[1] = position + 1;
}
