// Generated from runtime/cuda/lora_arguments.py by `python -m pegainfer.kernels.headers`; do not edit.
// Long because it has every struct that Python passes.
// clang-format off
#pragma once
#include <cstdint>

namespace lora {
// The factors that adapters add to one GEMM.
struct Factor {
    const void* down;  // [A, X, K]
    const void* up;  // [A, X, n]
    const int* ranks;  // [A]
    int n;  // outputs
    int first;  // where they begin among the layer's outputs
};
static_assert(sizeof(Factor) == 32);
}  // namespace lora

namespace lora {
// What the adapters of a layer's GEMMs read and write; the GEMMs have the same inputs.
struct Args {
    float* h;  // [factors, T, X]: each token's inputs times its adapter's `down`
    const void* a;  // [T, K]
    void* x;  // [T, ld], to which the adapters' outputs are added
    const int* adapters;  // [T]; negative: none
    int tokens;
    int most;  // X, the greatest rank
    int k;
    int ld;
    int step;  // between a GEMM's outputs in a row of x: 2 where two GEMMs' outputs lie in turn
    int factors;
    Factor factor[4];
};
static_assert(sizeof(Args) == 184);
}  // namespace lora

namespace lora {
// The same inside of a GEMM's launch.
struct Fused {
    const void* a;  // [T, K]
    const int* adapters;  // [T]; negative: none
    float* sums;  // [slices, T, factors, room]: inputs times `down`, by slices of k
    unsigned* arrivals;  // [2], zero before the launch and after it
    int tokens;
    int most;  // X, the greatest rank
    int room;  // the greatest rank, rounded up to a multiple of 16
    int k;
    int step;  // as in Args
    int factors;
    int slices;
    int shared;  // bytes of the block's shared memory in front of what adapters take
    Factor factor[4];
};
static_assert(sizeof(Fused) == 192);
}  // namespace lora
