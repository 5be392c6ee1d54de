"""The torch backend: PyTorch operations on any device."""
