"""Scripts for test envs: which agents enter and end in an episode, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["End", "Script", "ScriptLike", "draw_script", "script_at"]

End = Literal["terminated", "truncated", "both"]


@dataclass(frozen=True)
class Script:
    """One episode, agent by agent.

    Attributes:
        births: Step in which each agent enters; 0 is the reset. None: never.
        deaths: Step in which each agent ends, not before its birth (equal if its first observation is its last).
        ends: How each ends.
        infos: Info of each (t, agent); t = 0 is the reset.
        common: Info of the whole env at each t.
    """

    births: Sequence[int | None]
    deaths: Sequence[int]
    ends: Sequence[End]
    infos: Mapping[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    common: Mapping[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.births) == len(self.deaths) == len(self.ends):
            raise ValueError(f"births, deaths and ends differ in length: {self}")
        for birth, death in zip(self.births, self.deaths, strict=True):
            if death < 1 or (birth is not None and death < birth):
                raise ValueError(f"deaths: expected no step before the birth in step {birth}, got {death}")
        if not any(birth == 0 for birth in self.births):
            raise ValueError(f"births: expected an agent at the reset (0), got {self.births}")
        t = 0  # the last step after which any agent is alive
        for birth, death in sorted((b, d) for b, d in zip(self.births, self.deaths, strict=True) if b is not None):
            if birth > t + 1:
                raise ValueError(f"no agent is alive after step {t + 1}, so none can join in step {birth}")
            t = max(t, death - 1)

    @property
    def length(self) -> int:
        """Steps of the episode."""
        return max(d for b, d in zip(self.births, self.deaths, strict=True) if b is not None)

    def alive(self, t: int) -> list[bool]:
        """Whether each agent is in the episode after step ``t``."""
        return [b is not None and b <= t < d for b, d in zip(self.births, self.deaths, strict=True)]

    def terminated(self, t: int) -> list[bool]:
        """Whether each agent is terminated in step ``t``."""
        return self._ended(t, ("terminated", "both"))

    def truncated(self, t: int) -> list[bool]:
        """Whether each agent is truncated in step ``t``."""
        return self._ended(t, ("truncated", "both"))

    def _ended(self, t: int, kinds: tuple[End, ...]) -> list[bool]:
        rows = zip(self.births, self.deaths, self.ends, strict=True)
        return [birth is not None and death == t and end in kinds for birth, death, end in rows]

    @classmethod
    def together(cls, agent_num: int, length: int, end: End = "truncated") -> Script:
        """Return a script in which all agents live from the reset to step ``length``."""
        return cls([0] * agent_num, [length] * agent_num, [end] * agent_num)


ScriptLike = Script | Sequence[Script] | Callable[[int], Script]
"""A script for all episodes, a list to repeat, or a function of the episode's number."""


def script_at(scripts: ScriptLike, episode: int) -> Script:
    """Return the script of one episode."""
    if isinstance(scripts, Script):
        return scripts
    return scripts(episode) if callable(scripts) else scripts[episode % len(scripts)]


def draw_script(rng: np.random.Generator, agent_num: int, longest: int) -> Script:
    """Draw a script with late births, early deaths, mixed ends and some infos."""
    length = int(rng.integers(1, longest + 1))
    births: list[int | None] = [0] * agent_num
    deaths = [length] * agent_num
    anchor = int(rng.integers(agent_num))  # lives throughout, so that the episode never runs empty
    for a in range(agent_num):
        if a == anchor:
            continue
        births[a] = None if rng.random() < 0.1 else int(rng.integers(0, length)) if rng.random() < 0.3 else 0
        deaths[a] = int(rng.integers(max(1, births[a] or 0), length + 1))
    kinds: tuple[End, ...] = ("terminated", "truncated", "both")
    ends = [kinds[int(k)] for k in rng.integers(0, len(kinds), agent_num)]
    infos = {
        (t, a): {"t": t, "agent": a, "marks": np.array([t, a], np.int64)}
        for t in range(length + 1)
        for a in range(agent_num)
        if rng.random() < 0.2
    }
    common = {t: {"clock": t} for t in range(length + 1) if rng.random() < 0.1}
    return Script(births, deaths, ends, infos, common)
