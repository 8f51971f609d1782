"""`ObservationValidator`: checks that the values that envs return lie in their spaces; `CheckSchedule`: when.

The check runs in the calling process, for all rows at once; valid rows take one or two reductions per leaf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.envs.adapters.return_values import warn_of_contract
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.spaces import Finite, Leaf, Membership, membership
from marlvec.vector.vector_step import VectorStep

__all__ = ["CheckSchedule", "ObservationValidator"]

_REWARDS = Finite()
_FIRST, _EVERY = 16, 16
_NEVER = -1  # counting down from here never reaches 0

AnyArray = NDArray[Any]
BoolArray = NDArray[np.bool_]


class CheckSchedule:
    """Counts calls. The caller decrements ``countdown`` itself, which saves a function call if no check is due.

        schedule.countdown -= 1
        if not schedule.countdown:
            schedule.restart()
            ...

    ``"strict"`` and ``"warn"``: every call is due; ``"sample"``: the first 16 and every 16th after that; ``"off"``:
    none.
    """

    __slots__ = ("_left", "_mode", "countdown")

    def __init__(self, validate: str) -> None:
        self._mode = validate
        self._left = _FIRST  # remaining calls of the first 16
        self.countdown = _NEVER if validate == "off" else 1

    def restart(self) -> None:
        """Count down to the next call that is due."""
        if self._mode == "sample" and self._left > 0:
            self._left -= 1
        self.countdown = _EVERY if self._mode == "sample" and not self._left else 1


class ObservationValidator:
    """Checks the values of observations and rewards.

    An observation must lie in its space in the sense of ``space.contains``: within the bounds, infinity only within an
    infinite bound, never NaN. A reward must be finite. Only observations of living agents and final observations of
    agents that have just ended are checked; the zeros of other agents, and of agents that wait for their first turn,
    may lie outside. Padded observations are checked against the padded space.

    Leaves whose dtype has no invalid values (uint8 from 0 to 255) cost nothing; nor do object leaves, which are checked
    whenever they are written. Problems are returned with ``"strict"``; else one `ContractWarning` per env is given if
    an agent's leaf is wrong in a new way. With ``"sample"`` a bound exceeded by rounding does not end a long run.
    """

    def __init__(self, spec: EnvSpec, mode: str) -> None:
        self._mode = mode
        self._agents = spec.agents
        self.schedule = CheckSchedule(mode)
        self._warned: set[tuple[int, str, str, str, str]] = set()
        self._checks = [
            _Check(g, k, group, leaf, members)
            for g, group in enumerate(spec.groups)
            for k, leaf in enumerate(group.observation_tree.leaves)
            if (members := membership(leaf)) is not None
        ]

    def check(
        self, step: VectorStep, env_ids: Sequence[int] | NDArray[np.int64] | None = None
    ) -> list[tuple[int, str]]:
        """Check a call's rows (``env_ids``: the new ones); with ``"strict"``, return invalid envs and problems."""
        # The caller consults `schedule` first. A repeated problem gives no second warning.
        if not len(step):
            return []
        problems: list[_Problem] = []
        if not _REWARDS.are_all(step.rewards):
            problems += self._bad_rewards(step)
        problems += self._bad_leaves("observation", step.obs_leaves, step.alive, step)
        if step.final_leaves is not step.obs_leaves:
            shown = step.has_final & ~step.final_missing
            problems += self._bad_leaves("final observation", step.final_leaves, shown, step)
        if env_ids is not None:
            problems = [problem for problem in problems if problem.env_id in env_ids]
        if not problems:
            return []
        by_env: dict[int, list[_Problem]] = {i: [] for i in step.env_ids.tolist()}
        for problem in problems:
            by_env[problem.env_id].append(problem)
        bad = {i: found for i, found in by_env.items() if found}
        if self._mode == "strict":
            advice = "Correct the env or its spaces, or see make(validate=…)"
            return [(i, f"{found[0]}{_and_more(found)}. {advice}") for i, found in bad.items()]
        self._warn(bad)
        return []

    def _bad_rewards(self, step: VectorStep) -> Iterator[_Problem]:
        for i, a in np.argwhere(~np.isfinite(step.rewards)).tolist():
            yield _Problem(int(step.env_ids[i]), self._agents[a], "reward", "", step.rewards[i, a, ...], _REWARDS)

    def _bad_leaves(
        self, subject: str, leaves: list[list[AnyArray]], present: BoolArray, step: VectorStep
    ) -> Iterator[_Problem]:
        for check in self._checks:
            array = leaves[check.g][check.k]
            if check.members.are_all(array):
                continue
            agents = check.group.agents
            here = present[:, list(agents)]
            if leaves is step.obs_leaves:
                here &= _observed(step.acting[:, list(agents)], leaves[check.g])
            for i, j in np.argwhere(here & ~check.members.rows(array, here)).tolist():
                agent, path = self._agents[agents[j]], check.leaf.path
                yield _Problem(int(step.env_ids[i]), agent, subject, path, array[i, j, ...], check.members)

    def _warn(self, bad: dict[int, list[_Problem]]) -> None:
        for i, found in bad.items():
            new = [problem for problem in found if problem.key not in self._warned]
            if new:
                self._warned.update(problem.key for problem in new)
                warn_of_contract(f"env {i}: {new[0]}{_and_more(found)}")


@dataclass(frozen=True, slots=True)
class _Check:
    """Leaf ``k`` of group ``g``, and the set of its valid values."""

    g: int
    k: int
    group: AgentGroup
    leaf: Leaf
    members: Membership


@dataclass(frozen=True, slots=True)
class _Problem:
    env_id: int
    agent: str
    subject: str
    path: str
    value: AnyArray
    members: Membership

    @property
    def key(self) -> tuple[int, str, str, str, str]:
        """Problems of equal keys give one warning; observations and final observations count as the same."""
        is_nan = self.value.dtype.kind == "f" and np.isnan(self.value).any()
        return self.env_id, self.agent, self.subject.split()[-1], self.path, "nan" if is_nan else "value"

    def __str__(self) -> str:
        where = f"{self.subject} of agent {self.agent!r}" + (f", leaf {self.path!r}" if self.path else "")
        return f"{where}: {self.members.describe(self.value)}"


def _observed(acting: BoolArray, leaves: list[AnyArray]) -> BoolArray:
    """Return (n, A_g) bool: agents that act or have a non-zero row; a living agent with neither was never observed."""
    out = acting.copy()
    for leaf in leaves:
        if leaf.dtype == np.object_:
            out |= np.array([[cell is not None for cell in row] for row in leaf.tolist()], np.bool_)
        else:
            out |= (leaf != 0).any(axis=tuple(range(2, leaf.ndim)))
    return out


def _and_more(problems: list[_Problem]) -> str:
    return f" ({len(problems) - 1} more like it in this env)" if len(problems) > 1 else ""
