"""Rows of envs, one by one, whichever call brought them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec import VectorEnv, VectorStep, infos_to_list
from marlvec.testing.scripted import WIDTH, decode
from tests.vector.support.reference import World, assert_trees_equal

__all__ = ["Row", "check", "of_reset", "of_step", "of_tuple", "spread_out"]


@dataclass
class Row:
    """One env's row; what its call does not bring is None.

    Attributes:
        i: Whose it is.
        obs: (A, WIDTH).
        rewards, terminated, truncated, alive, acting: (A,).
        done, reset_mask, fault, quiet: Flags of the env.
        final: (A, WIDTH), or None where no agent has a final observation.
        infos, final_infos: The env's own.
    """

    i: int
    obs: NDArray[Any]
    alive: NDArray[np.bool_]
    acting: NDArray[np.bool_]
    fault: bool
    infos: dict[str, Any]
    final_infos: dict[str, Any] = field(default_factory=dict)
    rewards: NDArray[np.float64] | None = None
    terminated: NDArray[np.bool_] | None = None
    truncated: NDArray[np.bool_] | None = None
    reset_mask: bool | None = None
    done: bool | None = None
    quiet: bool | None = None
    final: NDArray[Any] | None = None

    @property
    def incarnation(self) -> int | None:
        """Of the env that wrote it; None where nobody is alive to tell."""
        here = np.flatnonzero(self.alive)
        return decode(self.obs[here[0]]).incarnation if len(here) else None

    @property
    def deserted(self) -> bool:
        """Whether nobody is there, and nobody's end is told."""
        flags = [part for part in (self.alive, self.terminated, self.truncated) if part is not None]
        return not self.done and not any(part.any() for part in flags)


def of_step(envs: VectorEnv, step: VectorStep) -> list[Row]:
    """Rows of what `recv` and `drain` bring, or of a fault's ``result``."""
    n, infos = len(step), step.infos
    ended = step.terminated | step.truncated
    assert ("fault" in infos) == bool(step.fault.any())
    assert np.array_equal(infos.get("fault", step.fault), step.fault)
    if ended.any():
        assert np.array_equal(infos["_final_observation"], step.done & ~step.fault)
    rows = _rows(envs, step.env_ids.tolist(), step.obs, infos)
    for k in range(n):
        row = rows[k]
        row.rewards, row.terminated, row.truncated = step.rewards[k], step.terminated[k], step.truncated[k]
        row.done, row.quiet, row.reset_mask = bool(step.done[k]), bool(step.quiet[k]), bool(step.reset_mask[k])
        assert (row.fault, not row.quiet or row.fault) == (bool(step.fault[k]), True)
        assert np.array_equal(step.has_final[k], ended[k] & (not row.fault))
        if step.has_final[k].any():
            row.final = step.final_obs[k]
    return rows


def of_tuple(envs: VectorEnv, result: tuple[Any, ...]) -> list[Row]:
    """Rows of all envs: what `step` brings."""
    obs, rewards, terminated, truncated, infos = result
    rows = _rows(envs, range(envs.num_envs), obs, infos)
    for i, row in enumerate(rows):
        row.rewards, row.terminated, row.truncated = rewards[i], terminated[i], truncated[i]
        row.reset_mask = bool(infos["reset_mask"][i])
        if not row.fault and (terminated[i] | truncated[i]).any():
            row.final = infos["final_observation"][i]
    return rows


def of_reset(envs: VectorEnv, result: tuple[Any, ...]) -> list[Row]:
    """Rows of all envs: what `reset` brings."""
    return _rows(envs, range(envs.num_envs), *result)


def _rows(envs: VectorEnv, ids: Any, obs: NDArray[Any], infos: dict[str, Any]) -> list[Row]:
    n = len(ids)
    own = infos_to_list(infos, envs.agents, n)
    last = infos_to_list(infos["final_info"], envs.agents, n) if "final_info" in infos else [{}] * n
    if "final_info" in infos:
        assert infos["_final_info"].tolist() == [bool(info) for info in last]
    fault = infos.get("fault", np.zeros(n, bool))
    assert fault.any() or "fault" not in infos
    return [
        Row(i, obs[k], infos["alive"][k], infos["acting"][k], bool(fault[k]), own[k], last[k])
        for k, i in enumerate(ids)
    ]


def check(row: Row, world: World, *, fault: bool = False) -> None:
    """Hold a row against what its env's double shows: every number of it."""
    n = len(row.alive)
    ended = [world.ended.get(a, (False, False)) for a in range(n)]
    expected: dict[str, Any] = {
        "obs": spread_out(world.shown, n).tolist(),
        "alive": [a in world.alive for a in range(n)],
        "acting": [a in world.acting for a in range(n)],
        "fault": fault,
    }
    if row.rewards is not None:
        expected["rewards"] = [world.rewards.get(a, 0.0) for a in range(n)]
        expected["terminated"], expected["truncated"] = [term for term, _ in ended], [trunc for _, trunc in ended]
        expected["reset_mask"] = world.was_reset
    if row.done is not None:
        expected["done"] = world.done
    found = {name: getattr(row, name) for name in expected}
    found = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}
    wrong = {name: (value, expected[name]) for name, value in found.items() if value != expected[name]}
    assert not wrong, f"env {row.i}: what came, and what should have: {wrong}"
    assert_trees_equal(row.infos, world.infos, f"infos of env {row.i}")
    assert_trees_equal(row.final_infos, world.final_infos, f"final infos of env {row.i}")
    if row.final is not None:
        told = set(world.final) if world.done else set(world.ended)
        for a in range(n):
            if a in told:
                assert row.final[a].tolist() == world.final[a].tolist(), f"final observation of env {row.i}, agent {a}"


def spread_out(shown: dict[int, Any], n: int) -> NDArray[Any]:
    """Observations by agent as (A, WIDTH), zeros where there is none."""
    out = np.zeros((n, WIDTH))
    for a, obs in shown.items():
        out[a] = obs
    return out
