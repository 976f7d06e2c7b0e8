"""Weights on disk: bounded readers for GGUF and safetensors, and the form in which they reach a backend."""
