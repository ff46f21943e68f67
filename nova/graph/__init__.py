"""Level 1 to 1: rewrites of the whole step in the `nova` dialect."""
