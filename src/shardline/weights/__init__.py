"""Weight formats: how linear weights are held in memory and multiplied. `formats/` has one file per format.

Nothing here imports torch: the planner and the front count bytes with these files. Tensors are passed in as arguments,
and all computation goes through the back end's kernels (`kernels.contract.Kernels`).
"""
