"""Kernels written in Triton, compiled ahead of time like all others (kernels/build.py)."""
