"""The page at /: files for a browser, and what serves them."""
