"""Proof before use: each Triton kernel is compared with torch's on the device, in a process of its own."""
