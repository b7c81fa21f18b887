"""The commands: each file has `add_parser(commands)` and sets `run` as a default of its parser."""
