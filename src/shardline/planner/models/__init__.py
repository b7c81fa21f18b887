"""Models that are planned but not run, one file for each `model_type`; `planned_model` finds them by their names."""
