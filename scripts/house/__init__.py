"""Measures of the source tree: import cycles, device tests, files on a request's way, places that know a format."""
