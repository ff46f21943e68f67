"""Level 0: a PyTorch step, run once and recorded as one functional graph, with what must be checked on replay."""
