"""Model types that the engine cannot run, one file each, for the planner; `planning` finds them by their names."""
