"""Weights: bounded readers for GGUF and safetensors, and weights as values that backends load.

Readers: `gguf.GGUFFile`, `safetensors.open_safetensors`; both are `tensorfile.TensorFile`s. A `part.Part` says
where an array lies, a `weight.Weight` what its parts mean (docs/weights.md).
"""
