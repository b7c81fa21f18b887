"""Weight formats: how linear weights are held in memory and multiplied. `formats/` has one file a format.

Nothing here imports torch: the planner and the front count bytes with these files. Tensors come in as arguments, and
everything that computes is reached through the back end's kernels (`runtime.backends.base.Kernels`).
"""
