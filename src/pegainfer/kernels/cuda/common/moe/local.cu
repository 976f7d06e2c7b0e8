// op local_experts, moe_shard: places of the chosen experts among those that this rank holds.
#include <cstdint>

#include "ptx.cuh"

// variant local_experts: dtype=i32
extern "C" __global__ void __launch_bounds__(256)
    local_experts(int32_t* local, const int32_t* experts, int64_t slots, int first, int count) {
    pdl_wait();
    pdl_launch();
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= slots) return;
    const int at = experts[i] - first;
    local[i] = at >= 0 && at < count ? at : -1;
}
