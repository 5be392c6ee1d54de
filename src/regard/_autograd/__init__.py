"""Derivatives of attention, its operators in `torch.ops.regard`, and their vmap rules."""
