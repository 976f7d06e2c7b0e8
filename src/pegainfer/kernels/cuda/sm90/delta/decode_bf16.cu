// op gated_delta: many rows of one token, all that follows the projections.
#include "decode.cuh"

// variant delta_decode_ring_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_decode_ring_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring(args);
}
