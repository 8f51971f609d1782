"""Check: spaces are the same objects at every call, and do not change."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

from gymnasium.spaces import Space

from marlvec.spaces import describe_difference
from marlvec.testing.env_checks.findings import EpisodeLog, Place

__all__ = ["ConstantSpaces"]


class ConstantSpaces:
    """All spaces of one env, as first returned.

    `read` returns them keyed by call, e.g. ``"observation_space('agent_0')"``; `Fault`: a value is not a space.
    """

    def __init__(self, env: str, read: Callable[[], dict[str, Any]], log: EpisodeLog) -> None:
        self._env, self._read = env, read
        self._first: dict[str, Space[Any]] = read()
        for call, space in self._first.items():
            if not isinstance(space, Space):
                Place(env, call).fault(
                    "spaces",
                    "the space",
                    "a gymnasium space",
                    type(space).__name__,
                    "return a space of gymnasium.spaces",
                )
        self._copies = deepcopy(self._first)
        self.check(Place(env, "", log=log))

    def check(self, place: Place) -> None:
        """Read the spaces again; report changes to the place's log."""
        now = self._read()
        for call, space in self._first.items():
            asked = replace(place, call=call, step=None)
            with asked.logging():
                self._compare(asked, call, space, now)

    def _compare(self, place: Place, call: str, space: Space[Any], now: dict[str, Any]) -> None:
        kind = re.split(r"\(|\[| of ", call)[0]
        if call not in now:
            place.fault("spaces", "the space", "the same as before", "none", kind=kind)
        if now[call] is not space:
            # marlvec keeps the first; it refuses only a different one.
            equal = isinstance(now[call], Space) and describe_difference(space, now[call]) is None
            got = f"another one, {now[call]}"
            place.fault("spaces", "the space", "the same object on each call", got, kind=kind, minor=equal)
        if changed := describe_difference(self._copies[call], space):
            change = "make a new env for another space; nothing in the env may write to a space it has handed out"
            place.fault(
                "spaces", "the space", "no change while the env lives", f"a change {changed}", change, kind=kind
            )
