// op route_experts, moe: the K best experts of each token in ascending order, and the weights of their
// results.
#include "route.cuh"

namespace {

constexpr int WARPS = 4;

}  // namespace

// A warp takes a token; 3 N numbers of shared memory each.

// variant route_experts: dtype=f32
extern "C" __global__ void __launch_bounds__(WARPS * 32) route_experts(const route::Args a) {
    extern __shared__ float shared[];
    const int warp = threadIdx.x >> 5, token = blockIdx.x * WARPS + warp;
    pdl_wait();
    pdl_launch();
    if (token >= a.tokens) return;
    float* scores = shared + warp * 3 * a.n;
    route::route_token(a, token, scores, scores + a.n, reinterpret_cast<uint32_t*>(scores + 2 * a.n));
}
