"""Triton kernels that only tests compile."""

from pathlib import Path

SOURCE = Path(__file__).with_name("row_sums.py")
