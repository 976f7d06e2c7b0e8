"""Lowering and execution on GPUs: rewrite, choose, bind, run. Imports without a GPU."""
