"""Helpers below every other package: argument checks, measuring, listeners, PyTorch's modes."""
