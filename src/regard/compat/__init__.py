"""Stand-ins for other libraries: one module for each, with its names, signatures and meanings.

To run code written for another library on Regard, change the import: `from regard.compat.flash_attn
import flash_attn_func` instead of `from flash_attn import flash_attn_func`.
"""
