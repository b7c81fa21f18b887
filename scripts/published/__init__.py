"""Published measurements: reading them as people write them, fitting the constants of step times, and the errors."""
