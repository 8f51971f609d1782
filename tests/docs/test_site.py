"""The site as `make docs` builds it, in Chromium: what overflows, what is too long, links, searches, other hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright")
pytest.importorskip("mkdocs", reason="`make docs` installs what builds the site")
pytest.importorskip("material", reason="likewise")
pytest.importorskip("mkdocstrings", reason="likewise")

from tests.docs import browser

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = browser.find_chromium()


@pytest.mark.time_limit(900)  # half a minute for the site, and more than a hundred pages at two widths
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt install chromium")
def test_the_site_is_built_without_a_warning_and_every_page_fits(tmp_path: Path) -> None:
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
