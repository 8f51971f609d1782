"""A plugin of pytest for runs with a seeded defect: the first find will do, as it is.

    MARLVEC_TEST_DEFECT=truncated_all python -m pytest -x -p tests.defects.plugin tests/faults/test_campaigns.py

Without that variable nothing is changed in marlvec. The exit code is 1 only where a test has told of the defect; where
something else failed, a mistake in the defect perhaps, it is `WRONG`.
"""

from __future__ import annotations

import os
import re
import traceback
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from marlvec.errors import ContractWarning, MarlvecError
from marlvec.vector.async_env import AsyncVectorEnv
from tests.checklist import stable_id
from tests.defects import (  # noqa: F401  (their defects are in the registry then)
    collect,
    connectors,
    distributed,
    external,
    interop,
    native,
    pools,
    selfplay,
    states,
)
from tests.defects.registry import DEFECTS, FINDERS, VARIABLE, WRONG
from tests.defects.worker import Loop, put_in
from tests.faults.harness.machine import Hung
from tests.properties import canaries  # noqa: F401  (likewise)

# --- What tells of a defect, and what of a mistake in the defect itself


CAUGHT = (AssertionError, pytest.fail.Exception, MarlvecError, ContractWarning, Hung)
"""Whatever else a test fails with is a mistake in the defect."""

MISTAKES = (AttributeError, NameError, TypeError)
"""The same where they have happened in a worker, and an error above tells of them."""

_LAST_FRAME_IS_OURS = re.compile(
    r'  File "[^"\n]*/tests/(?:defects|properties)/(?!test_)\w+\.py", line \d+, in .*\n'
    r"(?:    .*\n)*"  # the line itself, and what Python marks below it
    rf"(?:{'|'.join(error.__name__ for error in MISTAKES)})\b"
)


def is_find(error: BaseException, said: str = "") -> bool:
    """Whether a failed test tells of a defect.

    Args:
        error: What it failed with.
        said: What it and its workers have written; a worker that ends by an exception writes it there.
    """
    if isinstance(error, BaseExceptionGroup):  # of Hypothesis: what was found does not happen in every run
        return any(is_find(found, said) for found in error.exceptions)
    if type(error).__name__ == "_WrappedBaseException" and error.__cause__ is not None:  # Hypothesis's, in such a group
        return is_find(error.__cause__, said)
    if isinstance(error, KeyError) and _is_ours(error):
        return True  # a table of marlvec's does not know, e.g., a way from this state
    if not isinstance(error, CAUGHT) or isinstance(error.__cause__, MISTAKES):
        return False
    return not _LAST_FRAME_IS_OURS.search(f"{said}\n{error}")


def _is_ours(error: KeyError) -> bool:
    """Whether it is of a table of transitions, or was raised in marlvec, and not in a defect."""
    frames = traceback.extract_tb(error.__traceback__)
    is_in_marlvec = bool(frames) and "/marlvec/" in frames[-1].filename and "/tests/" not in frames[-1].filename
    return is_in_marlvec or any(isinstance(state, Enum) for state in error.args)


# --- The plugin


_found = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """After tests/conftest.py has loaded its own profile."""
    seed = session.config.getoption("--hypothesis-seed")
    settings.register_profile(
        "hunt",
        settings(),
        phases=[Phase.explicit, Phase.generate],  # no shrinking
        database=None,
        derandomize=seed is None,  # as in CI
        report_multiple_bugs=False,
    )
    settings.load_profile("hunt")
    # What tests of a defect come to is not how they end otherwise.
    if session.config.pluginmanager.has_plugin("marlvec-checklist"):
        session.config.pluginmanager.unregister(name="marlvec-checklist")
    if name := os.environ.get(VARIABLE):
        if DEFECTS[name].in_workers:
            give_to_workers(name)
        put_in(name)


def give_to_workers(name: str) -> None:
    """Let every worker begin with the defect."""
    make = AsyncVectorEnv.__init__

    def with_loop(envs: AsyncVectorEnv, *args: Any, **options: Any) -> None:
        make(envs, *args, **options | ({} if options.get("worker") else {"worker": Loop(name)}))

    AsyncVectorEnv.__init__ = with_loop  # type: ignore[method-assign]


def pytest_exception_interact(node: pytest.Item, call: pytest.CallInfo[Any], report: pytest.TestReport) -> None:
    if call.excinfo is not None and call.when == "call":
        said = "\n".join(text for _, text in report.sections)
        if is_find(call.excinfo.value, said):
            node.session.stash.setdefault(_found, []).append(stable_id(node.nodeid))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    finders = session.stash.get(_found, [])
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not finders:
        session.exitstatus = WRONG
    if path := os.environ.get(FINDERS):
        Path(path).write_text("".join(f"{finder}\n" for finder in finders))
