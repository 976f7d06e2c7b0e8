// op probe: how fast this card's memory can be read, and launches follow each other; the roofs that shares
// are measured against.
#include "ptx.cuh"

// variant read_bandwidth: block=512
extern "C" __global__ void __launch_bounds__(512)
    read_bandwidth(const uint4* data, uint32_t* out, int64_t n) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
    int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++)
            asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(data + i + j * step));
#pragma unroll
        for (int j = 0; j < 8; j++) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < n; i += step) sum ^= data[i].x;
    if (sum == 0x9e3779b9u) *out = sum;  // keeps the loads alive
}

// variant launch_nothing: block=32
extern "C" __global__ void __launch_bounds__(32) launch_nothing() {
    pdl_wait();
    pdl_launch();
}
