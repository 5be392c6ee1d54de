"""Experiments that test claims of study notes about attention, one file for each claim."""

from __future__ import annotations

from importlib import import_module

from .finding import Finding as Finding

# Name of the experiment's file, group of the claim on the page docs/claims/README.md.
CLAIMS = (
    ("variance", "formulas"),
    ("row_sums", "formulas"),
    ("worked_example", "formulas"),
    ("softmax_example", "formulas"),
    ("quadratic_time", "costs"),
    ("weight_count", "costs"),
    ("head_flops", "costs"),
    ("flash_memory", "costs"),
    ("parameters", "costs"),
    ("comparison", "costs"),
    ("parallel_heads", "costs"),
    ("flash_speed", "costs"),
    ("head_roles", "mechanisms"),
    ("head_distances", "mechanisms"),
    ("one_head", "mechanisms"),
    ("sequence_first", "samples"),
    ("masked_row", "samples"),
    ("unused_mask", "samples"),
    ("clip_towers", "mechanisms"),
    ("subspaces", "mechanisms"),
    ("sum_index", "formulas"),
    ("normaliser", "formulas"),
    ("head_sum", "formulas"),
    ("weighted_mean", "formulas"),
    ("recommender", "samples"),
    ("time_series", "samples"),
    ("policy_heads", "samples"),
    ("clip_similarity", "samples"),
    ("mask_comment", "samples"),
    ("complexity_function", "costs"),
    ("grouped_flops", "costs"),
    ("sharing", "mechanisms"),
    ("without_softmax", "mechanisms"),
    ("argmax_gradient", "mechanisms"),
    ("universal", "mechanisms"),
    ("decomposition", "mechanisms"),
    ("linformer_kernel", "mechanisms"),
    ("bert_translation", "mechanisms"),
)
GROUPS = {
    "formulas": "Formulas and worked examples",
    "samples": "Code samples",
    "costs": "Time, memory and parameters",
    "mechanisms": "How attention and its models work",
}
NAMES = tuple(name for name, _ in CLAIMS)


def measure(name: str) -> Finding:
    """Runs the experiment of a claim and returns its finding."""
    if name not in NAMES:
        raise ValueError(f"claim: expected one of {', '.join(NAMES)}, got {name!r}")
    finding: Finding = import_module(f".{name}", __name__).measure()
    return finding
