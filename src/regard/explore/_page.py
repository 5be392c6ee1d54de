"""The files of the page, and the page as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib import resources
from typing import Any

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
IMPORT = re.compile(r'^import \{ ([\w, ]+) \} from "\./(\w+)\.js";$', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.M)
STYLE = '<link rel="stylesheet" href="style.css">'
SCRIPT = '<script type="module" src="main.js"></script>'
POLICY = (
    "default-src 'none'; script-src '{script}'; style-src '{style}'; img-src data:; worker-src blob:; "
    "base-uri 'none'; form-action 'none'"
)
UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


@cache
def files() -> dict[str, str]:
    """Returns a dict from the page's file names to their contents.

    The server looks requested names up in this dict, so it never builds a path from a request.
    """
    folder = resources.files(__package__) / "page"
    return {
        file.name: file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }


def media_type(name: str) -> str:
    return f"{TYPES[name.rpartition('.')[2]]}; charset=utf-8"


def single(data: dict[str, Any]) -> str:
    """Returns the page as one HTML text, with styles, scripts and data inlined."""
    style, script = files()["style.css"], bundle("main")
    policy = POLICY.format(script=_hash(script), style=_hash(style))
    body = (
        f'<script type="application/json" id="data">{escaped(data)}</script>\n'
        f'<script type="application/json" id="worker">{escaped(bundle("worker"))}</script>\n'
        f'<script type="module">{script}</script>'
    )
    page = files()["index.html"]
    page = page.replace(STYLE, f"<style>{style}</style>").replace(SCRIPT, body)
    return page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )


def escaped(value: Any) -> str:
    """Returns a value as ASCII JSON that is safe inside a script element.

    The JSON can neither end the element nor open a comment.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(UNSAFE)


def bundle(name: str) -> str:
    """Returns one script that contains a JavaScript module and all its imports.

    Each module is wrapped in a function.
    """
    order: list[str] = []
    _visit(name, order)
    return "".join(_wrapped(module) for module in order)


def _visit(name: str, order: list[str]) -> None:
    """Appends a module's imports to `order`, then the module. Import cycles are not allowed."""
    for _, imported in IMPORT.findall(files()[f"{name}.js"]):
        if imported not in order:
            _visit(imported, order)
    order.append(name)


def _wrapped(name: str) -> str:
    text = files()[f"{name}.js"]
    exported = ", ".join(EXPORT.findall(text))
    text = EXPORT.sub("", IMPORT.sub(r"const { \1 } = module_\2;", text))
    return f"const module_{name} = (() => {{\n{text}return {{ {exported} }};\n}})();\n"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
