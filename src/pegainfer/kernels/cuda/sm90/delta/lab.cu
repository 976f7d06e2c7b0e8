// op gated_delta: experiment.
#include "hinted.cuh"

// variant delta_ring3_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, false, false, false, 1>(args);
}
// variant delta_ring3f_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3f_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, true, false, false, 1>(args);
}
// variant delta_ring3ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, true, true, false, 1>(args);
}
// variant delta_ring2ff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring2ff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 2, true, true, false, 1>(args);
}
// variant delta_ring3p_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3p_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, true, true, true, 1>(args);
}
// variant delta_ring3q4_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3q4_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, true, true, false, 4>(args);
}
// variant delta_ring3of_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring3of_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, float, 3, false, true, false, 1>(args);
}
// variant delta_ring6bff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring6bff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, bf16, 6, true, true, false, 1>(args);
}
// variant delta_ring4bff_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kRingThreads, 1)
    delta_ring4bff_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_ring<bf16, bf16, 4, true, true, false, 1>(args);
}
// variant delta_hint00_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint00_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, false, false>(args);
}
// variant delta_hint10_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint10_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, true, false>(args);
}
// variant delta_hint11_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint11_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, true, true>(args);
}
