"""Measures of the source tree: import cycles, device tests, files that a request uses, places that know a format."""
