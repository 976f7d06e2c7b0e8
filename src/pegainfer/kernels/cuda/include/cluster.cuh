// Blocks that share memory (sm_90a): barriers of a cluster, and what one block does in another's memory.
// Addresses are those of the block's own shared memory; `rank` names the block where they are meant.
#pragma once
#include "hopper.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Every thread of the cluster arrives and later waits: what all wrote before is then seen by all.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}
__device__ __forceinline__ float4 load_cluster16(uint32_t p, uint32_t rank) {
    float4 v;
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(p), "r"(rank)
        : "memory");
    return v;
}
// `tma_load2` into every block whose bit is set, each counting the bytes at its own barrier.
__device__ __forceinline__ void tma_multicast2(uint32_t to, const void* map, int x0, int x1, uint32_t barrier,
                                               uint16_t blocks, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
        "l"(map), "r"(x0), "r"(x1), "r"(barrier), "h"(blocks), "l"(policy)
        : "memory");
}
