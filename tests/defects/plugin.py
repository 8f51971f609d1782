"""A plugin of pytest for runs with a seeded defect: the first find will do, as it is.

    MARLVEC_TEST_DEFECT=truncated_all python -m pytest -x -p tests.defects.plugin tests/faults/test_machine.py

Without that variable nothing is changed in marlvec. The exit code is 1 only where a test has told of the defect; where
something else failed, a mistake in the defect perhaps, it is `WRONG`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import Phase, settings

from marlvec.vector.backends.process import AsyncVectorEnv
from tests.defects import collect, states  # noqa: F401  (their defects are in the registry then)
from tests.defects.findings import is_find
from tests.defects.registry import DEFECTS
from tests.defects.worker import Loop, put_in

__all__ = ["VARIABLE", "WRONG"]

VARIABLE = "MARLVEC_TEST_DEFECT"
WRONG = 70

_found = pytest.StashKey[bool]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """After tests/conftest.py has loaded its own profile."""
    settings.register_profile(
        "hunt", settings(), phases=[Phase.generate], database=None, derandomize=False, report_multiple_bugs=False
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
        node.session.stash[_found] = is_find(call.excinfo.value, said)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and not session.stash.get(_found, False):
        session.exitstatus = WRONG
