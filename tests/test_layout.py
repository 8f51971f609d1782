"""The layout: what stands at the top, how large a folder and a file may be, and what may be imported.

(import-linter checks the floors; here is what it cannot see.)
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "marlvec",
    "connectors",
    "tests",
    "examples",
    "docs",
    "benchmarks",
    "findings",
    "Makefile",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
}
MAX_LINES = 1_000
MIN_LINES = 60
PUBLIC_MODULES = r"marlvec/(errors|registry|interop/(?!rows)\w+)\.py"
SMALL = {
    "marlvec/arguments.py": "a floor of its own: checks of arguments, imports nothing",
    "marlvec/__main__.py": "python -m marlvec",
    "marlvec/cli/__main__.py": "python -m marlvec.cli",
    "marlvec/envs/grids/foraging.py": "imports lbforaging, an extra",
    "marlvec/envs/grids/warehouse.py": "imports rware, an extra",
    "marlvec/native/mpe/scenarios/simple.py": "a scenario a file",
    "marlvec/native/rng_streams.py": "numpy alone, while the kernels beside it import numba",
    "marlvec/vector/watch.py": "imports numba, an extra",
}
"""Modules that are shorter than a theme, each with the reason why it is a file."""
# `__init__` files re-export and do nothing else; but one also refuses to be imported under another name, and the root
# imports its names when they are used.
ALSO = ("marlvec/connectors/__init__.py", "marlvec/__init__.py")


def package_files() -> list[str]:
    """Every module of marlvec, connectors included, as a path from the root."""
    found: list[str] = []
    for folder, folders, files in os.walk(ROOT / "marlvec", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        found += [str((Path(folder) / name).relative_to(ROOT)) for name in files if name.endswith(".py")]
    return sorted(found)


MODULES = package_files()
INITS = [path for path in MODULES if path.endswith("__init__.py")]


def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def test_the_link_to_connectors_is_there() -> None:
    link = ROOT / "marlvec" / "connectors"
    assert link.is_symlink(), (
        "marlvec/connectors must be a link to ../connectors, or marlvec.connectors cannot be imported from a checkout. "
        "Was this cloned without links? On Windows: `git config core.symlinks true` and check out again, or use WSL. "
        "From an sdist: `ln -s ../connectors marlvec/connectors`."
    )
    assert link.readlink() == Path("../connectors")
    assert (ROOT / "connectors").is_dir()
    assert not (ROOT / "connectors").is_symlink()


def test_connectors_cannot_be_imported_under_a_second_name() -> None:
    command = [sys.executable, "-c", "import connectors"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("ImportError: ")
    assert "marlvec.connectors" in result.stderr.splitlines()[-1]


def test_the_top_level_is_exactly_as_designed() -> None:
    assert [name for name in sorted(TOP_LEVEL) if not (ROOT / name).exists()] == []
    # What git tracks or would add; what it ignores (.venv, site/) is nobody's business.
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode == 0:
        names = {path.partition("/")[0] for path in result.stdout.split("\0") if path}
    else:  # unpacked from an archive, so there is nothing else but what it brought
        names = {path.name for path in ROOT.iterdir()} - {"PKG-INFO"}
    assert sorted(name for name in names if not name.startswith(".") and name not in TOP_LEVEL) == []


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {str(Path(path).parent) for path in MODULES}
    assert sorted(folders) == sorted(str(Path(path).parent) for path in INITS)


def test_a_module_is_a_theme_of_at_most_1_000_lines() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in MODULES}
    long = {path: count for path, count in lines.items() if count > MAX_LINES}
    assert not long, "is there a second theme inside that wants a file of its own?"


def test_a_small_module_has_its_reason_in_the_table() -> None:
    lines = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in MODULES if path not in INITS}
    small = {path.replace("marlvec/connectors/", "connectors/") for path, count in lines.items() if count < MIN_LINES}
    assert small == set(SMALL), "which theme does it belong to?"


def test_a_private_module_has_no_list_of_names() -> None:
    private = [path for path in MODULES if path not in INITS and not re.fullmatch(PUBLIC_MODULES, path)]
    assert [path for path in private if any(map(_is_list_of_names, parse(path).body))] == []


def _is_list_of_names(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and any(ast.unparse(target) == "__all__" for target in node.targets)


def test_an_init_file_re_exports_and_does_nothing_else() -> None:
    other = [(path, node.lineno) for path in INITS for node in parse(path).body if not _is_re_export(node)]
    assert sorted(path for path, _ in other) == sorted(ALSO), other


def _is_re_export(node: ast.stmt) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
            return True
        case ast.AugAssign(target=ast.Name(id="__all__")):
            return True
    return False


@pytest.mark.slow("starts programs of its own")
def test_no_module_imports_the_root() -> None:
    """Names are imported from where they live, or every import of one would be an import of all, and in a circle."""
    roots = [f"{path}:{line}: {text}" for path in MODULES for line, text in _imports_of_the_root(path)]
    assert roots == []


def test_no_module_is_imported_by_its_name_in_a_text() -> None:
    """That would be a way round import-linter, which sees no circle there. The names of the root are a table."""
    calls = [f"{path}: {ast.unparse(node)}" for path in MODULES for node in ast.walk(parse(path)) if _names_ours(node)]
    assert calls == []


def _names_ours(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node).startswith(
        ("importlib.import_module('marlvec", "import_module('marlvec")
    )


def _imports_of_the_root(path: str) -> Iterator[tuple[int, str]]:
    package = Path(path).with_suffix("").parts[:-1]
    submodules = {path.name.removesuffix(".py") for path in (ROOT / "marlvec").iterdir()}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import) and any(alias.name == "marlvec" for alias in node.names):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (above, node.module)))
            if source == "marlvec" and not all(alias.name in submodules for alias in node.names):
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    ("path", "code", "found"),
    [
        ("marlvec/vector/vector_env.py", "import marlvec", 1),
        ("marlvec/vector/vector_env.py", "import marlvec as m", 1),
        ("marlvec/vector/vector_env.py", "def f():\n    from marlvec import make", 1),
        ("marlvec/vector/vector_env.py", "from .. import make", 1),
        ("marlvec/making.py", "from . import make", 1),
        ("marlvec/vector/vector_env.py", "from . import shard\nfrom .shard import Shard", 0),
        ("marlvec/vector/vector_env.py", "from marlvec import errors\nfrom marlvec.errors import MarlvecError", 0),
        ("marlvec/vector/vector_env.py", "import marlvec.errors\nimport marlvecs", 0),
    ],
)
def test_imports_of_the_root_are_found(path: str, code: str, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.parse", lambda _: ast.parse(code))
    assert len(list(_imports_of_the_root(path))) == found
