"""Kernels in plain torch operations, for any device that torch has and any model, with no kernel of ours."""
