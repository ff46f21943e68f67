"""Levels 4 to 6 for CPUs: scheduled linalg to vector code, LLVM IR and object code."""
