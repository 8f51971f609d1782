"""The command lines of examples/: the same flags, help at once, runs that go on, and what is missing in a line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, checkpoint, run

SCRIPTS = [path for path in sorted(EXAMPLES.glob("*.py")) if '"--checkpoint"' in path.read_text(encoding="utf-8")]
"""Those that learn."""
FLAGS = ("--seed", "--total-timesteps", "--num-envs", "--checkpoint", "--resume", "--track")
LARGE = ("torch", "numpy", "marlvec", "gymnasium", "matplotlib", "ray", "stable_baselines3", "tianshou", "torchrl")
EXTRAS = tomllib.loads((EXAMPLES.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

ALL = """
import contextlib, io, json, runpy, sys
paths, arguments, hidden = json.loads(sys.argv[1])
for name in hidden:
    sys.modules[name] = None
found = {}
for path in paths:
    sys.argv = [path, *arguments]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as exit:
            found[path] = [said.getvalue(), exit.code]
print(json.dumps([found, [name for name in sys.modules if sys.modules[name]]]))
"""

# A first run and one that goes on, as short as they can be: env steps (or rows, or moves) of each, and further flags.
SHORT: dict[str, tuple[int, int, tuple[object, ...]]] = {
    "cleanrl_ppo": (600, 1_200, ("--num-envs", 4)),
    "ippo_many_machines": (200, 400, ("--num-envs", 4, "--backend", "sync")),
    "gymnasium_wrappers": (400, 800, ("--num-envs", 16)),
    "pettingzoo_q_learning": (24, 48, ("--test-games", 4)),
    "sb3_maskable_connect_four": (256, 512, ("--num-envs", 2)),
    "sb3_ppo_spread": (600, 1_200, ("--num-envs", 4)),
    "torchrl_mappo": (200, 400, ("--num-envs", 4, "--batch", 200)),
}
NEEDS = {"sb3": ("stable_baselines3", "sb3_contrib"), "torchrl": ("torchrl",), "pettingzoo": ("pygame",)}
ELSEWHERE = {
    "ippo_foraging",
    "maddpg_simple_spread",
    "mappo_rware",
    "mappo_simple_tag",
    "ppo_simple_spread",
    "qmix_simple_spread",
    "selfplay_connect_four",
    "selfplay_kuhn",
}
"""Tests of their own in this folder have them go on."""
INTEROP = {"envpool_cartpole", "league_hex", "mappo_smax", "rllib_ppo_spread", "tianshou_ppo"}
"""Of libraries that `make test` does not install."""


def run_all(
    arguments: list[str], hidden: tuple[str, ...] = (), scripts: Sequence[Path] = SCRIPTS
) -> tuple[dict[str, list[object]], set[str]]:
    """What each script said on stdout before it ended, and its exit code; and all modules that were imported."""
    given = json.dumps([[str(path) for path in scripts], arguments, hidden])
    result = subprocess.run([sys.executable, "-c", ALL, given], capture_output=True, text=True, check=True)
    found, modules = json.loads(result.stdout)
    return found, set(modules)


def test_every_script_is_run_by_a_test() -> None:
    assert {path.stem for path in SCRIPTS} == SHORT.keys() | ELSEWHERE | INTEROP


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_can_be_read_at_one_go(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150


def test_help_is_shown_before_anything_large_is_imported() -> None:
    found, modules = run_all(["--help"])
    assert not set(LARGE) & modules
    assert len(found) == len(SCRIPTS) >= 12
    for path, (said, code) in found.items():
        assert code == 0
        for flag in FLAGS:
            # PettingZoo's turns are of one env.
            assert (flag in str(said)) != ("pettingzoo" in path and flag == "--num-envs"), f"{path}: {flag}"
        assert "(default: " in str(said)


@pytest.mark.slow("trains")
def test_what_shows_things_has_help_too_and_runs_at_another_size(tmp_path: Path) -> None:
    shown = [EXAMPLES / f"{name}.py" for name in ("custom_connectors", "quickstart")]
    found, modules = run_all(["--help"], scripts=shown)
    assert not set(LARGE) & modules
    policies = EXAMPLES / "policies.py"  # a module that commands import, too: what it stands on comes first
    found |= run_all(["--help"], scripts=[policies])[0]
    assert len(found) == 3
    for path, (said, code) in found.items():
        assert code == 0, path
        assert {"--seed", "--num-envs"} <= set(re.findall(r"--[\w-]+", str(said)))
    for path in (*shown, policies):
        amount = ("--episodes", "4") if path.stem == "custom_connectors" else ("--total-timesteps", "300")
        command = [sys.executable, path, "--num-envs", "2", "--seed", "1", *amount]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, ""), path


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    found, _ = run_all(["--checkpoint", str(tmp_path / "none")], (*LARGE, "envpool"))
    assert len(found) == len(SCRIPTS)
    for path, (said, line) in found.items():
        assert said == ""
        wanted = re.fullmatch(r".*; this script needs: pip install (?:torch )?'marlvec\[(.*)\]'", str(line))
        assert wanted, f"{path}: {line}"
        assert set(wanted[1].split(",")) <= set(EXTRAS["optional-dependencies"]), path


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    found, modules = run_all(["--checkpoint", str(tmp_path), "--resume"])
    assert {code for _, code in found.values()} == {2}
    (tmp_path / "last.npz").touch()
    found, others = run_all(["--checkpoint", str(tmp_path)])
    assert {code for _, code in found.values()} == {2}
    assert not set(LARGE) & (modules | others)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_plot_says_whose_numbers_it_shows(path: Path) -> None:
    (label,) = re.findall(r'ylabel="(.*?)"', path.read_text(encoding="utf-8"))
    assert re.search(r"\b(team|agent)\b", label), label


@pytest.mark.slow("trains")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchrl warns of itself when it is imported
@pytest.mark.parametrize("name", SHORT)
def test_a_resumed_run_lists_its_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("torch", "tensorboard", "matplotlib", *NEEDS.get(name.split("_")[0], ())):
        pytest.importorskip(library, exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    first, total, more = SHORT[name]
    kept = tmp_path / "kept"
    run(name, "--total-timesteps", first, "--checkpoint", kept, "--track", *more)
    before = checkpoint(kept)["progress"]["curve"]
    run(name, "--total-timesteps", total, "--checkpoint", kept, "--track", "--resume", *more)
    after = checkpoint(kept)["progress"]["curve"]
    assert after[: len(before)] == before
    assert len(after) > len(before)
    *_, last = capsys.readouterr().out.splitlines()
    said = re.fullmatch(rf"wrote (.*) into {re.escape(str(kept))}", last)
    assert said
    assert sorted(said[1].split(", ")) == sorted(path.name for path in kept.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
