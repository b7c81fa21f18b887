"""The GPU's kernels: Triton in `triton/`, and the vendor's library where it gives the same bits."""
