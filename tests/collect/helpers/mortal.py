"""Envs that die at moments drawn beforehand, and the reference for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from marlvec.errors import RestartQuietly
from marlvec.testing.scripted import CounterEnv
from marlvec.testing.scripted.script import count_incarnation
from marlvec.vector.in_process import SyncVectorEnv
from marlvec.vector.settings import restart_seed
from tests.collect.helpers.players import build
from tests.collect.helpers.reference import Reference, World
from tests.vector.support.drivers import driver_of

__all__ = ["DEATHS", "Deaths", "Died", "MortalReference", "dying_counters", "mortals"]


class Died(Exception):
    """What a mortal env raises."""


Death = tuple[str, int, bool]  # the operation, which call of it, and whether it asks for a restart
Deaths = dict[tuple[int, int], Death]  # by env and incarnation

DEATHS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.sampled_from(["step", "step", "reset"]), st.integers(0, 12), st.booleans()),
    min_size=1,
)


def mortal(env: Any, death: Death | None) -> Any:
    """Let an env raise in one call."""
    if death is not None:
        operation, at, quiet = death
        method, calls = getattr(env, operation), count()

        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == at:
                raise RestartQuietly if quiet else Died
            return method(*args, **kwargs)

        setattr(env, operation, call)
    return env


def bear(kind: str, env_index: int, agent_num: int, deaths: Deaths, marks: Path) -> Any:
    """One env; a folder of marks tells, in any process, which incarnation it is."""
    incarnation = count_incarnation(marks, env_index)
    return mortal(build(kind, env_index, agent_num), deaths.get((env_index, incarnation)))


def mortals(kind: str, num_envs: int, agent_num: int, deaths: Deaths, marks: Path) -> list[Callable[[], Any]]:
    """Factories of mortal envs."""
    return [partial(bear, kind, i, agent_num, deaths, marks) for i in range(num_envs)]


def dying_counters(
    deaths: Deaths, num_envs: int = 2, *, length: Any = 5, agent_num: int = 2, **settings: Any
) -> SyncVectorEnv:
    """Counter envs that die, in this process; by default they are built anew at once."""
    births: Counter[int] = Counter()

    def bear_counter(i: int) -> Any:
        births[i] += 1
        return mortal(CounterEnv(length, agent_num=agent_num, env_index=i), deaths.get((i, births[i] - 1)))

    return SyncVectorEnv([partial(bear_counter, i) for i in range(num_envs)], **{"on_fault": "restart"} | settings)


class MortalReference(Reference):
    """The reference, for envs that die and are built anew or masked.

    Args:
        deaths: Who dies when.
        masks: Whether those that do not ask for a restart are masked.
        options: As `Reference`'s.
    """

    def __init__(self, kind: str, *args: Any, deaths: Deaths, masks: bool, **options: Any) -> None:
        self.kind, self.deaths, self.masks = kind, deaths, masks
        self.incarnations: dict[int, int] = {}
        self.seeds: dict[int, int] = {}
        self.restarts: dict[int, int] = {}  # since the env was seeded
        super().__init__(kind, *args, **options)

    def _begin(self, world: World, seed: int | None) -> None:
        i = world.env
        if i not in self.incarnations:
            self.incarnations[i] = 0
            mortal(world.driver.env, self.deaths.get((i, 0)))
        if seed is not None:
            self.seeds[i], self.restarts[i] = seed, 0
        self._try_to_begin(world, seed)

    def _try_to_begin(self, world: World, seed: int | None) -> None:
        try:
            super()._begin(world, seed)
        except (Died, RestartQuietly) as death:
            self._go_on(world, death)

    def _go_on(self, world: World, death: Exception) -> None:
        if self.masks and isinstance(death, Died):
            self.worlds.remove(world)
            return
        i = world.env
        self.incarnations[i] += 1
        self.restarts[i] += 1
        env = mortal(build(self.kind, i, len(world.names)), self.deaths.get((i, self.incarnations[i])))
        world.driver = driver_of(env)
        self._try_to_begin(world, restart_seed(self.seeds[i], self.restarts[i]))

    def _step(self, world: World) -> bool:
        try:
            return super()._step(world)
        except (Died, RestartQuietly) as death:
            world.steps += 1
            self.lost_steps += world.length + 1 - world.counted
            dropped = [item for item in self.closed if item[1].eps_id == world.eps_id]
            self.closed = [item for item in self.closed if item[1].eps_id != world.eps_id]
            self.lost_rows += len(dropped) + len(world.open)
            self.lost[world.eps_id] = "fault" if isinstance(death, Died) else "restart"
            self.faulty += isinstance(death, Died)
            self.restarted += not isinstance(death, Died)
            self._go_on(world, death)
            return False
