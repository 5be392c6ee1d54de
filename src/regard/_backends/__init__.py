"""Who computes a call: `dispatch` chooses between the native core, PyTorch and the reference."""
