"""A thin layer over the CUDA driver. Imports without a GPU and without the cuda packages."""
