// op gated_delta: experiment.
#include "hinted.cuh"

// variant delta_hint00_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint00_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 0, false, float>(args);
}
// variant delta_hint10_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint10_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 0, false, float>(args);
}
// variant delta_hint11_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint11_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 1, false, float>(args);
}
// variant delta_hint02_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint02_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 2, false, float>(args);
}
// variant delta_hint12_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hint12_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 2, false, float>(args);
}
// variant delta_hinti00_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hinti00_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 0, true, float>(args);
}
// variant delta_hinti10_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hinti10_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 0, true, float>(args);
}
// variant delta_hinti11_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hinti11_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 1, true, float>(args);
}
// variant delta_hinti02_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hinti02_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 2, true, float>(args);
}
// variant delta_hinti12_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hinti12_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 2, true, float>(args);
}
// variant delta_hintb00_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hintb00_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 0, false, bf16>(args);
}
// variant delta_hintb11_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hintb11_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 1, false, bf16>(args);
}
// variant delta_hintbi00_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hintbi00_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 0, 0, true, bf16>(args);
}
// variant delta_hintbi11_bf16: dtype=bf16 key_dim=128 value_dim=128 taps=4 tokens=1
extern "C" __global__ void __launch_bounds__(kDecodeThreads, 2)
    delta_hintbi11_bf16(const DeltaDecodeArgs<bf16> args) {
    delta_hinted<bf16, 1, 1, true, bf16>(args);
}
