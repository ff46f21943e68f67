"""Level 4: tile programs, block-level code over tiles of values with layouts."""
