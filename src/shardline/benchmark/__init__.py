"""Measures OpenAI-compatible servers: workloads, arrivals, a fast HTTP client, and reports. It uses no engine."""
