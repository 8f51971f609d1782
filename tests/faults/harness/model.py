"""What a caller may expect of envs that things happen to: a plain loop for each, and what became of it.

Where a fault and an answer race, either may come first; the model then takes what the row says, and holds everything
else against it. Nothing else is left open.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec import RestartQuietly, VectorEnv, VectorStep, infos_to_list
from marlvec.testing import WIDTH, ScriptedParallelEnv, decode
from marlvec.vector.settings import restart_seed
from tests.vector.support.drivers import driver_of
from tests.vector.support.reference import World, assert_trees_equal


class FragileEnv(ScriptedParallelEnv):
    """Agents come and go by scripts that are drawn anew for each episode; a reset's ``salt`` shows in what it brings.

    Args:
        env_index: Index of the env.
        agent_num: Number of agents.
        marks: Folder in which incarnations are counted, or None.

    Attributes:
        plan: Operation to what happens when it is asked for next: ``"raise"``, ``"quiet"``, ``"exit"`` or ``"hang"``.
    """

    def __init__(self, *, env_index: int, agent_num: int, marks: Path | None = None) -> None:
        super().__init__(
            None, agent_num=agent_num, env_index=env_index, marks=marks, longest=4, reuse_buffer=env_index % 2 == 1
        )
        self.plan: dict[str, str] = {}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._come_to("reset")
        obs, infos = super().reset(seed, options)
        for row in obs.values():
            row[-1] += (options or {}).get("salt", 0)
        return obs, infos

    def step(self, actions: dict[str, Any]) -> Any:
        self._come_to("step")
        return super().step(actions)

    def strike(self, how: str) -> None:
        """Do what was planned."""
        if how == "raise":
            raise ValueError("it was told to")
        if how == "quiet":
            raise RestartQuietly
        if how == "exit":
            os._exit(3)
        time.sleep(3600.0)

    def _come_to(self, operation: str) -> None:
        if how := self.plan.pop(operation, None):
            self.strike(how)


class Strike(Exception):
    """What would have happened."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class Rehearsal(FragileEnv):
    """The same, in the test's own process: it says what happens, and does not let it happen.

    Args:
        env_index, agent_num: See `FragileEnv`.
        incarnation: Which one it stands for.
    """

    def __init__(self, *, env_index: int, agent_num: int, incarnation: int) -> None:
        super().__init__(env_index=env_index, agent_num=agent_num)
        self.world.incarnation = incarnation
        self.world._rng = np.random.default_rng([env_index, incarnation])  # as of one that was counted

    def strike(self, how: str) -> None:
        raise Strike(how)


def order(env: FragileEnv, operation: str, how: str) -> None:
    """For `exec_func`: tell an env what is to happen to it."""
    env.plan[operation] = how


def where(env: FragileEnv) -> tuple[int, int, int]:
    """For `exec_func`: incarnation, episode and step of an env."""
    return env.world.incarnation, env.world.episode, env.world.t


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


class Gone(Enum):
    """Whether the incarnation that the caller knows is still there."""

    NO = 0
    MAYBE = 1
    YES = 2


@dataclass
class Asked:
    """A request in flight.

    Attributes:
        operation: ``"step"`` or ``"reset"``.
        actions: Of a step, by agent.
        seed, options: Of a reset.
        gone: What was known of the env when it was asked.
        causes: How many things may have cost it the incarnation that was asked.
        deaths: How many of these are deaths of its worker.
        outlived: Whether it had surely answered before its worker died.
    """

    operation: str
    actions: dict[int, Any] = field(default_factory=dict)
    seed: int | None = None
    options: dict[str, Any] | None = None
    gone: Gone = Gone.NO
    causes: int = 0
    deaths: int = 0
    outlived: bool = False


@dataclass
class Known:
    """One env as the caller knows it.

    Attributes:
        i: Its index.
        world: A double of the incarnation that was heard of last, and what its row shows.
        stamp: That incarnation.
        phase: ``"none"``: it must be reset; ``"running"``; ``"over"``: the next step begins an episode; ``"masked"``.
        fresh: Whether that incarnation is gone, and the next one has not been heard of.
        legible: Whether its row means anything.
        alive: Who was alive when the caller last heard.
        gone: See `Gone`.
        seed, base: What it was last seeded with, and how often it had been built anew by then.
        asked: Its request in flight.
    """

    i: int
    world: World
    stamp: int = 0
    phase: str = "none"
    fresh: bool = False
    legible: bool = True
    alive: set[int] = field(default_factory=set)
    gone: Gone = Gone.NO
    seed: int | None = None
    base: int = 0
    asked: Asked | None = None

    @property
    def plan(self) -> dict[str, str]:
        """What is to happen to it."""
        plan: dict[str, str] = self.world.driver.env.plan
        return plan


