"""The reference in docs/api has every public name once, and every public name says what it takes and gives."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
from functools import cache
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    *("marlvec", "marlvec.errors", "marlvec.connectors", "marlvec.selfplay", "marlvec.external", "marlvec.testing"),
    *("marlvec.distributed", "marlvec.recording"),
)
# Of those, what users import.
ENVS = [
    "marlvec.envs.OpenSpielEnv",
    "marlvec.envs.TextArenaEnv",
    "marlvec.envs.ClearDeadStepRewards",
    "marlvec.envs.SeedStream",
]
VIEWS = ["cleanrl", "gymnasium", "pettingzoo", "pufferlib", "rllib", "sb3", "supersuit", "tianshou", "torch", "torchrl"]
# Some of their methods have a page of their own; the class's page leaves these out.
IN_TWO_PAGES = {
    "marlvec.VectorEnv": ("vector_env", "vector_env_calls"),
    "marlvec.Collector": ("collector", "collector_states"),
}
# Made by marlvec alone: their constructors are never called from outside.
MADE_BY_MARLVEC = {
    *("marlvec.VectorEnv", "marlvec.VectorStep", "marlvec.selfplay.WinRate"),
    *("marlvec.recording.Column", "marlvec.recording.RecordedDataset", "marlvec.recording.RecordedRows"),
}
# Parameters of methods that mean the same everywhere.
WELL_KNOWN = {"path", "state", "rows", "slot", "timeout", "indices", "env_ids", "args", "kwargs", "episode_id", "step"}
_ELSEWHERE = re.compile(r"[Aa]s in `|[Ss]ee `|what `\w+` does|that `\w+` ran out of")
EXPORTED = {"marlvec.connectors", "marlvec.errors"}  # modules among the names, which have pages of their own


@cache
def package() -> griffe.Module:
    """What the sources say, read without importing them; takes seconds, so one worker of pytest's should do it."""
    return griffe.load("marlvec", search_paths=[ROOT], docstring_parser="google")


def entries() -> list[str]:
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]


def public_names() -> list[str]:
    names = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    names += ENVS
    for view in VIEWS:  # some of them need libraries that are not here
        names += [f"marlvec.interop.{view}.{name}" for name in exports_of(ROOT / "marlvec" / "interop" / view)]
    return [name for name in names if name not in EXPORTED]


def exports_of(module: Path) -> list[str]:
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    found = re.search(r"^__all__ = (\[.*?\])$", file.read_text(encoding="utf-8"), re.M | re.S)
    assert found
    return ast.literal_eval(found[1])


def found(name: str) -> griffe.Object:
    part = package()[name.removeprefix("marlvec.")]
    return part.final_target if part.is_alias else part


def test_the_reference_has_every_public_name() -> None:
    # RestartQuietly is marlvec's and marlvec.errors'; functions in modules of their own name are found by that.
    names = [name for name in entries() if name.rpartition(".")[0] not in IN_TWO_PAGES]
    listed = {re.sub(r"(\.learner)?\.(\w+)\.\2$", r".\2", name) for name in names}
    assert sorted(set(public_names()) - listed) == []
    assert sorted(listed - set(public_names())) == []
    assert len(entries()) == len(set(entries()))


@pytest.mark.slow("runs a program of its own")
@pytest.mark.parametrize("name", IN_TWO_PAGES)
def test_a_class_in_two_pages_has_each_of_its_methods_on_one(name: str) -> None:
    pages = [(ROOT / "docs" / "api" / f"{page}.md").read_text(encoding="utf-8") for page in IN_TWO_PAGES[name]]
    filters = re.search(r'filters: \["!\^_", "!(.*)"\]', pages[0])
    assert filters
    members = {part for part in found(name).all_members if not part.startswith("_")}
    left_out = {part for part in members if re.search(filters[1], part)}
    assert left_out == {entry.rpartition(".")[2] for entry in re.findall(r"^::: (\S+)$", pages[1], re.M)}
    assert members > left_out


def test_each_page_of_the_reference_begins_with_an_example() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")}
    before = {name: text.partition("\n::: ")[0] for name, text in pages.items() if name != "index"}
    assert [name for name, text in before.items() if "```python" not in text] == []


