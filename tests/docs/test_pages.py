"""What a reader may copy runs as it stands: the README's quick start, marked blocks, examples and tutorials.

A block in docs/ that stands under `<!-- run -->` is a whole script; the one under `<!-- output -->` after it is exactly
what it prints. The ```pycon blocks of a page are one session, from its first line to its last; after
`<!-- session: catalogue.md -->` they go on where that page's first block ends. All blocks of a tutorial are one script.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlvec.connectors import catalogue
from tests.docs.warm import WarmInterpreter, environ_of_scripts

# --- The README, marked blocks, sessions, examples


ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONNECTORS = sorted((DOCS / "connectors").glob("*.md"))
QUICKSTART = ROOT / "examples" / "quickstart.py"
LIBRARIES = (
    "envpool",
    "kaggle_environments",
    "ray",
    "sb3_contrib",
    "stable_baselines3",
    "textarena",
    "tianshou",
    "torchrl",
)
"""What an example may need and `make test` does not install; `make interop` does."""
# Training takes minutes: tests/examples/ runs short versions, and the soak some as they stand.
TRAINING = (
    "ppo_simple_spread",
    "mappo_simple_tag",
    "mappo_rware",
    "mappo_smax",
    "league_hex",
    "maddpg_simple_spread",
    "qmix_simple_spread",
    "selfplay_connect_four",
    "selfplay_kuhn",
    "ippo_foraging",
    "ippo_many_machines",
)
SHORT_TRAINING = (
    "bc_simple_spread",
    "cleanrl_ppo",
    "gymnasium_wrappers",
    "iql_simple_spread",
    "pettingzoo_q_learning",
)
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.soak] if path.stem in SHORT_TRAINING else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path != QUICKSTART and path.stem not in TRAINING
]
_BLOCK = re.compile(
    r"^<!-- run -->\n```python\n(?P<code>.*?)^```\n(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```\n)?", re.S | re.M
)
_SESSION = re.compile(r"^<!-- session: (\S+) -->$", re.M)


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


BLOCKS = [
    pytest.param(found["code"], found["output"], id=f"{name_of(page)}-{number}")
    for page in PAGES
    for number, found in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8")), 1)
]


def run(script: Path, folder: Path) -> str:
    """Run a script in a fresh interpreter; it ends well, has nothing to complain about, and its output is returned."""
    ran = subprocess.run([sys.executable, script], cwd=folder, env=environ_of_scripts(), capture_output=True, text=True)
    assert ran.stderr == ""
    assert ran.returncode == 0
    return ran.stdout


def run_text(code: str, folder: Path, warm: WarmInterpreter) -> str:
    """Run code that a reader copies, likewise; in a process of its own that has imported marlvec before."""
    script = folder / "copied.py"
    script.write_text(code, encoding="utf-8")
    ran = warm.run(script)
    assert ran.errors == ""
    assert ran.code == 0
    return ran.output


def sessions(page: Path) -> Iterator[doctest.DocTest]:
    """A page's ```pycon blocks, after those they go on from. All other lines are blank: failures name the page's."""
    text = page.read_text(encoding="utf-8")
    if before := _SESSION.search(text):
        other = page.parent / before[1]
        first = re.search(r"^```pycon\n.*?^```$", other.read_text(encoding="utf-8"), re.S | re.M)
        assert first, f"{page} goes on from {other}, which has no session"
        yield _parse(first[0], other)
    yield _parse(text, page)


def _parse(text: str, page: Path) -> doctest.DocTest:
    lines, inside = [], False
    for line in text.splitlines():
        is_fence = line.startswith("```")
        if is_fence:
            inside = line == "```pycon"
        lines.append(line if inside and not is_fence else "")
    return doctest.DocTestParser().get_doctest("\n".join(lines), {}, page.name, str(page), 0)


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow("runs a program of its own")
def test_the_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", readme(), re.S | re.M)
    assert len(blocks) == 1
    (code,) = blocks
    assert len(code.splitlines()) <= 10
    assert "__main__" not in code
    script = tmp_path / "copied.py"
    script.write_text(code, encoding="utf-8")
    lines = run(script, tmp_path).splitlines()
    assert lines[0] == "MultiAgentBatch: 4096 env steps, 12288 agent steps"
    assert [line.split()[:2] for line in lines[2:]] == [["main", "12288"]]


def test_the_readme_begins_with_what_pypi_shows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    title, _, sentence, *_ = readme().splitlines()
    assert title == "# marlvec"
    assert sentence == project["description"]
    assert len(sentence) <= 120


def test_links_of_the_readme_lead_somewhere_in_a_clone() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", readme())
    assert len(targets) >= 10
    for target in targets:
        path, _, anchor = target.partition("#")
        assert "://" not in target, f"{target}: a relative link works on any host"
        assert (ROOT / path).exists(), target
        assert not anchor or anchor in anchors(ROOT / path), target


def test_every_row_of_the_comparison_says_where_its_answers_come_from() -> None:
    (table,) = re.findall(r"^\| \| marlvec \|(?:.*\n\|)*.*", readme(), re.M)
    rows = re.findall(r"^\| (\w.*?) \|", table, re.M)
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    titles = [title.removeprefix("The ").lower() for title in re.findall(r"^\*\*(.*?)\.\*\*", page, re.M)]
    assert len(rows) >= 12
    assert [row for row in rows if not any(row.lower().startswith(title) for title in titles)] == []


def anchors(page: Path) -> set[str]:
    """What mkdocs calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.slow("runs a program of its own")
