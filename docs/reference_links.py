"""For the API reference: a hook of mkdocs, and an extension of mkdocstrings.

The extension makes links of public names in docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

PAGES = sorted((Path(__file__).resolve().parent / "api").glob("*.md"))
ENTRIES = {
    name.rpartition(".")[2]: name
    for page in PAGES
    for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M)
    if name.rpartition(".")[2] != "make"  # there are two
    and not name.split(".")[-2][0].isupper()  # a method
}


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> None:
    """Let a search find guides before the reference."""
    if page.file.src_uri.startswith("api/"):
        page.meta.setdefault("search", {"boost": 0.5})


class ReferenceLinks(griffe.Extension):
    """Changes docstrings as they are read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the links into one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"(?<![`\[])`(\w+)`(?!`)", _link, obj.docstring.value
            )


def _link(found: re.Match[str]) -> str:
    target = ENTRIES.get(found[1])
    return f"[`{found[1]}`][{target}]" if target else found[0]
