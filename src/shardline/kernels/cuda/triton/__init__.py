"""Triton kernels, one file per topic; `gpu_kernels.CudaKernels` has them all.

They follow the same numerics rules as the CPU (see docs/architecture.md). Their bits differ, since bits depend on
the kernel path.
"""
