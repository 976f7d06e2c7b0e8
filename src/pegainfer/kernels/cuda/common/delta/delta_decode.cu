// op gated_delta: rows of one token, all that follows the projections.
#include "decode.cuh"

// variant delta_decode_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_decode_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode(args);
}
// variant delta_decode_bf16_bf16: dtype=bf16 state=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_decode_bf16_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode<bf16, bf16>(args);
}
// variant delta_decode_f16: dtype=f16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_decode_f16(const DeltaDecodeArgs<f16> args) {
    delta_decode(args);
}
// variant delta_decode_f32: dtype=f32 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_decode_f32(const DeltaDecodeArgs<float> args) {
    delta_decode(args);
}
