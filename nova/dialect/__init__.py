"""Level 1: the `nova` dialect, its reference meaning, and the emitter from the captured graph."""
