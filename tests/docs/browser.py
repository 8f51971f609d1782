"""The built site in Chromium, as a reader sees it: what overflows, what is too long, where links and search lead, and
what it loads from elsewhere.

    python -m tests.docs.browser site       what `make docs` runs; says where there is no Chromium, and goes on

Pages are opened from the disk (``file:``), so all of this holds without a server, too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urldefrag

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
LONGEST = 12_000  # px, at the desktop's width
# What a reader types, and a word that the title of the first hit must have, or its page's.
SEARCHES = {
    "final observation": "observation",
    "timeout": "Timeout",
    "RLlib": "RLlib",
    "self-play": "Self-play",
    "checkpoint": "heckpoint",
}
_TOO_WIDE = """() => [...document.querySelectorAll('article :is(pre, pre > code, table, img, svg)')]
    .filter(box => box.scrollWidth > box.clientWidth + 1 || box.getBoundingClientRect().right
                   > box.closest('article').getBoundingClientRect().right + 1)
    .map(box => (box.tagName.toLowerCase() + ' ' + box.innerText?.trim().slice(0, 60)).replaceAll('\\n', ' '))"""
_LINKS = "() => [...document.querySelectorAll('a[href]')].map(link => link.href)"
_IDS = "() => [...document.querySelectorAll('[id]')].map(part => part.id)"


@dataclass
class Look:
    """What was seen of one page.

    Attributes:
        height: Pixels, at the desktop's width.
        too_wide: Blocks of code, tables and pictures that stick out, or scroll, at the desktop's width.
        phone_width: Pixels that the page is wide on a phone.
        links: Absolute targets of its links.
        ids: Its anchors.
        foreign: Addresses outside of the site that it loads something from.
    """

    height: int
    too_wide: list[str]
    phone_width: int
    links: list[str]
    ids: set[str]
    foreign: list[str]


def find_chromium() -> str | None:
    """The browser that apt installs, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser_page(executable: str) -> Iterator[Page]:
    """A page of a browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport=DESKTOP)
            page.add_init_script("sessionStorage.clear()")  # each page as the first one that a reader opens
            yield page
        finally:
            browser.close()


@contextmanager
def foreign_requests(page: Page) -> Iterator[list[str]]:
    """Collect the addresses of requests that leave the disk; without a network they fail, and are collected, too."""
    found: list[str] = []

    def note(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            found.append(request.url)

    page.on("request", note)
    try:
        yield found
    finally:
        page.remove_listener("request", note)


def look(page: Page, file: Path) -> Look:
    """Open a page of the site at both widths."""
    page.set_viewport_size(DESKTOP)
    with foreign_requests(page) as foreign:
        page.goto(file.as_uri())
        height = page.evaluate("() => document.documentElement.scrollHeight")
        too_wide = page.evaluate(_TOO_WIDE)
        links, ids = page.evaluate(_LINKS), set(page.evaluate(_IDS))
        page.set_viewport_size(PHONE)
        width = page.evaluate("() => document.documentElement.scrollWidth")
    return Look(height, too_wide, width, links, ids, foreign)


def first_hit(page: Page, site: Path, words: str) -> str:
    """The titles of the first page that the search finds: the page's, and that of its part found."""
    page.set_viewport_size(DESKTOP)
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").click()
    page.wait_for_function("() => document.querySelector('.md-search-result__meta').innerText.includes('Type')")
    page.locator(".md-search__input").press_sequentially(words)
    hit = page.locator(".md-search-result__item").first
    hit.wait_for(state="attached", timeout=20_000)
    return " / ".join(hit.locator("h1, h2").all_inner_texts())


def faults_of(site: Path, looks: dict[Path, Look]) -> list[str]:
    """What is wrong with the pages that were looked at."""
    faults = []
    for file, seen in looks.items():
        name = file.relative_to(site).as_posix()
        faults += [f"{name}: loads from another host: {url}" for url in sorted(set(seen.foreign))]
        faults += [f"{name}: too wide at {DESKTOP['width']} px: {box}" for box in seen.too_wide]
        if seen.height > LONGEST:
            faults.append(f"{name}: {seen.height} px long; {LONGEST} are allowed")
        if seen.phone_width > PHONE["width"]:
            faults.append(f"{name}: scrolls sideways at {PHONE['width']} px: {seen.phone_width} px wide")
        for link in sorted(set(seen.links)):
            path, anchor = urldefrag(link)
            if not path.startswith("file:"):
                continue
            target = Path(unquote(path.removeprefix("file://").partition("?")[0]))
            if not target.exists():
                faults.append(f"{name}: leads nowhere: {link}")
            elif anchor and target in looks and unquote(anchor) not in looks[target].ids | {"__codelineno"}:
                faults.append(f"{name}: no such anchor: {link}")
    return faults


def inspect(site: Path, executable: str) -> tuple[dict[Path, Look], list[str]]:
    """Look at every page of a site, and search it.

    Args:
        site: The folder that mkdocs built.
        executable: The browser.

    Returns:
        What was seen of each page, and what is wrong.
    """
    site = site.resolve()
    files = sorted(file for file in site.rglob("*.html") if file.name != "404.html")
    with browser_page(executable) as page:
        looks = {file: look(page, file) for file in files}
        faults = faults_of(site, looks)
        for words, expected in SEARCHES.items():
            with foreign_requests(page) as foreign:
                found = first_hit(page, site, words)
            if expected not in found:
                faults.append(f"search for {words!r} finds first: {found!r}")
            faults += [f"search for {words!r} loads from another host: {url}" for url in foreign]
    return looks, faults


def main(arguments: list[str] | None = None) -> int:
    """Say what is wrong with a site.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("site", type=Path)
    parser.add_argument("--heights", action="store_true", help="list the pages by their length")
    args: Any = parser.parse_args(arguments)
    executable = find_chromium()
    if executable is None:
        print("no Chromium here (apt install chromium): nobody has looked at the pages", file=sys.stderr)
        return 0
    looks, faults = inspect(args.site, executable)
    if args.heights:
        for file, seen in sorted(looks.items(), key=lambda item: -item[1].height):
            print(f"{seen.height:6} px  {file.relative_to(args.site.resolve())}")
    print(*faults, sep="\n")
    print(f"{len(looks)} pages looked at, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
