"""The tutorials: each page's blocks are one script, from the first to the last, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.warm import WarmInterpreter

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index")
NEEDS = {
    "league": ("torch", "pygame"),
    "many_machines": ("torch",),
    "native_env": ("numba",),
    "offline": ("torch", "pyarrow", "numba"),
    "ppo": ("torch", "matplotlib"),
    "simulator": ("websockets", "msgpack"),
}
_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```python\n(?P<code>.*?)^```\n"
    r"(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```\n)?",
    re.S | re.M,
)


@pytest.mark.slow("runs a program of its own")
@pytest.mark.time_limit(600)  # trainings
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page: Path, tmp_path: Path, warm: WarmInterpreter) -> None:
    for library in NEEDS.get(page.stem, ()):
        pytest.importorskip(library)
    text, script, said = page.read_text(encoding="utf-8"), "", ""
    for block in _BLOCK.finditer(text):
        if block["file"]:  # stands beside the script, under that name
            (tmp_path / block["file"]).write_text(block["code"], encoding="utf-8")
        else:
            script += block["code"] + "\n"
            said += block["output"] or ""
    assert text.count("```python\n") == len(_BLOCK.findall(text)) >= 3
    assert text.count("<!-- output -->") == sum(bool(block["output"]) for block in _BLOCK.finditer(text))
    (tmp_path / "tutorial.py").write_text(script, encoding="utf-8")
    ran = warm.run(tmp_path / "tutorial.py")
    assert ran == (0, said, "")
    for name in re.findall(r'savefig\("(.*?)"', script):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_there_are_eight_and_the_first_page_leads_to_each() -> None:
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert len(PAGES) == 8
    for page in PAGES:
        assert f"]({page.name})" in index
