"""The hot path: memory plan, step program, artifact cache, argument binding."""
