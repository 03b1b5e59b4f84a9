"""A page of its own: one HTML file with its style, its scripts and its data inside, which loads nothing.

A content security policy forbids the network, and allows the file's own scripts by their digests only: what an id or an error holds
can't become one. The data is JSON in which every ``<`` is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources

import msgspec

_FILES = resources.files("tracekv.views") / "page"
_encode = msgspec.json.Encoder(enc_hook=str).encode


def page(title: str, scripts: Sequence[str], data: object) -> bytes:
    """The whole file.

    Args:
        title: What the browser calls it.
        scripts: Names of files of :mod:`tracekv.views.page`, run in this order.
        data: What they show; anything msgspec encodes.
    """
    style = _read("page.css")
    script = "\n".join(_read(name) for name in scripts)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; connect-src 'none'; form-action 'none'; base-uri 'none'"
    )
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n',
            f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
            "<noscript><p>This page draws itself: it needs JavaScript, and no network.</p></noscript>\n",
            f'<script type="application/json" id="data">{_safe(_encode(data).decode())}</script>\n',
            f"<script>{script}</script>\n</body>\n</html>\n",
        )
    ).encode()


def _safe(encoded: str) -> str:
    # "<" starts everything that could end the element; in JSON it stands in strings only, where it may be written so.
    return encoded.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
