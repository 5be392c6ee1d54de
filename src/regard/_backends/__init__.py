"""The backends: the native core, PyTorch and the reference.

`dispatch` chooses one for each call.
"""
