"""What can be pickled and not unpickled: it is told whose it is, and everybody goes on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Discrete, Space

from marlvec import AsyncVectorEnv, VectorEnv
from marlvec.errors import EnvRaised, MarlvecError, NotResetError, SerialisationError
from marlvec.testing.scripted import CounterEnv
from tests.faults.harness.programs import run
from tests.vector.support.kinds import vectorize

N, A = 4, 3
MODES = ["raise", "restart", "mask"]
HERE = os.getpid()  # the test's own process; in others this module may be imported anew
ERRORS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "SystemExit": SystemExit,
    "GeneratorExit": GeneratorExit,
    "MarlvecError": MarlvecError,
}


class Bomb:
    """Raises where it is unpickled, if that is one of these processes, or any but them."""

    def __init__(self, error: str = "ValueError", *, spare: tuple[int, ...] = ()) -> None:
        self.error, self.spare = error, spare

    def __reduce__(self) -> Any:
        return go_off, (self.error, self.spare)


def go_off(error: str, spare: tuple[int, ...]) -> Any:
    if os.getpid() in spare:
        return Bomb(error, spare=spare)
    raise ERRORS[error]("not here")


class BombingEnv(CounterEnv):
    """Gives its infos something of which the parent will have no joy."""

    where: tuple[str, ...] = ()
    error = "ValueError"

    def _tainted(self, infos: Any, when: str) -> Any:
        if when in self.where:
            # Deep inside, and beside what is fine.
            infos["agent_1"] = {"fine": 1, "load": [{"deep": Bomb(self.error, spare=(os.getpid(),))}]}
        if "both" in self.where:
            infos["agent_0"] = {"mine": Fine(self.world.env_index)}
        return infos

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, self._tainted(infos, "reset")

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        return *rest, self._tainted(infos, "last" if self.world.t == 5 else "step")


class Fine:
    """A class of one's own that travels well."""

    def __init__(self, number: int) -> None:
        self.number = number


def arm(env: Any, *where: str, error: str = "ValueError") -> None:
    env.where, env.error = where, error


def acts() -> Any:
    return np.ones((N, A), np.int64)


def make(**options: Any) -> VectorEnv:
    return vectorize("async", [partial(BombingEnv, 5, env_index=i, render_mode="ansi") for i in range(N)], **options)


def goes_on(envs: VectorEnv, env_id: int = 2) -> None:
    """That env has no episode, and can have one; the others have theirs."""
    envs.exec_func(arm)
    with pytest.raises(NotResetError, match=rf"envs \[{env_id}\]"):
        envs.step(acts())
    envs.reset(env_ids=[env_id])
    for _ in range(7):
        obs, *_ = envs.step(acts())
    obs, _ = envs.reset(seed=1)
    assert obs.shape[:2] == (N, A)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=4)
@pytest.mark.parametrize(
    ("on_fault", "error"), [*(("raise", error) for error in ERRORS), *((mode, "ValueError") for mode in MODES[1:])]
)
def test_an_info(on_fault: str, error: str) -> None:
    with make(on_fault=on_fault) as envs:
        for when in ("reset", "step", "last"):
            envs.reset(seed=0)
            envs.exec_func(arm, [2], when, error=error)
            words = rf"^env 2, infos\(\): this process cannot unpickle the info of agent 'agent_1': {error}: not here"
            with pytest.raises(SerialisationError, match=words):
                if when == "reset":
                    envs.reset(seed=0)
                for _ in range(5):
                    envs.step(acts())
            goes_on(envs)


def test_infos_of_ones_own_classes_arrive(tmp_path: Path) -> None:
    """Beside one that does not, too; and what agents of an env share they go on sharing."""
    with make() as envs:
        envs.reset(seed=0)
        envs.exec_func(arm, None, "both")
        *_, infos = envs.step(acts())
        assert [value.number for value in infos["mine"][:, 0]] == [0, 1, 2, 3]
        envs.exec_func(arm, [2], "both", "step")
        envs.send(acts())
        with pytest.raises(SerialisationError, match="env 2, infos"):
            envs.recv()
            goes_on(envs)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", ERRORS)
def test_an_answer(error: str) -> None:
    """Of every call that brings any."""
    with make() as envs:
        envs.reset(seed=0)
        envs.step(acts())
        bomb = partial(exploding, error=error)
        calls: list[Any] = [
            lambda: envs.exec_func(bomb),
            lambda: envs.call("exploding"),
            lambda: envs.get_attr("bomb"),
            lambda: envs.render(),
        ]
        envs.exec_func(install, None, error)
        for call in calls:
            words = rf"^env 2, call\(\): this process cannot unpickle the answer: {error}: not here"
            with pytest.raises(SerialisationError, match=words):
                call()
        envs.step(acts())  # it costs no episode


def exploding(env: Any, error: str) -> Any:
    return Bomb(error, spare=(os.getpid(),)) if env.world.env_index == 2 else env.world.env_index


