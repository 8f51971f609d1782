"""`LineServer`: a program that is started once and answers requests, one line of JSON each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

__all__ = ["LineServer"]


class LineServer:
    """The client of such a program; a context manager, in which the program runs.

    Args:
        arguments: Of the Python interpreter.
        options: Of `subprocess.Popen`.
    """

    def __init__(self, arguments: Sequence[str], **options: Any) -> None:
        self._arguments, self._options = arguments, options

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **self._options,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.communicate()

    def ask(self, request: str | Mapping[str, Any]) -> Any:
        """Send a request and wait for its answer."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{' '.join(self._arguments)} has ended with {self._process.wait()}"
        return json.loads(answer)
