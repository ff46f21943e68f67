"""`python -m nova bench`: kernels and steps beside eager PyTorch, `torch.compile` and Liger, on this machine's GPU."""
