"""The reference in docs/api has every public name once, and every public name says what it takes and gives."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

griffe = pytest.importorskip("griffe")

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("marlvec", "marlvec.errors", "marlvec.connectors", "marlvec.selfplay", "marlvec.external", "marlvec.testing")
VIEWS = ["cleanrl", "gymnasium", "pettingzoo", "pufferlib", "rllib", "sb3", "supersuit", "tianshou", "torch", "torchrl"]
# Made by marlvec alone: nobody calls their constructors.
MADE_BY_MARLVEC = {"marlvec.VectorEnv", "marlvec.VectorStep", "marlvec.selfplay.WinRate"}
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
    listed = {re.sub(r"(\.learner)?\.(\w+)\.\2$", r".\2", name) for name in entries()}
    assert sorted(set(public_names()) - listed) == []
    assert sorted(listed - set(public_names())) == []
    assert len(entries()) == len(set(entries()))


def test_every_public_name_says_what_it_takes_and_gives() -> None:
    missing = {name: what for name in sorted(entries()) if (what := lacks(name))}
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
    if thing.is_class and not name.startswith("marlvec.interop."):  # views: their library says it of its methods
        for method in methods_of(thing):
            versions = versions_of(method, thing)
            if not any(each.docstring is not None and _ELSEWHERE.search(each.docstring.value) for each in versions):
                # What a base says counts, and so does a parameter's name in the text.
                known = WELL_KNOWN.union(*(described_by(each) | words_of(each) for each in versions))
                missing += [f"{method.name}: {each}" for each in parameters_of(method) if each not in known]
    return missing


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
