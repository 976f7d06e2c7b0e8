// op gated_delta_rule: the recurrence of linear attention over states in a pool, in float32.
#include "delta.cuh"

// variant delta_step_bf16: dtype=bf16 key_dim=128 value_multiple=32 tokens=1
extern "C" __global__ void __launch_bounds__(kThreads) delta_step_bf16(const DeltaArgs<bf16> args) {
    delta_step(args);
}
// variant delta_step_bf16_bf16: dtype=bf16 state=bf16 key_dim=128 value_multiple=32 tokens=1
extern "C" __global__ void __launch_bounds__(kThreads) delta_step_bf16_bf16(const DeltaArgs<bf16> args) {
    delta_step<bf16, bf16>(args);
}
// variant delta_any_bf16: dtype=bf16
extern "C" __global__ void __launch_bounds__(32) delta_any_bf16(const DeltaArgs<bf16> args) {
    delta_any(args);
}
