"""Level 1 to 2: dispatch formation, outlining, and the lowering of each kernel to linalg."""
