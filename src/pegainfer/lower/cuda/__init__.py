"""CUDA kernels and what chooses and launches them. Imports without a GPU."""
