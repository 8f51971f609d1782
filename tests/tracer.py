"""`Tracer`: Ctrl-C, or another error, at one line after the other of a call."""

from __future__ import annotations

import gc
import linecache
import sys
from types import FrameType
from typing import Any


class Tracer:
    """Raises KeyboardInterrupt at one line of code in some folders, as Ctrl-C does.

    Not where CPython looks for no signal: where a ``with`` block is left, so that a lock is never left behind; and on
    lines that say so, on which things are stored and nothing is called, the one that returns a batch among them. Nor in
    destructors, where it prints what is raised and goes on.

    Args:
        folders: Parts of file names.
        line: The how manieth line that is run; from 1.
        but: Parts of the names of files in them where none comes.
        everywhere: Whether it comes on lines that say so, too.
        error: What is raised in place of it.

    Attributes:
        left: So many lines are still to come.
        place: In which file and line it came; None: it did not.
    """

    def __init__(
        self,
        folders: tuple[str, ...],
        line: int,
        *,
        but: tuple[str, ...] = (),
        everywhere: bool = False,
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        self.folders, self.left, self._but, self._everywhere = folders, line, but, everywhere
        self.place: str | None = None
        self._error = error
        self._seen: set[tuple[int, int]] = set()

    def __enter__(self) -> Tracer:
        gc.disable()  # what is collected may close itself, line by line, and nobody hears of Ctrl-C there
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if any(part in name for part in self.folders) and not any(part in name for part in self._but):
            return None if _is_in_destructor(frame) else self._line
        return None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event != "line":
            return self._line
        name, line = frame.f_code.co_filename, frame.f_lineno
        if (self._leaves_block if self._everywhere else self._is_left_out)(frame, name, line):
            return self._line
        self.left -= 1
        if self.left == 0:
            sys.settrace(None)
            self.place = f"{name.rpartition('marlvec/')[2]}:{line}"
            raise self._error
        return self._line

    def _is_left_out(self, frame: FrameType, name: str, line: int) -> bool:
        text = linecache.getline(name, line).strip()
        return "# not interrupted" in text or text == "return batch" or self._leaves_block(frame, name, line)

    def _leaves_block(self, frame: FrameType, name: str, line: int) -> bool:
        if linecache.getline(name, line).strip().startswith("with "):
            key = id(frame), line
            if key in self._seen:
                self._seen.discard(key)
                return True
            self._seen.add(key)
        return False


def _is_in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
