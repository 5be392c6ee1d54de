"""The backends: the native core, PyTorch and the reference.

`dispatch` chooses a backend for each call.
"""
