"""Kinds of attention and of experts that only the planner knows."""
