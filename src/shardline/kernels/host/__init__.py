"""The CPU's kernels: `shardline._cpu`, and how weights lie for it."""
