"""Which replica runs which request. Nothing here imports torch, waits or reads a clock."""
