"""The benchmarks of `shardline bench`, one file each."""
