// op gated_delta_rule: rows of several tokens by chunks, with tensor cores.
#include "scan.cuh"

// variant delta_chunk_prepare_bf16: dtype=bf16 key_dim=128
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 3)
    delta_chunk_prepare_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_prepare(args, chunks);
}
// variant delta_chunk_scan_bf16: dtype=bf16 key_dim=128 value_multiple=32
extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    delta_chunk_scan_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_scan<float>(args, chunks);
}
// variant delta_chunk_scan_bf16_bf16: dtype=bf16 state=bf16 key_dim=128 value_multiple=32
extern "C" __global__ void __launch_bounds__(kScanThreads, 1)
    delta_chunk_scan_bf16_bf16(const DeltaArgs<bf16> args, const ChunkArgs<bf16> chunks) {
    delta_chunk_scan<bf16>(args, chunks);
}
