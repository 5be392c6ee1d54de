"""The PyTorch backend: the same mathematics in PyTorch operations, for any device."""
