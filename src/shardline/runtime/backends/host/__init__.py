"""The CPU's back end: C++ kernels read weights in panels, and decode steps are replayed as programs."""
