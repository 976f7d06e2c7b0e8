"""Weights on disk: bounded readers for GGUF and safetensors, and the form in which they reach a backend.

Readers: `gguf.GGUFFile`, `safetensors.open_safetensors`; both are `tensorfile.TensorFile`s.
"""
