"""Triton kernels, one file a topic; `gpu_kernels.CudaKernels` has them all.

Their numerics are the CPU's (see docs/architecture.md); their bits are not, since bits belong to the kernel path.
"""
