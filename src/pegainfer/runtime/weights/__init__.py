"""Weights: bounded readers for GGUF and safetensors, and weights as values that backends load.

`gguf_split.open_gguf` and `safetensors.open_safetensors` give a `tensorfile.TensorFile`. A `part.Part` says
where an array lies; a `weight.Weight` says what its parts mean (docs/weights.md).
"""
