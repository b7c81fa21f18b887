"""Batches: many requests from a file, by `shardline run-batch` and by /v1/batches."""
