// op gated_delta_rule: experiment.
#include "../../common/delta/chunk.cuh"

// variant delta_pre2_bf16: dtype=bf16 key_dim=128
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 2)
    delta_pre2_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_prepare(args, chunks);
}

// variant delta_pre3_bf16: dtype=bf16 key_dim=128
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 3)
    delta_pre3_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_prepare(args, chunks);
}

// variant delta_pre4_bf16: dtype=bf16 key_dim=128
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 4)
    delta_pre4_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_prepare(args, chunks);
}
