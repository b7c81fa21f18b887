"""Processes that run what is not trusted to end: foreign compilers, and programs that came with a request or a model.

A *nursery* imports and prepares a service once. It forks *workers*, which take jobs and have limits on time, memory and
stack. The death of a worker costs its job, and nothing else.
"""
