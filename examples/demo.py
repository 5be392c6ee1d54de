"""`make demo`: reads a sentence with a real model, checks correctness, and measures speed beside PyTorch.

It takes under a minute once the core is built.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

import regard
from regard import explore, masks as M, scores, see
from regard.info import report as installation
from regard_gallery.models import minilm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import memory  # noqa: E402
from cases import CASES, Case  # noqa: E402
from checks import row_error  # noqa: E402
from measure import best_times, cpu_name  # noqa: E402
from report import mebibytes, milliseconds  # noqa: E402
from run import ready, remark  # noqa: E402

TEXT = "The cat, which was very hungry, ate the fish."
EVERYDAY = (
    "dense-2048-64", "causal-2048-64", "padded-512", "window-4096", "dropout-1024", "bf16-2048",
)  # fmt: skip

NEXT = {
    ".venv/bin/python examples/quickstart.py": "attention, masks, a cache, a module: one page of code",
    "make build": "installs the command `regard` with all its extras; then",
    ".venv/bin/regard explore": "every head of a real model, in the browser",
    '.venv/bin/regard chat "Say hello."': "SmolLM2-135M, offline",
    "make bench": "all cases beside PyTorch, on this machine",
    "docs/README.md": "every page of the documentation in one line",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, for a smoke test")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "demo", help="folder for the pictures"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    with torch.no_grad():
        show_machine(console)
        show_sentence(console, options.output)
        show_correctness(console)
        show_masks(console)
        show_speed(console, options)
    show_next(console)
    return 0


def heading(console: Console, text: str) -> None:
    console.print(f"\n[bold #0072b2]{text}[/]")


def show_machine(console: Console) -> None:
    heading(console, "Regard: exact attention with every option in one call")
    facts = installation()
    console.print(f"{cpu_name()}, {torch.get_num_threads()} threads", highlight=False)
    kernels = facts.get("native isa", "none: " + facts["native core"])
    console.print(f"regard {facts['regard']}, kernels {kernels}; torch {facts['torch']}", highlight=False)


def show_sentence(console: Console, folder: Path) -> None:
    """Finds the head of MiniLM that best links a verb to its subject, draws it, and writes a page."""
    heading(console, "What do the heads of a real model read?")
    folder.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    loaded = minilm.load()
    seen = see.read(loaded.model, loaded.tokenizer, TEXT)
    best = seen.links("ate", "cat")[0]
    head = seen[best.layer, best.head]
    heads = sum(layer.heads for layer in seen)
    console.print(f'"{TEXT}"', highlight=False)
    console.print(
        f'Of the {heads} heads of MiniLM, head {best.head} of layer {best.layer} links "ate" to "cat" most:',
        highlight=False,
    )
    for key in head.top("ate", 4):
        console.print(
            f"  {key.token:>8} {key.weight:.2f} [#0072b2]{'█' * round(40 * key.weight)}[/]", highlight=False
        )
    see.heatmap(head, path=folder / "head.png")
    see.grid(seen, path=folder / "heads.png")
    page = explore.captured(seen, title=f"all-MiniLM-L6-v2 · {TEXT}").save(folder / "explorer.html")
    console.print(f"Pictures in {folder}: head.png, heads.png", highlight=False)
    console.print(f"Explorer of all heads, for any browser, offline: {page}", highlight=False)


def show_correctness(console: Console) -> None:
    """Compares many options at once, in float32, with the formula in float64."""
    heading(console, "Is the result right?")
    q, k, v = torch.randn(2, 8, 333, 64), torch.randn(2, 2, 333, 64), torch.randn(2, 2, 333, 96)
    mask = M.streaming(100, sinks=4) & M.Lengths(torch.tensor([333, 250]))
    options: dict[str, Any] = {
        "bias": scores.Alibi.standard(8),
        "softcap": 20.0,
        "sink": torch.randn(8),
        "dropout": 0.1,
    }
    out = regard.attention(q, k, v, mask=mask, seed=1, **options)
    exact = regard.attention(
        q.double(), k.double(), v.double(), mask=mask, seed=1, impl="reference", **options
    )
    console.print(
        f"Grouped heads, Dv = 96, {mask}, ALiBi, softcap, sink and dropout:\n"
        f"the worst of {out.shape[:3].numel():,} rows is {row_error(out, exact):.1e} away from float64.",
        highlight=False,
    )


def show_masks(console: Console, L: int = 16) -> None:
    heading(console, "Masks are values")
    masks = {
        "Causal()": M.Causal(),
        "sliding(4)": M.sliding(4),
        "packed documents": M.Documents(torch.tensor([0] * 5 + [1] * 7 + [2] * 4)) & M.Causal(),
        "longformer": M.longformer(5, global_tokens=[0]),
    }
    panels = [Panel(f"[#56b4e9]{picture(m, L)}[/]", title=name, expand=False) for name, m in masks.items()]
    console.print(Columns(panels, padding=(0, 0)))


def picture(mask: M.Mask, L: int) -> str:
    """Draws an (L, L) mask in L / 2 lines of L characters; one character shows two queries."""
    seen = mask.to_dense(L, L).expand(1, 1, L, L)[0, 0].long()
    pairs = (2 * seen[::2] + seen[1::2]).tolist()
    return "\n".join("".join("·▄▀█"[pair] for pair in line) for line in pairs)


def show_speed(console: Console, options: argparse.Namespace) -> None:
    heading(console, "Time and peak memory beside PyTorch's scaled_dot_product_attention")
    table = Table(box=SIMPLE_HEAD)
    for i, name in enumerate(
        ("case", "B, H/Hkv, L, D", "Regard", "PyTorch", "faster", "MiB", "PyTorch's MiB")
    ):
        table.add_column(name, justify="left" if i < 2 else "right")
    notes = set()
    for case, cells, note in measured(console, options):
        table.add_row(case.title, case.shape, *cells)
        notes |= {f"{case.title}: {note}"} if note else set()
    console.print(table)
    for text in sorted(notes):
        console.print(f"[dim]{text}[/]", highlight=False)
    console.print(
        "[dim]Best of several turns. `make bench` measures more cases, for longer.[/]", highlight=False
    )


def show_next(console: Console) -> None:
    heading(console, "What to try next")
    for command, purpose in NEXT.items():
        console.print(f"  {command:<41} [dim]{purpose}[/]", highlight=False)


def measured(console: Console, options: argparse.Namespace) -> Iterator[tuple[Case, list[str], str]]:
    """Yields (case, cells, note): times are measured first, then peak memory in a separate process."""
    L = 64 if options.quick else None
    cases = [c.shrunk(L) if L else c for name in EVERYDAY for c in CASES if c.name == name]
    labels = [f"{c.name}:{side}" for c in cases for side in ("regard", "sdpa")]
    rows, sizes = {}, {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=4 * len(cases))
        for case in cases:
            progress.update(task, description=case.title, advance=2)
            rows[case.name] = times(case, 0.02 if options.quick else 0.4)
        for label, extra in memory.measure(labels, options.threads, L):
            progress.update(task, description="memory", advance=1)
            sizes[label] = mebibytes(extra)
    for case in cases:
        cells, note = rows[case.name]
        yield case, [*cells, *(sizes.get(f"{case.name}:{side}", "") for side in ("regard", "sdpa"))], note


def times(case: Case, seconds: float) -> tuple[list[str], str]:
    """Returns table cells and a note. The cells are Regard's time, PyTorch's time and their ratio.

    The ratio is PyTorch's time divided by Regard's. If a result is wrong, the first cell is
    "refused".
    """
    inputs = case.inputs()
    calls, faults = ready(case, inputs, ["regard", "sdpa"])
    if faults:
        return ["refused", "", ""], "; ".join(faults.values())
    best = best_times(calls, seconds)
    ratio = f"{best['sdpa'] / best['regard']:.1f} x"
    return [*map(milliseconds, best.values()), ratio], remark(case, inputs, "sdpa")


if __name__ == "__main__":
    sys.exit(main())
