"""What the code generators of every target share: operations on MLIR values, elementary functions, one-op kernels."""
