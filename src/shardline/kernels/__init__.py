"""Kernels: `contract.py` says what a machine computes; one folder for each kind of machine computes it."""
