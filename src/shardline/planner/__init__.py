"""Plans before anything is rented: what fits, which layout, how fast, at what price. No torch, and no GPU needed."""
