"""Helpers that all other folders import: argument checks, measuring, listeners, PyTorch's modes."""