def test_the_changelog_has_each_release_on_one_page() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("changelog*.md"))
    sections = dict(re.findall(r"--8<-- \[start:(\S+)\] -->\n(.*?)<!-- --8<-- \[end:\1\]", text, re.S))
    shown = re.findall(r'^--8<-- "CHANGELOG.md:(\S+)"$', pages, re.M)
    assert sorted({*shown}) == sorted(sections)
    releases = re.findall(r"^## \[(.*?)\]", text, re.M)
    assert [re.findall(r"^## \[(.*?)\]", section, re.M) for section in sections.values()] == [
        *([each] for each in releases),
        [],
    ]


@pytest.mark.slow("runs a program of its own")
def test_every_public_name_says_what_it_takes_and_gives() -> None:
    names = [name for name in entries() if name.rpartition(".")[0] not in IN_TWO_PAGES]  # as methods of their classes
    missing = {name: what for name in sorted(names) if (what := lacks(name))}
    assert missing == {}, "these lack a docstring, an entry under Args, or Returns"


def lacks(name: str) -> list[str]:
    thing = found(name)
    assert not thing.is_module, f"{name} is a module; the function of that name is {name}.{thing.name}"
    # Envs of marlvec's own tests: what each says of itself is enough.
    if thing.is_attribute or thing.path.startswith("marlvec.testing.scripted"):
        return []
    if thing.docstring is None:
        return ["a docstring"]
    made_here = name in MADE_BY_MARLVEC or thing.path.startswith("marlvec.errors.")
    missing = [] if made_here else [each for each in parameters_of(thing) if each not in described_by(thing)]
    if thing.is_function and str(thing.annotation) != "None":
        missing += [] if "returns" in {part.kind.value for part in thing.docstring.parsed} else ["Returns"]
    for method in methods_of(thing) if thing.is_class else ():
        versions = versions_of(method, thing)
        if any(each.docstring is not None and _ELSEWHERE.search(each.docstring.value) for each in versions):
            continue
        if not name.startswith("marlvec.interop."):  # views: their library says it of its methods
            # What a base says counts, and so does a parameter's name in the text.
            known = WELL_KNOWN.union(*(described_by(each) | words_of(each) for each in versions))
            missing += [f"{method.name}: {each}" for each in parameters_of(method) if each not in known]
        if str(method.annotation) != "None" and not any(says_what_comes(each) for each in versions):
            missing.append(f"{method.name}: Returns")
    return missing


def says_what_comes(thing: griffe.Object) -> bool:
    """Whether there is a Returns (or Yields), or one line, which then says it."""
    if thing.docstring is None:
        return False
    lines = thing.docstring.value.strip().splitlines()
    return len(lines) == 1 or bool({"returns", "yields"} & {part.kind.value for part in thing.docstring.parsed})


def parameters_of(thing: griffe.Object) -> list[str]:
    names = [each.name.lstrip("*") for each in thing.parameters]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def methods_of(thing: griffe.Class) -> list[griffe.Function]:
    members = [each for each in thing.members.values() if each.is_function and not each.is_alias]
    return [each for each in members if not each.name.startswith("_")]


def versions_of(method: griffe.Function, thing: griffe.Class) -> list[griffe.Object]:
    classes = [thing, *thing.mro()]
    return [each.members[method.name] for each in classes if method.name in each.members]


def described_by(thing: griffe.Object) -> set[str]:
    if thing.docstring is None:
        return set()
    parts = [part.value for part in thing.docstring.parsed if part.kind.value in ("parameters", "attributes")]
    return {each.name.lstrip("*") for part in parts for each in part}


def words_of(thing: griffe.Object) -> set[str]:
    return set() if thing.docstring is None else set(re.findall(r"\w+", thing.docstring.value))


def test_only_names_that_mean_one_thing_are_made_links() -> None:
    links = runpy.run_path(str(ROOT / "docs" / "reference_links.py"))["ENTRIES"]
    assert links["VectorEnv"] == "marlvec.VectorEnv"
    assert not {"make", "state", "get_state", "render", "load"} & set(links)
    assert set(links.values()) <= {name for name in entries() if name.rpartition(".")[0] not in IN_TWO_PAGES}
