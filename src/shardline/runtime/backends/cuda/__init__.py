"""The GPU's back end: Triton kernels, decode steps captured in CUDA graphs."""