class Model:
    """All of them.

    Args:
        n, agent_num: How many envs and agents.
        mode: Autoreset mode.
        on_fault: As the vectorizer has it.

    Attributes:
        envs: One `Known` per env.
        incarnations: (N,) how often each was built anew, by the vectorizer's own books.
        unnoticed: Envs whose worker is dead, which the vectorizer has not noticed.
        masked: Envs that are masked, by the vectorizer's own books.
    """

    def __init__(self, n: int, agent_num: int, mode: str, on_fault: str) -> None:
        self.agent_num, self.mode, self.on_fault = agent_num, mode, on_fault
        self.envs = [Known(i, World(self._double(i, 0))) for i in range(n)]
        self.incarnations: NDArray[np.int64] = np.zeros(n, np.int64)
        self.unnoticed: set[int] = set()
        self.masked: set[int] = set()

    def _double(self, i: int, incarnation: int) -> Any:
        return driver_of(Rehearsal(env_index=i, agent_num=self.agent_num, incarnation=incarnation))

    # --- what is asked, and what happens meanwhile

    def ask_step(self, i: int, actions: dict[int, Any]) -> None:
        """A step was sent."""
        self._ask(self.envs[i], Asked("step", actions))

    def ask_reset(self, i: int, seed: int | None, options: dict[str, Any] | None) -> None:
        """A reset was sent."""
        env = self.envs[i]
        if seed is not None:
            env.seed, env.base = seed, int(self.incarnations[i])
        self._ask(env, Asked("reset", seed=seed, options=options))

    def _ask(self, env: Known, asked: Asked) -> None:
        asked.gone, asked.causes = env.gone, int(env.gone is not Gone.NO)
        assert env.asked is None
        env.asked = asked

    def death(self, i: int) -> None:
        """The worker of this env has died."""
        env = self.envs[i]
        if env.asked is None:
            env.gone = Gone.YES
        else:
            env.asked.causes += 1
            env.asked.deaths += 1

    def death_after_answer(self, i: int) -> None:
        """Likewise, but what was asked of it had been answered."""
        env = self.envs[i]
        if env.asked is None:
            env.gone = Gone.YES
        else:
            env.asked.outlived = True

    @property
    def waiting(self) -> list[int]:
        """Envs with a request in flight."""
        return [env.i for env in self.envs if env.asked]

    @property
    def homeless(self) -> list[int]:
        """Envs that must be reset."""
        return [env.i for env in self.envs if env.phase == "none"]

    def surely_lost(self, i: int) -> bool:
        """Whether what this env was asked cannot be answered by the incarnation that was asked."""
        asked = self.envs[i].asked
        return asked is not None and asked.gone is Gone.YES

    # --- what comes back

    def idle_row(self, row: Row) -> None:
        """The row of an env that was not asked, beside others: as it was."""
        env = self.envs[row.i]
        assert not row.fault
        if env.legible:
            shown = {} if env.phase == "masked" or env.fresh else env.world.shown
            assert row.obs.tolist() == spread_out(shown, self.agent_num).tolist(), f"env {row.i}, which was not asked"
            assert set(np.flatnonzero(row.alive).tolist()) == env.alive

    def failed(self, i: int, operation: str) -> None:
        """This env raised, and the caller was told so."""
        env = self.envs[i]
        asked, env.asked = env.asked, None
        assert asked is not None
        strike = None if env.fresh or asked.gone is Gone.YES else self._rehearse(env, asked)
        assert strike is not None, f"env {i} had no reason to raise"
        assert strike.how == "raise"
        begins = asked.operation == "reset" or env.world.done or env.world.was_reset
        assert operation == ("reset" if begins else "step")
        env.phase, env.legible = "none", False

    def answered(self, row: Row) -> None:
        """The row of an env that was asked."""
        env = self.envs[row.i]
        asked, env.asked = env.asked, None
        assert asked is not None, f"env {row.i} was asked nothing"
        strike = None if env.fresh or asked.gone is Gone.YES or env.phase == "masked" else self._rehearse(env, asked)
        must = asked.gone is Gone.YES or strike is not None
        may = must or asked.causes > 0
        env.legible = True
        if env.phase == "masked" or self._looks_masked(row):
            assert may or env.phase == "masked"
            self._take_masked(env, asked, row, strike)
            return
        new = env.fresh or (row.incarnation is not None and row.incarnation != env.stamp)
        lost = row.fault or new
        assert lost or not must, f"env {row.i}: {asked} of an incarnation that is gone was answered ({strike})"
        assert may or env.fresh or not lost, f"env {row.i}: nothing happened to it, and it was lost"
        if lost:
            self._take_lost(env, asked, row, strike)
        else:
            self._take_plain(env, asked, row)
        env.alive = set(env.world.alive)

    def _rehearse(self, env: Known, asked: Asked) -> Strike | None:
        """Do the same with the double."""
        try:
            if asked.operation == "reset":
                env.world.clear()
                env.world.begin(asked.seed, asked.options)
            else:
                mine = {a: action for a, action in asked.actions.items() if a in env.world.acting}
                env.world.step(mine, self.mode)
        except Strike as strike:
            return strike
        return None

    def _take_plain(self, env: Known, asked: Asked, row: Row) -> None:
        check(row, env.world)
        env.gone = Gone.YES if asked.deaths or asked.outlived else Gone.NO
        self._move_on(env)

    def _move_on(self, env: Known) -> None:
        env.phase = "running"
        if env.world.over and self.mode != "same_step":
            env.phase = "over" if self.mode == "next_step" else "none"

    # --- a new incarnation

    def _take_lost(self, env: Known, asked: Asked, row: Row, strike: Strike | None) -> None:
        causes = asked.causes + (strike is not None or env.fresh)  # that it has a new incarnation
        behind = False
        begun = asked.operation == "reset" or env.phase == "over"
        if begun:
            assert not row.fault, f"env {env.i}: no episode was lost"
            reset, env.world = env.phase == "over" and asked.operation == "step", World(env.world.driver)
            behind = self._begin_anew(env, asked, row, causes)
            env.world.was_reset = reset
        elif strike is not None and env.world.done and not row.fault:  # its episode was whole, and the next one failed
            assert strike.how in ("raise", "quiet")
            behind = self._begin_anew(env, asked, row, causes)
        else:
            assert row.fault, f"env {env.i}: its episode was lost"
            assert strike is None or not env.world.done or asked.deaths or strike.how in ("exit", "hang")
            env.world = World(env.world.driver)
            if self.mode == "same_step":
                behind = self._begin_anew(env, asked, row, causes)
            env.world.ended = dict.fromkeys(env.alive, (False, True))
            env.world.done = True
            env.fresh, env.world.over = self.mode != "same_step", self.mode != "same_step"
        if strike is not None and causes == 1 and row.quiet is not None and row.fault:
            assert row.quiet == (strike.how == "quiet")
        check(row, env.world, fault=row.fault)
        several = causes > 1 and asked.deaths
        env.gone = (
            Gone.YES if behind or asked.outlived or env.i in self.unnoticed else Gone.MAYBE if several else Gone.NO
        )
        self._move_on(env)

    def _begin_anew(self, env: Known, asked: Asked, row: Row, causes: int) -> bool:
        """Let the double of a new incarnation begin, seeded as only that one is; whether it was lost again since."""
        stamp = row.incarnation
        assert stamp is not None
        assert env.stamp < stamp <= self.incarnations[env.i], f"env {env.i}: incarnation {stamp} after {env.stamp}"
        world, last = env.world, int(self.incarnations[env.i]) - env.base
        # Of several restarts that came together, any may have been the one that answered.
        for k in range(last, max(-1, last - causes), -1):
            world.driver = self._double(env.i, stamp)
            world.begin(self._seed(env, asked, k), asked.options if asked.operation == "reset" else None)
            if np.array_equal(spread_out(world.shown, self.agent_num), row.obs):
                break
        env.stamp, env.fresh = stamp, False
        return k < last and env.seed is not None

    def _seed(self, env: Known, asked: Asked, k: int) -> int | None:
        return None if env.seed is None else restart_seed(env.seed, k) if k else env.seed

    # --- masks

    def _looks_masked(self, row: Row) -> bool:
        if self.on_fault != "mask" or row.i not in self.masked:
            return False
        if row.quiet:  # lost because it had asked for that; its next incarnation may be what was masked, then or later
            return self.mode == "same_step" and not row.alive.any()
        return row.fault or row.deserted or (self.mode == "same_step" and not row.alive.any())

    def _take_masked(self, env: Known, asked: Asked, row: Row, strike: Strike | None) -> None:
        assert row.i in self.masked
        whole = strike is not None and strike.how == "raise" and env.world.done and not row.fault
        lost = asked.operation == "step" and env.phase == "running"
        if whole:
            world, env.world.infos = env.world, {}
            world.shown, world.acting = {}, set()
        else:
            world = World(env.world.driver)
            if lost:
                world.ended, world.done = dict.fromkeys(env.alive, (False, True)), True
        check(row, world, fault=lost and not whole)
        env.phase, env.alive, env.gone = "masked", set(), Gone.NO
