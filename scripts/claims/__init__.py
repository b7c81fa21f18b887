"""Numbers that guides repeat, each with the planner's own figure. `python -m scripts.claims` writes docs/claims.md."""
