"""The GPU's back end: Triton kernels, and decode steps captured in CUDA graphs."""
