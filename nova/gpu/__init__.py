"""Levels 4 to 6 for NVIDIA GPUs: tile programs to per-thread IR, PTX and machine code, and a warp simulator."""
