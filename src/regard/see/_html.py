"""HTML for notebooks. Styles are inline, nothing has to be installed, and every token is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from ._roles import ROLES, Role, named
from ._style import ROLE_COLOURS
from ._tokens import label

if TYPE_CHECKING:
    from ._capture import Capture
    from ._layer import Head, Layer

MOST_TOKENS, MOST_LAYERS, MOST_KEYS = 200, 64, 3
BLUE = "60, 130, 210"
# `color: inherit` and colours with alpha are readable on light and on dark pages.
FRAME = '<div style="font-family:ui-monospace,monospace;font-size:12px;color:inherit">'


def capture(seen: Capture) -> str:
    """Returns an HTML table with one cell per head, in the colour of the head's role."""
    if not len(seen):
        return _page(seen)
    shown = seen.layers[:MOST_LAYERS]
    heads = map(str, range(max(layer.heads for layer in shown)))
    lines = (f"<td>{x.index}</td>{''.join(map(_cell, x))}<td>{escape(x.name)}</td>" for x in shown)
    table = _table(("layer", *heads, ""), lines, len(seen) - len(shown), "layers")
    return _page(seen, _strip(seen[0].texts()), table, _legend())


def layer(layer: Layer) -> str:
    """Returns an HTML table with one row per head. A row shows the head's scores for all roles."""
    lines = (f"<td>{head.index}</td>{_scores(head.roles)}" for head in layer)
    return _page(layer, _strip(layer.texts()), _table(("head", *ROLES), lines))


def head(head: Head) -> str:
    """Returns HTML with a line of keys and a table of each query's 3 largest weights.

    The keys are shaded by the attention that they receive. Shows at most 200 keys and 200 queries.
    """
    tokens = head.tokens[:MOST_TOKENS]
    received = (head.column_mass / max(1, len(head.tokens)))[:MOST_TOKENS].tolist()
    lines = (
        f"<td>{i}</td><td>{_token(token)}</td><td>{_list(head, i)}</td>" for i, token in enumerate(tokens)
    )
    table = _table(("", "query", "attends to"), lines, len(head.tokens) - len(tokens), "tokens")
    return _page(head, f"<div>attention received: {_strip(head.key_tokens, received)}</div>", table)


def _page(shown: object, *parts: str) -> str:
    return f"{FRAME}<div>{escape(repr(shown))}</div>{''.join(parts)}</div>"


def _table(names: Iterable[str], lines: Iterable[str], hidden: int = 0, what: str = "") -> str:
    """Returns an HTML table of `lines`, and a note below it that `hidden` more rows exist."""
    head = "".join(f'<th style="padding:2px 5px">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    note = f"<div>and {hidden} more {what}</div>" if hidden else ""
    return f'<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>{note}'


def _mark(tag: str, text: str, background: str, style: str, title: str = "") -> str:
    """Returns an HTML element with a background colour and the tooltip `title`."""
    return f'<{tag} title="{escape(title)}" style="background:{background};{style}">{escape(text)}</{tag}>'


def _cell(head: Head) -> str:
    role = head.role
    colour = ROLE_COLOURS["mixed" if role is None else role.name]
    style = f"{_ink(colour)};padding:2px 5px;border:1px solid rgba(128,128,128,.5);text-align:right"
    score = "" if role is None else f"{role.score:.2f}"
    return _mark("td", score, colour, style, f"{head.title}: {named(role)}")


def _ink(colour: str) -> str:
    """Returns the CSS for a dark or white text colour that contrasts with a background #rrggbb."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"color:{'#fff' if 0.3 * red + 0.59 * green + 0.11 * blue < 100 else '#111'}"


def _scores(roles: dict[str, Role]) -> str:
    style = "padding:2px 8px;text-align:right"
    return "".join(
        _mark("td", f"{role.score:.2f}", f"rgba({BLUE},{0.6 * role.score:.2f})", style, str(role))
        for role in roles.values()
    )


def _strip(texts: Sequence[str], shares: Sequence[float] = ()) -> str:
    """Returns an HTML line of tokens, each shaded by its share of the attention."""
    shown = texts[:MOST_TOKENS]
    marks = "".join(map(_token, shown, shares or [0.0] * len(shown)))
    note = f" … {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    return f'<div style="line-height:1.9">{marks}{note}</div>'


def _token(text: str, share: float = 0.0) -> str:
    depth = 0.7 * min(1.0, max(0.0, share)) ** 0.5
    style = "padding:1px 3px;margin:1px;border:1px solid rgba(128,128,128,.4)"
    return _mark("span", label(text), f"rgba({BLUE},{depth:.2f})", style, f"{share:.3f}")


def _list(head: Head, query: int) -> str:
    """Returns HTML that lists one query's largest weights and the keys that have them."""
    keys = head.top(query)[:MOST_KEYS]
    return " ".join(f"{_token(key.token, key.weight)} {key.weight:.2f}" for key in keys)


def _legend() -> str:
    style = "padding:1px 6px;margin-right:4px"
    marks = (_mark("span", name, tone, f"{_ink(tone)};{style}") for name, tone in ROLE_COLOURS.items())
    return f'<div style="line-height:2">{"".join(marks)}</div>'
