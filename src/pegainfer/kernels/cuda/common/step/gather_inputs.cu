// op append_tokens: token ids and block tables of a step that is no decode step, from histories and tables on
// the device.
#include "arguments.cuh"
#include "ptx.cuh"

// The first thread blocks take one token a thread, the others one row each. Groups of states have nothing
// here: the host sends their few numbers with the other inputs.
// variant gather_inputs: block=256
extern "C" __global__ void __launch_bounds__(256) gather_inputs(const __grid_constant__ GatherInputs a) {
    pdl_wait();
    pdl_launch();
    const int token_blocks = (a.tokens + blockDim.x - 1) / blockDim.x;
    if (static_cast<int>(blockIdx.x) < token_blocks) {
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < a.tokens) a.token_ids[i] = a.history[a.places[i]];
        return;
    }
    const int row = blockIdx.x - token_blocks;
    const int* const tables = a.tables + static_cast<int64_t>(a.rows[row]) * a.table_width;
    for (int g = 0; g < a.num_groups; ++g) {
        const Group& group = a.groups[g];
        if (!group.block_size || !group.by_row) continue;
        const int* const from = tables + group.first;
        int* const to = group.by_row + static_cast<int64_t>(row) * group.width;
        if (group.width % 4 == 0) {  // `first` is a multiple of 4, so both are whole 16 bytes
            const int4* const wide = reinterpret_cast<const int4*>(from);
            for (int i = threadIdx.x; i < group.width / 4; i += blockDim.x)
                reinterpret_cast<int4*>(to)[i] = wide[i];
        } else {
            for (int i = threadIdx.x; i < group.width; i += blockDim.x) to[i] = from[i];
        }
    }
}
