// op gated_delta: experiment.
#include "decode.cuh"

// variant delta_dyn3_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn3_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 2, false, false, true>(args);
}
// variant delta_dyn3ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn3ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 2, true, true, true>(args);
}
// variant delta_dyn3f_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn3f_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 2, true, false, true>(args);
}
// variant delta_dyn3of_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn3of_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 2, false, true, true>(args);
}
// variant delta_sta3ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_sta3ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 2, true, true, false>(args);
}
// variant delta_dyn2ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn2ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 2, 2, true, true, true>(args);
}
// variant delta_dyn6bff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn6bff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, bf16, 6, 2, true, true, true>(args);
}
// variant delta_dyn6b_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(2 * kTeamThreads + 32, 1)
    delta_dyn6b_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, bf16, 6, 2, false, false, true>(args);
}
// variant delta_dyn6t3bff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(3 * kTeamThreads + 32, 1)
    delta_dyn6t3bff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, bf16, 6, 3, true, true, true>(args);
}
// variant delta_dyn6t3b_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(3 * kTeamThreads + 32, 1)
    delta_dyn6t3b_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, bf16, 6, 3, false, false, true>(args);
}
// variant delta_dyn3t3ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(3 * kTeamThreads + 32, 1)
    delta_dyn3t3ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_decode_ring<bf16, float, 3, 3, true, true, true>(args);
}
