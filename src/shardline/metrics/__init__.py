"""Prometheus metrics. They have vLLM's names with the prefix `shardline:`, so its dashboards need one replacement."""