def install(env: Any, error: str) -> None:
    env.bomb = exploding(env, error)
    env.exploding = env.render = partial(exploding, env, error)


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", ERRORS)
def test_on_the_way_to_a_worker(error: str) -> None:
    """Arguments, functions, values and options: the worker lives, and says for which envs it was."""
    bomb = Bomb(error, spare=(HERE,))
    with make() as envs:
        envs.reset(seed=0)
        pids = envs.worker_pids  # type: ignore[attr-defined]  # these backends have it
        calls: dict[str, Any] = {
            "exec_func": lambda: envs.exec_func(arm, [3, 1], bomb),
            "call": lambda: envs.call("reset_", bomb, indices=[3, 1]),
            "set_attr": lambda: envs.set_attr("where", bomb, [3, 1]),
        }
        for name, call in calls.items():
            words = (
                rf"^env 1, {name}\(\): its worker process cannot .* the arguments of {name}.* for env 1: {error}: not"
            )
            with pytest.raises(SerialisationError, match=words):
                call()
        envs.step(acts())
        words = (
            rf"reset\(\): its worker process cannot unpickle the arguments of reset\(\) for env 3: {error}: not here"
        )
        with pytest.raises(SerialisationError, match=words):
            envs.reset(options=[None, None, None, {"bomb": bomb}], env_ids=[0, 1, 2, 3])
        envs.reset()
        envs.step(acts())
        assert envs.worker_pids == pids  # type: ignore[attr-defined]


def test_an_exception_that_goes_off(tmp_path: Path) -> None:
    class Explosive(Exception):
        def __reduce__(self) -> Any:
            return go_off, ("SystemExit", (os.getpid(),))

    def fails(env: Any) -> None:
        raise Explosive(Bomb("SystemExit", spare=(os.getpid(),)))

    with make() as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvRaised, match="Explosive"):
            envs.exec_func(fails)
        envs.step(acts())


class BombSpace(Discrete):
    """Cannot be rebuilt by the test's process."""

    def __init__(self, n: int, error: str) -> None:
        super().__init__(n)
        self.error = error

    def __reduce__(self) -> Any:
        return go_off, (self.error, (os.getpid(),))


class Declaring(CounterEnv):
    def __init__(self, *args: Any, error: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._space = BombSpace(5, error)

    def action_space(self, agent: str) -> Space[Any]:
        return self._space


@pytest.mark.parametrize("error", ERRORS)
def test_spaces(error: str) -> None:
    with pytest.raises(SerialisationError, match=rf"the spaces of envs . to .: {error}: not here"):
        AsyncVectorEnv([partial(Declaring, error=error, env_index=i) for i in range(N)], num_workers=2)


@pytest.mark.parametrize("error", ERRORS)
def test_factories(error: str) -> None:
    factory: Any = partial(CounterEnv, note=Bomb(error, spare=(HERE,)))
    with pytest.raises(MarlvecError, match=f"{error}: not here"):
        AsyncVectorEnv([factory] * 2, num_workers=1)


class Hand(Space[Any]):
    """Values of a class of one's own."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def contains(self, x: Any) -> bool:
        return isinstance(x, (Fine, Bomb))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hand)

    __hash__ = None  # type: ignore[assignment]


class Dealing(CounterEnv):
    """Observations are objects; that of agent 2 in env 1 goes off when it is told to."""

    armed: str | None = None

    def observation_space(self, agent: str) -> Space[Any]:
        return HAND

    def _dealt(self, obs: Any) -> Any:
        dealt: dict[str, Any] = {agent: Fine(self.world.t) for agent in obs}
        if self.armed:
            dealt["agent_2"] = Bomb(self.armed, spare=(os.getpid(),))
        return dealt

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return self._dealt(obs), infos

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return self._dealt(obs), *rest


HAND = Hand()


def deal(env: Any, armed: str | None) -> None:
    env.armed = armed


@pytest.mark.mostly_slow("kills, stops or starts many workers", quick=2)
@pytest.mark.parametrize("error", ERRORS)
def test_an_observation(error: str) -> None:
    with vectorize("async", [partial(Dealing, 4, env_index=i) for i in range(N)]) as envs:
        envs.reset(seed=0)
        envs.exec_func(deal, [1], error)
        words = rf"^env 1, {{}}\(\): this process cannot unpickle the observation of agent 'agent_2': {error}: not here"
        with pytest.raises(SerialisationError, match=words.format("step")):
            envs.step(acts())
        with pytest.raises(SerialisationError, match=words.format("reset")):
            envs.reset()
        envs.exec_func(deal, None, None)
        envs.reset(env_ids=[1])
        for _ in range(6):
            obs, *_ = envs.step(acts())
        assert [[hand.number for hand in row] for row in obs[[1]]] == [[2] * A]


PROGRAM = """
here = os.getpid()

def go_off(here):
    if os.getpid() == here:
        raise KeyboardInterrupt

class Bomb:
    def __reduce__(self):
        return go_off, (here,)

with AsyncVectorEnv([CounterEnv] * 2, num_workers=1) as envs:
    envs.reset()
    try:
        envs.exec_func(lambda env: Bomb())
    except KeyboardInterrupt:
        print("passed")
    try:
        envs.reset()
    except BrokenError as error:
        assert "was interrupted" in str(error)
"""


@pytest.mark.slow("kills, stops or starts many workers")
def test_ctrl_c_passes(tmp_path: Path) -> None:
    assert run(PROGRAM, tmp_path) == ["passed"]
