"""The argument structs of the kernels for LoRA adapters. `python -m pegainfer.kernels.headers` writes them to
kernels/cuda/include/lora_arguments.cuh.
"""

from __future__ import annotations

from pegainfer.runtime.cuda.layout import Layout

MAX_FACTORS = 4  # GEMMs of a layer whose adapters are computed at once
LORA_FACTOR = Layout(
    "lora::Factor",
    "The factors that adapters add to one GEMM.",
    """
    const void* down  // [A, X, K]
    const void* up  // [A, X, n]
    const int* ranks  // [A]
    int n  // outputs
    int first  // where they begin among the layer's outputs
    """,
)
LORA = Layout(
    "lora::Args",
    "What the adapters of a layer's GEMMs read and write; the GEMMs have the same inputs.",
    f"""
    float* h  // [factors, T, X]: each token's inputs times its adapter's `down`
    const void* a  // [T, K]
    void* x  // [T, ld], to which the adapters' outputs are added
    const int* adapters  // [T]; negative: none
    int tokens
    int most  // X, the greatest rank
    int k
    int ld
    int step  // between a GEMM's outputs in a row of x: 2 where two GEMMs' outputs lie in turn
    int factors
    Factor factor[{MAX_FACTORS}]
    """,
    (LORA_FACTOR,),
)
LORA_FUSED = Layout(
    "lora::Fused",
    "The same inside of a GEMM's launch.",
    f"""
    const void* a  // [T, K]
    const int* adapters  // [T]; negative: none
    float* sums  // [slices, T, factors, room]: inputs times `down`, by slices of k
    unsigned* arrivals  // [2], zero before the launch and after it
    int tokens
    int most  // X, the greatest rank
    int room  // the greatest rank, rounded up to a multiple of 16
    int k
    int step  // as in Args
    int factors
    int slices
    int shared  // bytes of the block's shared memory in front of what adapters take
    Factor factor[{MAX_FACTORS}]
    """,
    (LORA_FACTOR,),
)
LAYOUTS = (LORA_FACTOR, LORA, LORA_FUSED)
