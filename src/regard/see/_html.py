"""What notebooks show. Inline HTML that needs nothing installed; every token is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ._roles import ROLES, Role
from ._style import MIXED, ROLE_COLOURS
from ._tokens import label

if TYPE_CHECKING:
    from ._capture import Capture
    from ._layer import Head, Layer

MOST_TOKENS, MOST_LAYERS, MOST_KEYS = 200, 64, 3
BLUE = "60, 130, 210"
# `color: inherit` and colours with alpha: readable on light and on dark pages.
FRAME = '<div style="font-family:ui-monospace,monospace;font-size:12px;color:inherit">'


def capture(seen: Capture) -> str:
    """A cell for each head, coloured by role."""
    if not len(seen):
        return f"{FRAME}{escape(repr(seen))}</div>"
    shown = seen.layers[:MOST_LAYERS]
    lines = [
        f"<tr><td>{layer.index}</td>{''.join(map(_cell, layer))}<td>{escape(layer.name)}</td></tr>"
        for layer in shown
    ]
    heads = "".join(f"<th>{head}</th>" for head in range(max(layer.heads for layer in shown)))
    more = f"<div>and {len(seen) - len(shown)} more layers</div>" if len(seen) > len(shown) else ""
    return (
        f"{FRAME}<div>{escape(repr(seen))}</div>{_strip(seen.layers[0].texts())}"
        f'<table style="border-collapse:collapse"><tr><th>layer</th>{heads}<th></th></tr>{"".join(lines)}'
        f"</table>{more}{_legend()}</div>"
    )


def layer(layer: Layer) -> str:
    """A line for each head: its scores."""
    names = "".join(f'<th style="padding:2px 8px">{escape(name)}</th>' for name in ROLES)
    lines = "".join(f"<tr><td>{head.index}</td>{_scores(head.roles)}</tr>" for head in layer)
    return (
        f"{FRAME}<div>{escape(repr(layer))}</div>{_strip(layer.texts())}"
        f'<table style="border-collapse:collapse"><tr><th>head</th>{names}</tr>{lines}</table></div>'
    )


def head(head: Head) -> str:
    """Who is read, and what each token attends to most."""
    tokens = head.tokens[:MOST_TOKENS]
    taken = (head.column_mass / max(1, len(head.tokens)))[:MOST_TOKENS].tolist()
    lines = "".join(
        f"<tr><td>{i}</td><td>{_token(token)}</td><td>{_list(head, i)}</td></tr>"
        for i, token in enumerate(tokens)
    )
    hidden = len(head.tokens) - len(tokens)
    more = f"<div>and {hidden} more tokens</div>" if hidden else ""
    return (
        f"{FRAME}<div>{escape(repr(head))}</div>"
        f"<div>share of the mass by key: {_strip(head.key_tokens, taken)}</div>"
        f'<table style="border-collapse:collapse"><tr><th></th><th>query</th><th>attends to</th></tr>{lines}'
        f"</table>{more}</div>"
    )


def _cell(head: Head) -> str:
    role = head.role
    colour = MIXED if role is None else ROLE_COLOURS[role.name]
    text = escape(f"{head.title}: {'mixed' if role is None else role}")
    score = "" if role is None else f"{role.score:.2f}"
    return (
        f'<td title="{text}" style="background:{colour};color:{_ink(colour)};padding:2px 5px;'
        f'border:1px solid rgba(128,128,128,.5);text-align:right">{score}</td>'
    )


def _ink(colour: str) -> str:
    """Black or white, whichever is read better on #rrggbb."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#fff" if 0.3 * red + 0.59 * green + 0.11 * blue < 100 else "#111"


def _scores(roles: dict[str, Role]) -> str:
    return "".join(
        f'<td title="{escape(str(role))}" style="background:rgba({BLUE},{0.6 * role.score:.2f});'
        f'padding:2px 8px;text-align:right">{role.score:.2f}</td>'
        for role in roles.values()
    )


def _strip(texts: Sequence[str], shares: Iterable[float] | None = None) -> str:
    """Tokens in a line, shaded by share."""
    shown = texts[:MOST_TOKENS]
    depths = [0.0] * len(shown) if shares is None else list(shares)
    marks = "".join(_token(text, depth) for text, depth in zip(shown, depths, strict=False))
    more = f" … {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    return f'<div style="line-height:1.9">{marks}{more}</div>'


def _token(text: str, share: float = 0.0) -> str:
    depth = min(1.0, max(0.0, share)) ** 0.5
    return (
        f'<span title="{share:.3f}" style="background:rgba({BLUE},{0.7 * depth:.2f});padding:1px 3px;'
        f'margin:1px;border:1px solid rgba(128,128,128,.4)">{escape(label(text))}</span>'
    )


def _list(head: Head, query: int) -> str:
    keys = head.top(query)[:MOST_KEYS]
    return " ".join(f"{_token(key.token, key.weight)} {key.weight:.2f}" for key in keys)


def _legend() -> str:
    marks = (
        f'<span style="background:{colour};color:{_ink(colour)};padding:1px 6px;margin-right:4px">'
        f"{escape(name)}</span>"
        for name, colour in (*ROLE_COLOURS.items(), ("mixed", MIXED))
    )
    return f'<div style="line-height:2">{"".join(marks)}</div>'
