"""The site in Chromium: pages that overflow, are too long, lead nowhere, or load from other hosts are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")

from tests.docs import browser

# --- `make docs` finds pages that overflow, are too long, lead nowhere, or load from other hosts, in Chromium


CHROMIUM = browser.find_chromium()
PAGE = """<!doctype html><html><head><meta name="viewport" content="width=device-width"><style>
body {{ margin: 0 }} article {{ width: min(700px, 100vw) }} pre {{ overflow: auto }}</style></head>
<body><article id="top">{}</article></body></html>"""
PAGES = {
    "fine.html": "<pre>" + 75 * "x" + '</pre><a href="long.html#top">there</a>',
    "wide.html": "<pre>" + 200 * "x" + "</pre>",
    "table.html": "<table><tr><td>" + 200 * "x" + "</td></tr></table>",
    "long.html": '<div style="height: 12001px"></div>',
    "phone.html": '<div style="width: 400px">wide</div>',
    "asks.html": '<script>setTimeout(() => fetch("https://host.invalid/stars"))</script><img src="data:,">',
    "lost.html": '<a href="nowhere.html">a</a> <a href="fine.html#nowhere">b</a>',
}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt install chromium")
def test_what_is_wrong_with_a_page_is_found(tmp_path: Path) -> None:
    for name, body in PAGES.items():
        (tmp_path / name).write_text(PAGE.format(body), encoding="utf-8")
    assert CHROMIUM is not None
    with browser.browser_page(CHROMIUM) as page:
        looks = {file: browser.look(page, file) for file in sorted(tmp_path.glob("*.html"))}
    faults = browser.faults_of(tmp_path, looks)
    assert [fault.partition(": ")[0] for fault in faults] == [
        *("asks.html", "long.html", "lost.html", "lost.html", "phone.html"),
        *("table.html", "table.html", "wide.html"),
    ]
    assert looks[tmp_path / "asks.html"].foreign == ["https://host.invalid/stars"]
    assert [file.name for file, seen in looks.items() if seen.too_wide] == ["table.html", "wide.html"]


def test_groups_of_the_navigation_are_small() -> None:
    lines = (Path(__file__).resolve().parents[2] / ".mkdocs.yml").read_text(encoding="utf-8").splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("nav:"))
    sizes: dict[str, int] = {}
    groups = {0: "nav"}
    for line in lines[start + 1 :]:
        found = re.match(r"( +)- (.*?)(:?)$", line)
        if not found:
            break
        depth = len(found[1])
        parent = groups[max(each for each in groups if each < depth)]
        sizes[parent] = sizes.get(parent, 0) + 1
        if found[3]:
            groups = {each: name for each, name in groups.items() if each < depth} | {depth: parent + " / " + found[2]}
    assert {"nav", "nav / Start", "nav / API / marlvec, batches"} <= set(sizes)
    assert {name: size for name, size in sizes.items() if size > 10} == {}


# --- The site as `make docs` builds it, in Chromium: what overflows, what is too long, links, searches, other hosts


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.time_limit(900)  # half a minute for the site, and more than a hundred pages at two widths
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt install chromium")
def test_the_site_is_built_without_a_warning_and_every_page_fits(tmp_path: Path) -> None:
    for library in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(library, reason="`make docs` installs what builds the site")
    # From a copy: mkdocs writes beside its configuration, and another build may be going on there.
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", ".mkdocs.yml"):
        shutil.copy(ROOT / name, source)
    for name in ("docs", "connectors", "marlvec"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ".mkdocs.yml", "--site-dir", site]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr[-4000:]
    assert CHROMIUM is not None
    looks, faults = browser.inspect(site, CHROMIUM)
    assert faults == []
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {file.relative_to(site.resolve()) for file in looks} == pages
