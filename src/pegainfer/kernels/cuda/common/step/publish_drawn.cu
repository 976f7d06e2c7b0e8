// op append_tokens: writes the tokens of a step to memory that the host reads, so that the host need not
// request a copy, which would interrupt the kernels.
#include "arguments.cuh"
#include "ptx.cuh"

// One block. The event after it makes the writes visible to the host.
// variant publish_drawn: block=256
extern "C" __global__ void __launch_bounds__(256) publish_drawn(const __grid_constant__ Publish a) {
    pdl_wait();
    pdl_launch();
    int* const to = a.ring + static_cast<int64_t>(*a.ticket % a.slots) * 2 * a.width;
    for (int i = threadIdx.x; i < a.rows; i += blockDim.x) {
        to[i] = a.tokens[i];
        to[a.width + i] = a.status[i];
    }
    __syncthreads();  // every thread has read the ticket
    if (threadIdx.x == 0) *a.ticket += 1;
}