@pytest.mark.parametrize(("code", "output"), BLOCKS)
def test_a_page_says_what_its_code_prints(code: str, output: str | None, tmp_path: Path, warm: WarmInterpreter) -> None:
    printed = [line.rstrip() for line in run_text(code, tmp_path, warm).rstrip().splitlines()]
    assert printed == (output or "").splitlines()


def test_code_on_a_page_fits_a_small_window() -> None:
    """75 columns, and a prompt, fit between the sidebars at 1280 px; what is printed breaks where it must."""
    for page in PAGES:
        for language, code in re.findall(
            r"^```(python|pycon)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M
        ):
            source = [line for line in code.splitlines() if language == "python" or line.startswith((">>> ", "... "))]
            assert [line for line in source if len(line) > 75 + 4 * (language == "pycon")] == [], page


def test_a_diagram_on_a_page_fits_a_small_window() -> None:
    """A line of one that breaks takes the whole apart; what is just printed may break."""
    for page in PAGES:
        for diagram in re.findall(r"^```text\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M):
            if re.search("[│├└┌]|──", diagram):
                assert [line for line in diagram.splitlines() if len(line) > 79] == [], page


def test_there_is_no_marker_that_marks_nothing() -> None:
    for page in PAGES:
        if page.parent.name == "tutorials":  # tests/docs/test_pages.py runs them
            continue
        text = page.read_text(encoding="utf-8")
        found = list(_BLOCK.finditer(text))
        assert text.count("<!-- run -->") == len(found), page
        assert text.count("<!-- output -->") == sum(block["output"] is not None for block in found), page
    assert len(BLOCKS) >= 8


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```pycon" in page.read_text(encoding="utf-8")], ids=name_of
)
def test_a_session_on_a_page_goes_as_it_says(page: Path) -> None:
    said: list[str] = []
    names: dict[str, object] = {}
    for part in sessions(page):
        part.globs = names
        failed, _ = doctest.DocTestRunner(verbose=False).run(part, out=said.append, clear_globs=False)
        assert not failed, "".join(said)


@pytest.mark.parametrize("name", [row.name for row in catalogue()])
def test_every_connector_has_an_example(name: str) -> None:
    (page,) = [page for page in CONNECTORS if f"\n**`{name}`** " in page.read_text(encoding="utf-8")]
    (*_, own) = sessions(page)
    assert any(re.search(rf"\b{name}\(", example.source) for example in own.examples)


@pytest.mark.slow("runs a program of its own")
@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_runs_as_it_stands(path: Path, tmp_path: Path) -> None:
    for name in LIBRARIES:
        if re.search(rf'^ *(?:import|from) {name}\b|"{name}/', path.read_text(encoding="utf-8"), re.M):
            pytest.importorskip(name, exc_type=ImportError)
    assert run(path, tmp_path).strip()


@pytest.mark.slow("runs a program of its own")
def test_the_quickstart_shows_shapes_and_batches(tmp_path: Path) -> None:
    printed = run(QUICKSTART, tmp_path)
    assert "obs (16, 3, 18) float32, rewards (16, 3), terminated (16, 3)" in printed
    assert re.search(r"  learner  4000 +[\d.]+ MB  obs, actions, actions_for_env", printed)
    assert "  obs               float32  (4000, 75)" in printed
    # 2000 env steps in 16 envs are 125 steps each: five episodes of 25, of two agents.
    assert "160 of its rows are ends; the first: env 0, t 24" in printed


def test_links_between_pages_lead_somewhere() -> None:
    for page in (ROOT / "CONTRIBUTING.md", *PAGES):
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("command", ["make demo", "make test", "make help", "make docs"])
def test_a_command_of_the_readme_is_a_target(command: str) -> None:
    assert command in readme()
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


# --- The tutorials: each page's blocks are one script, from the first to the last, and print what the page says


TUTORIALS = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index")
NEEDS = {
    "league": ("torch", "pygame"),
    "many_machines": ("torch",),
    "native_env": ("numba",),
    "offline": ("torch", "pyarrow", "numba"),
    "ppo": ("torch", "matplotlib"),
    "simulator": ("websockets", "msgpack"),
}
_TUTORIAL_BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```python\n(?P<code>.*?)^```\n"
    r"(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```\n)?",
    re.S | re.M,
)


@pytest.mark.slow("runs a program of its own")
@pytest.mark.time_limit(600)  # trainings
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page: Path, tmp_path: Path, warm: WarmInterpreter) -> None:
    for library in NEEDS.get(page.stem, ()):
        pytest.importorskip(library)
    text, script, said = page.read_text(encoding="utf-8"), "", ""
    for block in _TUTORIAL_BLOCK.finditer(text):
        if block["file"]:  # stands beside the script, under that name
            (tmp_path / block["file"]).write_text(block["code"], encoding="utf-8")
        else:
            script += block["code"] + "\n"
            said += block["output"] or ""
    assert text.count("```python\n") == len(_TUTORIAL_BLOCK.findall(text)) >= 3
    assert text.count("<!-- output -->") == sum(bool(block["output"]) for block in _TUTORIAL_BLOCK.finditer(text))
    (tmp_path / "tutorial.py").write_text(script, encoding="utf-8")
    ran = warm.run(tmp_path / "tutorial.py")
    assert ran == (0, said, "")
    for name in re.findall(r'savefig\("(.*?)"', script):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_there_are_eight_and_the_first_page_leads_to_each() -> None:
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text(encoding="utf-8")
    assert len(TUTORIALS) == 8
    for page in TUTORIALS:
        assert f"]({page.name})" in index
