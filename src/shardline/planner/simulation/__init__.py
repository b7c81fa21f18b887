"""Workloads on modelled hardware: the engine's scheduler, block pool and router, over a clock that is virtual."""
