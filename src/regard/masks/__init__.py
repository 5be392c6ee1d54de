"""Masks: immutable objects that define which keys each query may attend to. True = may attend.

Query i has position `offset + i`, key j has position j. Combine masks with `&`, `|` and `~`.
"""

from ._atoms import (
    BlockPatterns,
    Blocks,
    Causal,
    Dense,
    Dilated,
    Documents,
    Global,
    Lengths,
    Prefix,
    RandomBlocks,
    Window,
)
from ._convert import (
    Arguments,
    from_cu_seqlens,
    from_hf_2d,
    from_hf_4d,
    from_mha,
    from_sdpa,
    padding,
    to_cu_seqlens,
    to_hf_2d,
    to_hf_4d,
    to_mha,
    to_sdpa,
)
from ._cut import Cut
from ._flex import from_flex, to_flex, to_flex_mask_mod
from ._mask import And, Mask, MaskKind, Not, Or, PerHead
from ._patterns import bigbird, chunked, longformer, prefix_lm, sliding, streaming
from ._program import Op, Program
from ._tutorial import (
    create_causal_mask,
    create_decoder_mask,
    create_document_mask,
    create_padding_mask,
    create_prefix_mask,
    create_window_mask,
)

__all__ = [
    "And", "Arguments", "BlockPatterns", "Blocks", "Causal", "Cut", "Dense", "Dilated", "Documents", "Global",
    "Lengths", "Mask", "MaskKind", "Not", "Op", "Or", "PerHead", "Prefix", "Program", "RandomBlocks",
    "Window", "bigbird", "chunked", "create_causal_mask", "create_decoder_mask", "create_document_mask",
    "create_padding_mask", "create_prefix_mask", "create_window_mask", "from_cu_seqlens", "from_flex",
    "from_hf_2d", "from_hf_4d", "from_mha", "from_sdpa", "longformer", "padding", "prefix_lm", "sliding",
    "streaming", "to_cu_seqlens", "to_flex", "to_flex_mask_mod", "to_hf_2d", "to_hf_4d", "to_mha",
    "to_sdpa",
]  # fmt: skip
