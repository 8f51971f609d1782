"""For the API reference: a hook of mkdocs, and links in docstrings."""

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


def on_page_markdown(
    markdown: str, page: Any, config: Any, **kwargs: Any
) -> str:
    """Let a search find guides first; list names; set levels."""
    if not page.file.src_uri.startswith("api/"):
        return markdown
    page.meta.setdefault("search", {"boost": 0.5})
    if page.file.src_uri == "api/index.md":
        return f"{markdown}\n| page | names |\n| --- | --- |\n" + "".join(
            _row(PAGES[0].parent / name.removeprefix("api/"))
            for name in _pages(config["nav"])
            if name.startswith("api/") and name != "api/index.md"
        )
    if not re.search(r"^## ", markdown, re.M):
        return markdown
    deeper = r"\g<0>\n    options:\n      heading_level: 3"
    return re.sub(r"^::: \S+$", deeper, markdown, flags=re.M)


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in _pages(part)]


def _row(page: Path) -> str:
    text = page.read_text("utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    names = re.findall(r"^::: (\S+)$", text, re.M)
    links = [f"[`{name.rpartition('.')[2]}`][{name}]" for name in names]
    return f"| [{title}]({page.name}) | {', '.join(links)} |\n"


class ReferenceLinks(griffe.Extension):
    """Makes links of public names in docstrings."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Put the links into one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"(?<![`\[])`(\w+)`(?!`)", _link, obj.docstring.value
            )


def _link(found: re.Match[str]) -> str:
    target = ENTRIES.get(found[1])
    return f"[`{found[1]}`][{target}]" if target else found[0]
