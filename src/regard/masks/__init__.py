"""Masks: immutable objects that define which keys each query may attend to. True = may attend.

Query i has position `offset + i`, key j has position j. Combine masks with `&`, `|` and `~`.
"""

from ._atoms import (
    Blocks as Blocks,
    Causal as Causal,
    Dense as Dense,
    Dilated as Dilated,
    Documents as Documents,
    Global as Global,
    Lengths as Lengths,
    Prefix as Prefix,
    RandomBlocks as RandomBlocks,
    Window as Window,
)
from ._convert import (
    Arguments as Arguments,
    from_cu_seqlens as from_cu_seqlens,
    from_hf_2d as from_hf_2d,
    from_hf_4d as from_hf_4d,
    from_mha as from_mha,
    from_sdpa as from_sdpa,
    padding as padding,
    to_cu_seqlens as to_cu_seqlens,
    to_hf_2d as to_hf_2d,
    to_hf_4d as to_hf_4d,
    to_mha as to_mha,
    to_sdpa as to_sdpa,
)
from ._flex import from_flex as from_flex, to_flex as to_flex, to_flex_mask_mod as to_flex_mask_mod
from ._mask import And as And, Mask as Mask, MaskKind as MaskKind, Not as Not, Or as Or, PerHead as PerHead
from ._patterns import (
    bigbird as bigbird,
    chunked as chunked,
    longformer as longformer,
    prefix_lm as prefix_lm,
    sliding as sliding,
    streaming as streaming,
)
from ._program import Op as Op, Program as Program
from ._tutorial import (
    create_causal_mask as create_causal_mask,
    create_decoder_mask as create_decoder_mask,
    create_document_mask as create_document_mask,
    create_padding_mask as create_padding_mask,
    create_prefix_mask as create_prefix_mask,
    create_window_mask as create_window_mask,
)
