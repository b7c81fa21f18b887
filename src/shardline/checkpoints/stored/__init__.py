"""One file per way of storing weights, found by the `quant_method` of a config.json; see `stored_weights.Method`."""
