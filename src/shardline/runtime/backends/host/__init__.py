"""The CPU's back end: C++ kernels over panels of weights, decode steps replayed as programs."""
