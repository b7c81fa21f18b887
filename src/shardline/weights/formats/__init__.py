"""One file a weight format, found by its name; `weights.base.WeightFormat` is the contract."""
