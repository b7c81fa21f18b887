"""The commands. Each file defines `add_parser(commands)`, which sets `run` as a default of its parser."""
