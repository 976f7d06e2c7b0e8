"""Sources of the kernels, their build, the manifest of built kernels, and its loader."""
