"""Errors are caught by what users of other libraries catch, and cross processes as what they are."""

from __future__ import annotations

import multiprocessing
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium.error
import pytest

from marlvec import errors
from marlvec.errors import MarlvecError, MissingExtraError, UnknownEnvError
from marlvec.extras import import_extra
from marlvec.making import make

# What an `except` clause of existing code names, and what marlvec raises there.
CAUGHT_BY: list[tuple[type[MarlvecError], tuple[type[BaseException], ...]]] = [
    (errors.BusyError, (gymnasium.error.AlreadyPendingCallError, RuntimeError)),
    (errors.NothingPendingError, (gymnasium.error.NoAsyncCallError, RuntimeError)),
    (errors.ClosedError, (gymnasium.error.ClosedEnvironmentError, RuntimeError)),
    (errors.NotResetError, (gymnasium.error.ResetNeeded, gymnasium.error.Error, RuntimeError)),
    (errors.UnknownEnvError, (gymnasium.error.NameNotFound, gymnasium.error.UnregisteredEnv, LookupError)),
    (errors.MissingExtraError, (gymnasium.error.DependencyNotInstalled, ImportError)),
    (errors.FetchTimeout, (TimeoutError, multiprocessing.TimeoutError)),
    (errors.ArgumentError, (ValueError,)),
    (errors.ActionError, (ValueError,)),
    (errors.ContractError, (ValueError,)),
    (errors.EnvContractError, (ValueError, RuntimeError)),
    (errors.EnvFault, (RuntimeError,)),
    (errors.EnvRaised, (RuntimeError,)),
    (errors.EnvArgumentError, (RuntimeError, TypeError)),
    (errors.EnvTimeout, (RuntimeError, TimeoutError)),
    (errors.WorkerDied, (RuntimeError,)),
    (errors.CheckpointError, (RuntimeError,)),
    (errors.RegistryError, (RuntimeError,)),
    (errors.ProtocolError, (ConnectionError, OSError)),
    (errors.RefusedError, (RuntimeError,)),
    (errors.DriverGone, (RuntimeError,)),
    (errors.RemoteCause, (RuntimeError,)),
]
OTHER_ARGUMENTS: dict[type[MarlvecError], tuple[Any, ...]] = {
    errors.CheckpointError: ("a.npz", "what is wrong"),
    errors.RefusedError: ("what is wrong", "token"),
    errors.CollectorDied: ("gone", 3),
    errors.CollectorTimeout: ("late", 3),
    errors.BusyError: ("what is wrong", "step"),
    errors.NothingPendingError: ("what is wrong", "reset"),
}
ALL = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, MarlvecError) and found.__module__ == errors.__name__
]


@pytest.mark.parametrize(("ours", "theirs"), CAUGHT_BY)
def test_what_users_catch(ours: type[MarlvecError], theirs: tuple[type[BaseException], ...]) -> None:
    for kind in theirs:
        with pytest.raises(kind, match="what is wrong$") as caught:
            raise ours(*OTHER_ARGUMENTS.get(ours, ("what is wrong",)))
        assert isinstance(caught.value, MarlvecError)


def test_every_error_has_a_base_that_users_know() -> None:
    only_ours = [
        kind
        for kind in ALL
        if not issubclass(kind, (ValueError, RuntimeError, TypeError, OSError, ImportError, LookupError))
    ]
    assert only_ours == [MarlvecError]


def test_the_documented_tree_has_every_error_and_its_other_bases() -> None:
    assert errors.__doc__ is not None
    lines = {name: bases or "" for name, bases in re.findall(r"(?m)^[ │├└─]*(\w+)(?: \(([\w., ]+)\))?", errors.__doc__)}
    for kind in ALL:
        shown = [base.rpartition(".")[2] for base in lines[kind.__name__].split(", ") if base]
        assert shown == [base.__name__ for base in kind.__bases__[1:]], kind


def test_errors_do_not_say_which_library_they_are_of() -> None:
    """A clause for one of Gymnasium's catches no other of ours."""
    theirs = [kind for _, kinds in CAUGHT_BY for kind in kinds if kind.__module__ == "gymnasium.error"]
    for kind in {*theirs} - {gymnasium.error.Error, gymnasium.error.UnregisteredEnv}:
        assert len([ours for ours in ALL if issubclass(ours, kind)]) == 1, kind


def _told(error: BaseException) -> tuple[Any, ...]:
    return type(error), str(error), error.args, vars(error)


@pytest.mark.parametrize("kind", ALL)
def test_pickles(kind: type[MarlvecError]) -> None:
    error = kind(*OTHER_ARGUMENTS.get(kind, ("what is wrong",)))
    assert _told(pickle.loads(pickle.dumps(error))) == _told(error)


def test_across_processes() -> None:
    """What knows nothing of marlvec but the pickle gives back errors of the same classes."""
    given = [kind(*OTHER_ARGUMENTS.get(kind, ("what is wrong",))) for kind in ALL]
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"
    path = {"PYTHONPATH": str(Path(errors.__file__).parent.parent)}
    back = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(given), env=path, capture_output=True, check=True
    )
    assert [_told(error) for error in pickle.loads(back.stdout)] == [_told(error) for error in given]


def test_make_raises_what_gymnasium_would() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="no_such_env") as caught:
        make("no_such_env")
    assert isinstance(caught.value, UnknownEnvError)
    with pytest.raises(gymnasium.error.DependencyNotInstalled, match="no_such_library") as missing:
        import_extra("no_such_library", "this test", "nothing")
    assert isinstance(missing.value, MissingExtraError)


OLD_ENV = """
import pettingzoo.utils
from pettingzoo.utils import agent_selector

class Moved:
    def __init__(self):
        agent_selector(["a"])

class Broken:
    def __init__(self):
        raise KeyError("no such option")
"""


@pytest.mark.parametrize("backend", ["sync", "async"])
@pytest.mark.parametrize(
    ("requires", "kind", "words"),
    [
        (
            ["gymnasium<1.0,>=0.28", "pettingzoo (==1.24.3)", "torch", "gym ; extra == 'old'"],
            "Broken",
            r"old-env 0\.3 raised\. It requires gymnasium <1\.0,>=0\.28, pettingzoo ==1\.24\.3; installed: gymnasium "
            r"[\d.]+, pettingzoo .*; where these differ, pin what it was made for: pip install 'gymnasium<1\.0,"
            r">=0\.28' 'pettingzoo==1\.24\.3'\.",
        ),
        (["pettingzoo[classic]"], "Broken", "It requires pettingzoo of any version; .*it names no versions"),
        (["pettingzoo"], "Moved", r"since PettingZoo 1\.25 .* = pettingzoo\.utils\.AgentSelector\."),
    ],
)
def test_a_constructor_that_raises_names_its_package_and_what_to_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, requires: list[str], kind: str, words: str
) -> None:
    (tmp_path / "old_env.py").write_text(OLD_ENV)
    about = tmp_path / "old_env-0.3.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: old-env", "Version: 0.3", *(f"Requires-Dist: {one}" for one in requires)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (about / "RECORD").write_text("old_env.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.EnvRaised, match=words):
        make(f"old_env:{kind}", 2, backend=backend)
    sys.modules.pop("old_env", None)


def test_a_constructor_of_the_users_own_file_that_raises_names_no_package(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OLD_ENV)
    with pytest.raises(errors.EnvRaised, match="no such option") as caught:
        make(f"{tmp_path / 'mine.py'}:Broken", 1, backend="sync")
    assert "It requires" not in str(caught.value)
