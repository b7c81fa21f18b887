"""Prometheus metrics. Names are vLLM's with the prefix `shardline:`, so that its dashboards need one replacement."""
