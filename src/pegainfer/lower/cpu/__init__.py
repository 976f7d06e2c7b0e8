"""Lowering to the C++ kernels' instructions, and their executor."""
