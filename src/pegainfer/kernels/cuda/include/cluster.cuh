// Blocks that share memory (sm_90a): barriers of a cluster, and what one block does in another's memory.
// Addresses are those of the block's own shared memory; `rank` names the block where they are meant.
#pragma once
#include "hopper.cuh"

// Every thread of the cluster arrives, and waits later. Orders nothing but barriers made before it (with
// `mbarrier_init_fence`): a fence as well costs a microsecond of a busy memory.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_address(uint32_t p, uint32_t rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(p), "r"(rank));
    return there;
}
// Arrives at a barrier of the block `rank`: what this thread read before, it has read.
__device__ __forceinline__ void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(barrier, rank))
                 : "memory");
}
// Sends 16 bytes to another block, which counts them at its barrier; it needs no fence on either side.
__device__ __forceinline__ void store_cluster16(uint32_t p, uint32_t rank, float4 v, uint32_t barrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            cluster_address(p, rank)),
        "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cluster_address(barrier, rank))
        : "memory");
}
