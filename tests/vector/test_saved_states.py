"""`get_state` and `set_state`: whole episodes go on bit by bit, wherever and whenever a state was saved."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile  # noqa: F401  (a test finds a class through this name)
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import SyncVectorEnv, VectorEnv
from marlvec.errors import (
    ArgumentError,
    BusyError,
    CheckpointError,
    ClosedError,
    EnvFault,
    EnvRaised,
    NotResetError,
    SerialisationError,
    StateError,
)
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.values import decode, encode
from tests.vector.support.kinds import (
    BACKENDS,
    HERE_AND_AWAY,
    OBJECTS,
    SCRIPTED,
    SPACE,
    WALKS,
    ObjectEnv,
    ParallelWalk,
    PlainSingleWalk,
    Walk,
    factories_of,
    vectorize,
    walks,
)
from tests.vector.support.reference import MODES, refused, same

N = 4


def play(envs: VectorEnv, steps: int, seed: int, mode: str = "same_step") -> list[Any]:
    """Steps of all envs, sends to some, resets of some; in `disabled` mode of those, too, that have no episode."""
    rng = np.random.default_rng(seed)
    found: list[Any] = []
    for _ in range(steps):
        if mode == "disabled":
            gone = np.flatnonzero(~envs._call_state.has_episodes(np.arange(envs.num_envs)))
            if len(gone):
                found.append(envs.reset(env_ids=gone))
        kind, drawn = rng.random(), int(rng.integers(1 << 30))
        some = np.flatnonzero(rng.random(envs.num_envs) < 0.5)
        if kind < 0.15 and len(some):
            found.append(envs.reset(env_ids=some))
        elif kind < 0.3 and len(some):
            envs.send(envs.random_action(seed=drawn, env_ids=some), some)
            part = envs.recv()
            order = np.argsort(part.env_ids)  # they came as they were ready
            found += [part.rewards[order], part.terminated[order], part.truncated[order]]
        else:
            found.append(envs.step(envs.random_action(seed=drawn)))
    return found


def written(state: Any) -> Any:
    """The same as it is once it was in a file."""
    return decode(encode(state, "the state"))


@pytest.mark.slow("plays whole episodes in worker processes")
@settings(max_examples=30)
@given(
    kind=st.sampled_from([*WALKS, *SCRIPTED, "simple_spread"]),
    copied=st.booleans(),
    mode=st.sampled_from(MODES),
    backend=st.sampled_from(BACKENDS),
    into=st.sampled_from(BACKENDS),
    moment=st.integers(0, 12),
    done_on=st.sampled_from(["all", "any"]),
    seed=st.integers(0, 1 << 20),
)
def test_episodes_go_on_as_they_did(
    kind: str, copied: bool, mode: str, backend: str, into: str, moment: int, done_on: str, seed: int
) -> None:
    copied = copied or kind not in WALKS
    factories = walks(kind, N) if kind in WALKS else factories_of(kind, N)
    options: Any = {"autoreset_mode": mode, "done_on": done_on, "env_state": "deepcopy" if copied else None}
    with vectorize(backend, factories, **options) as envs:
        envs.reset(seed=seed)
        play(envs, moment, seed, mode)
        saved = envs.get_state()
        kept = encode(saved, "the state")
        want = play(envs, 15, seed + 1, mode)
        envs.set_state(saved)
        same(play(envs, 15, seed + 1, mode), want)
    same(encode(saved, "the state"), kept)  # nobody has written into it
    with vectorize(into, factories, **options) as other:
        other.set_state(written(saved))
        same(play(other, 15, seed + 1, mode), want)


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=4)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
@pytest.mark.parametrize("kind", sorted(OBJECTS))
def test_observations_that_are_objects_come_back(kind: str, backend: str) -> None:
    if kind in ("custom", "inside Dict and Tuple"):
        pytest.skip("a class of the user's own is no plain data")
    factories = [partial(ObjectEnv, kind, "text", env_index=i, late=bool(i)) for i in range(2)]
    with vectorize(backend, factories, env_state="deepcopy") as envs:
        envs.reset(seed=1)
        play(envs, 4, 0)
        saved = envs.get_state()
        want = play(envs, 10, 1)
        obs, _ = envs.set_state(written(saved))
        same(obs, envs.set_state(saved)[0])
        same(play(envs, 10, 1), want)


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("options", [{"max_episode_steps": 4}, {"pad": True}, {"pad": True, "max_episode_steps": 3}])
def test_marlvecs_own_wrappers_bring_theirs(options: dict[str, Any]) -> None:
    make = partial(marlvec.make, "simple_tag", 3, backend="sync", env_state="deepcopy", **options)
    with make() as envs, make() as other:
        envs.reset(seed=2)
        play(envs, 6, 0)
        saved = envs.get_state()
        want = play(envs, 12, 1)
        other.set_state(saved)
        same(play(other, 12, 1), want)
        with marlvec.make("simple_tag", 3, backend="sync", env_state="deepcopy", pad="pad" in options) as plain:
            plain.reset(seed=0)
            if "max_episode_steps" in options:
                with pytest.raises(EnvRaised, match="expected the state of an env with the same marlvec wrappers"):
                    plain.set_state(saved)
                refused(EnvRaised, "without max_episode_steps", other.set_state, plain.get_state())


# --- branching


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_one_state_goes_into_many_envs_and_they_go_on_alike(backend: str) -> None:
    with vectorize(backend, walks("parallel", N)) as envs:
        envs.reset(seed=5)
        play(envs, 5, 0)
        saved = envs.get_state([2])
        for _ in range(2):
            obs, infos = envs.set_state(saved, env_ids=range(N))
            assert (obs[..., 1:] == obs[2, :, 1:]).all()  # all but the env's own number
            assert (infos["alive"] == infos["alive"][2]).all()
            for _ in range(6):
                action = envs.random_action(seed=1, env_ids=[0])
                obs, rewards, *_ = envs.step(np.repeat(action, N, axis=0))
                assert (obs[..., 1:] == obs[0, :, 1:]).all()
                assert (rewards == rewards[0]).all()


def test_states_go_where_they_are_sent_and_the_others_are_left_alone() -> None:
    with SyncVectorEnv(walks("parallel", N)) as envs, SyncVectorEnv(walks("parallel", N)) as model:
        for each in (envs, model):
            each.reset(seed=5)
            play(each, 3, 0)
        saved = envs.get_state([3, 1])
        assert saved["env_ids"].tolist() == [3, 1]
        before = envs.get_state()
        obs, _ = envs.set_state(saved, env_ids=[0, 2, 3], from_ids=[1, 3, 1])
        for to, of in ((0, 1), (1, 1), (2, 3), (3, 1)):
            same(obs[to][:, 1:], before["rows"]["obs/0/0"][of][:, 1:])
        envs.set_state(before)
        same(play(envs, 10, 2), play(model, 10, 2))
        with pytest.raises(ArgumentError, match="state of 2 envs for 3 envs: choose which with from_ids="):
            envs.set_state(saved, env_ids=[0, 1, 2])
        with pytest.raises(ArgumentError, match=r"from_ids: expected one of \[3, 1\] for each of 2 envs"):
            envs.set_state(saved, env_ids=[0, 1], from_ids=[3, 2])
        envs.set_state(saved, env_ids=[0, 1])
        with SyncVectorEnv(walks("parallel", 2)) as small:
            refused(ArgumentError, r"state of envs \[3, 1\] for 2 envs: choose with env_ids=", small.set_state, saved)
            small.set_state(saved, env_ids=[0, 1])


def test_the_stream_of_random_actions_is_in_a_state_of_all_envs_alone() -> None:
    with SyncVectorEnv(walks("parallel", N)) as envs:
        envs.reset(seed=5)
        whole, part = envs.get_state(), envs.get_state([0, 1, 2, 3])
        drawn = [envs.random_action() for _ in range(3)]
        envs.set_state(whole)
        same([envs.random_action() for _ in range(3)], drawn)
        envs.set_state(part)
        envs.set_state(whole, env_ids=range(N))
        assert any((envs.random_action() != one).any() for one in drawn)


# --- who can, and what is refused


def test_an_env_without_a_state_says_what_to_do() -> None:
    with marlvec.make([*walks("single in wrappers", 1), plain_single], backend="sync") as envs:
        assert list(envs.state_obstacles()) == [1]
        envs.reset(seed=0)
        refused(ArgumentError, r"get_state\(\): env 1: Plain has no get_state\(\) .*'deepcopy'", envs.get_state)
        saved = envs.get_state([0])
        refused(ArgumentError, r"set_state\(\): env 1: ", envs.set_state, saved, env_ids=[1])
        envs.set_state(saved)


class Plain(gymnasium.Env[Any, Any]):
    """Says nothing of its state, which is in attributes."""

    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3, *SPACE.shape), np.float32)

    def __init__(self) -> None:
        self.walk = Walk(0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.walk.begin(seed)
        return np.stack([self.walk.see(0)] * 3), {}

    def step(self, action: Any) -> Any:
        rewards, ended, _ = self.walk.move(dict.fromkeys(self.walk.left[:1], int(action)))
        return np.stack([self.walk.see(0)] * 3), sum(rewards.values()), ended.get(0, True), False, {}


def plain_single() -> Any:
    return Plain()


class Elsewhere(Plain):
    """Keeps a part of its state where no copy of its attributes finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (k for k in range(10**9))  # a generator

    def step(self, action: Any) -> Any:
        obs, _, ended, cut, infos = super().step(action)
        return obs, float(next(self.hidden)), ended, cut, infos


class Global(Plain):
    def step(self, action: Any) -> Any:
        obs, _, ended, cut, infos = super().step(action)
        return obs, float(np.random.random()), ended, cut, infos  # noqa: NPY002


@pytest.mark.parametrize("kind", [Elsewhere, Global])
def test_an_env_whose_attributes_are_not_its_state_is_refused(kind: Any) -> None:
    with pytest.raises(
        ArgumentError, match=f"{kind.__name__}, restored .* does not replay: rewards differ after 1 calls"
    ):
        SyncVectorEnv([kind], env_state="deepcopy")


class Boxed(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.hidden = iter(range(10**9))


def test_a_wrapper_that_cannot_be_copied_is_named() -> None:
    with SyncVectorEnv([lambda: Boxed(PlainSingleWalk(0))]) as envs:
        assert "Boxed.hidden (builtins.range_iterator)" in envs.state_obstacles()[0]


class Unplain(ParallelWalk):
    def get_state(self) -> Any:
        return {"walk": self.walk}


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_what_an_env_says_has_to_be_plain_data(backend: str) -> None:
    with vectorize(backend, [partial(Unplain, 0)]) as envs:
        envs.reset(seed=0)
        refused(SerialisationError, r"env 0.* the result of walk.get_state\(\)\['walk'\] cannot", envs.get_state)
        envs.step(envs.random_action())  # it costs no episode


class Handle:
    """Frees something when it goes, as objects do that stand for one of a library written in C."""

    freed: ClassVar[list[int]] = []

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        self.freed.append(self.number)


class Streams(Plain):
    """Draws from random streams of all kinds, and has an object that is its own."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (np.random.MT19937, np.random.Philox, np.random.PCG64, np.random.PCG64DXSM, np.random.SFC64)
        self.streams = [np.random.Generator(kind(3)) for kind in kinds]
        self.legacy = [np.random.RandomState(4), np.random.RandomState(np.random.Philox(5))]
        self.drawn = 0.0
        self.handle = Handle(7)

    def step(self, action: Any) -> Any:
        obs, _, ended, cut, infos = super().step(action)
        self.drawn = sum(float(np.float32(one.standard_normal())) for one in [*self.streams, *self.legacy])
        return obs, self.drawn, ended, cut, infos


def test_objects_that_free_something_are_not_copied() -> None:
    with SyncVectorEnv([Streams], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        Handle.freed.clear()
        handle, state = envs.call("handle")[0], envs.get_state()
        assert envs.set_state(written(state))
        assert envs.call("handle")[0] is handle
        assert not Handle.freed


class Tangled(Plain):
    """Has objects that are held several times, by keys, values, tuples and themselves."""

    def __init__(self) -> None:
        super().__init__()
        here, there, self.screen = (1, 2), (3, 4), memoryview(b"screen")
        self.exits = {here: [there], there: [here]}
        self.named = {"start": here, here: {there: here}}
        self.screens = [self.screen, {"main": self.screen}]
        ring: list[Any] = []
        self.ring = (ring, deque([ring]), {"ring": ring})
        ring += [self.ring, (self.ring,), frozenset([here])]
        self.ring[1].append(self.ring)
        self.hooks = np.array([self.screens, None], object)
        self.hooks[1] = (self.hooks, self.walk.see)


def test_a_graph_of_attributes_keeps_its_form() -> None:
    with SyncVectorEnv([Tangled, Tangled], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        screens = envs.call("screen")
        state = envs.get_state()
        assert envs.set_state(written(state))
        for k, env in enumerate(envs.call("unwrapped")):
            here, there = env.exits
            assert env.screen is screens[k] is env.screens[0] is env.screens[1]["main"]
            assert env.exits == {here: [there], there: [here]}
            assert env.exits[here][0] is there
            assert env.exits[there][0] is here is env.named["start"] is list(env.named)[1]
            ring = env.ring[0]
            assert ring[0] is env.ring is ring[1][0] is env.ring[1][1]
            assert env.ring[1][0] is ring is env.ring[2]["ring"]
            assert env.hooks[1][0] is env.hooks
            assert env.hooks[1][1].__self__ is env.walk
        same(state, envs.get_state())


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"kind": "again", "number": 10**6}, "refers to object 1000000, which it does not contain"),
        ({"kind": "tuple", "number": 10**6, "items": [{"kind": "again", "number": 10**6}]}, "contains itself"),
    ],
)
def test_a_file_whose_graph_has_no_end_or_no_beginning_is_refused(value: Any, error: str) -> None:
    with SyncVectorEnv([Tangled], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        state = written(saved)
        attributes_of(state)["exits"] = value
        refused(EnvRaised, error, envs.set_state, state)
        envs.set_state(saved)


def first_rule() -> int:
    return 1


def second_rule() -> int:
    return 2


class Registers(Plain):
    """Has objects that cannot be copied as keys and members, alone and in tuples."""

    def __init__(self) -> None:
        super().__init__()
        screen = memoryview(b"screen")
        self.by_rule = {first_rule: 1, second_rule: [screen], (np.float32, "b"): {first_rule: second_rule}}
        self.kinds = {int, np.float32, frozenset([Walk]), (first_rule, 2), re.compile("a"), np.dtype(np.int8)}
        self.screens = {screen: "main", ("pair", screen): [screen]}
        self.shown = {screen}
        self.listeners: Any = defaultdict(list)
        self.listeners["reset"].append(first_rule)


def test_objects_that_cannot_be_copied_may_be_keys_and_members() -> None:
    with SyncVectorEnv([Registers, Registers], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        state = written(envs.get_state())
        expected = [dict(env.by_rule) for env in envs.call("unwrapped")]
        kinds, screens = Registers().kinds, [list(env.shown) for env in envs.call("unwrapped")]
        for env in envs.call("unwrapped"):  # in another order, and not all of them
            env.by_rule = dict(reversed(env.by_rule.items()))
            env.kinds.add("more")
            env.listeners["step"].append(second_rule)
        envs.set_state(state)
        for env, by_rule, (screen,) in zip(envs.call("unwrapped"), expected, screens, strict=True):
            assert list(env.by_rule.items()) == list(by_rule.items())
            assert env.by_rule[second_rule][0] is screen
            assert env.kinds == kinds
            assert env.listeners == {"reset": [first_rule]}
            assert next(iter(env.shown)) is next(iter(env.screens)) is env.screens["pair", screen][0] is screen


class Late(Plain):
    """Its list has an object that a later attribute has, too."""

    def __init__(self) -> None:
        super().__init__()
        screen = memoryview(b"screen")
        self.queue, self.rules = [screen], [first_rule]
        self.table = {(0, 1): {"screen": screen}, "rule": first_rule}


def test_an_object_is_taken_from_a_later_place_where_its_first_is_empty() -> None:
    with SyncVectorEnv([Late], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        state = written(envs.get_state())
        (env,) = envs.call("unwrapped")
        screen = env.queue.pop()
        env.rules.clear()
        envs.set_state(state)
        assert env.queue[0] is env.table[0, 1]["screen"] is screen
        assert env.rules == [first_rule]
        env.queue.clear()
        env.table[0, 1]["screen"] = None  # nothing is taken for it that is of another kind
        with pytest.raises(
            EnvRaised,
            match=r"Late\.queue\[0\]: the saved env has an object there that cannot be copied "
            r"\(builtins\.memoryview\), this env has none",
        ):
            envs.set_state(state)
        assert env.queue == []


class TwoScreens(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.screens = {memoryview(b"one"): 1, memoryview(b"two"): 2}


def test_keys_that_cannot_be_told_apart_are_refused() -> None:
    """None is taken for another, and no two for one."""
    words = r"a key of TwoScreens\.screens: expected one object \(builtins\.memoryview\) that cannot be copied, got 2"
    refused(ArgumentError, words, SyncVectorEnv, [TwoScreens], env_state="deepcopy")

    class Named(TwoScreens):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = self.screens

    with SyncVectorEnv([Named], env_state="deepcopy") as envs:  # attributes say which is which
        envs.reset(seed=0)
        state = written(envs.get_state())
        (env,) = envs.call("unwrapped")
        env.screens = {env.two: 5, env.one: 6}
        envs.set_state(state)
        assert env.screens == {env.one: 1, env.two: 2}
        del env.screens[env.one]
        del env.one
        refused(EnvRaised, r"Named\.screens: expected 2 different keys or members, got 1", envs.set_state, state)


class Hashed:
    """Its hash needs an attribute, and its attribute needs the hash: `copy.deepcopy` cannot copy it, either."""

    name: str
    friends: set[Any]

    def __hash__(self) -> int:
        return hash((self.name, len(self.friends)))

    def __eq__(self, other: object) -> bool:
        return self is other


class Unhashable(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.hashed = Hashed.__new__(Hashed)
        self.hashed.name, self.hashed.friends = "a", set()
        self.hashed.friends.add(self.hashed)


def test_the_reason_names_the_kind_of_a_raw_error() -> None:
    with pytest.raises(
        ArgumentError, match="cannot be restored from a copy of its attributes: AttributeError: .*no attribute"
    ):
        SyncVectorEnv([Unhashable], env_state="deepcopy")


def attributes_of(state: Any) -> Any:
    return state["envs"][0]["env"]["user"]["layers"][-1][1]


@pytest.mark.slow("plays whole episodes in worker processes")
def test_a_file_makes_no_objects_that_are_none_of_the_envs(tmp_path: Path) -> None:
    """A module of a package names what it has imported, and finalisers of those would do what a file says."""
    victim = tmp_path / "victim"
    victim.touch()
    closer = {"file": 1, "delete": True, "name": str(victim), "close_called": False}
    with SyncVectorEnv([Streams], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        for name in (
            f"{__name__}:tempfile._TemporaryFileCloser",
            "tempfile:_TemporaryFileCloser",
            f"{__name__}:Handle",
            f"{__name__}:Path",
        ):
            state = written(saved)
            attributes_of(state)["handle"] = {"kind": "object", "number": 99, "class": name, "attributes": closer}
            refused(EnvRaised, r"Streams\.handle is an object of the class .*, (which|of which)", envs.set_state, state)
            gc.collect()
            assert victim.exists()
        envs.set_state(saved)


def test_a_random_stream_is_not_put_where_it_would_read_beside_its_numbers() -> None:
    with SyncVectorEnv([Streams], env_state="deepcopy") as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        places = (
            ("streams", 0, lambda of: of["state"], "pos", 625),
            ("streams", 1, lambda of: of, "buffer_pos", 5),
            ("legacy", 0, lambda of: of["state"], "pos", 625),
            ("legacy", 1, lambda of: of, "buffer_pos", 5),
        )
        for name, k, within, key, beyond in places:
            for place in (-1, beyond, 10**9):
                state = written(saved)
                within(attributes_of(state)[name]["items"][k]["state"])[key] = place
                refused(EnvRaised, rf"expected a position from 0 to {beyond - 1}, got {place}", envs.set_state, state)
        state = written(saved)
        attributes_of(state)["streams"]["items"][0]["state"]["bit_generator"] = "BitGenerator"
        refused(EnvRaised, "", envs.set_state, state)
        envs.set_state(saved)


def test_pools_and_simulators_outside_say_that_they_have_none() -> None:
    with marlvec.make("CartPole-v1", 2, backend="pool") as envs:
        assert set(envs.state_obstacles()) == {0, 1}
        refused(ArgumentError, "envs 0, 1: CartPole-v1 keeps", envs.get_state)
    with pytest.raises(ArgumentError, match="a pool keeps its envs' states"):
        marlvec.make("CartPole-v1", 2, backend="pool", env_state="deepcopy")
    with pytest.raises(ArgumentError, match="env_state must be one of 'deepcopy', got 'copy'"):
        marlvec.make("CartPole-v1", 2, env_state="copy")


def test_states_of_other_envs_are_refused_and_nothing_is_changed() -> None:
    with SyncVectorEnv(walks("parallel", 2)) as envs, SyncVectorEnv(walks("slot", 2)) as others:
        for each in (envs, others):
            each.reset(seed=0)
        refused(ArgumentError, "env: expected 'walk', got a state of 'slot_walk'", envs.set_state, others.get_state())
        refused(ArgumentError, "expected a state from get_state.., got", envs.set_state, {"rows": 1})
        saved = envs.get_state()
        with pytest.raises(ArgumentError, match="rows: reward: expected float64"):
            envs.set_state({**saved, "rows": {**saved["rows"], "reward": saved["rows"]["reward"][:, :2]}})
        refused(ArgumentError, "expected a list of 2 states", envs.set_state, {**saved, "envs": saved["envs"][:1]})
        with pytest.raises(ArgumentError, match=r"envs\[1\]: expected the state of an env"):
            envs.set_state({**saved, "envs": [saved["envs"][0], {**saved["envs"][1], "phase": 9}]})
        refused(ArgumentError, "format: expected 1, got a state of 0", envs.set_state, {**saved, "format": 0})
        envs.step(envs.random_action())


@pytest.mark.slow("plays whole episodes in worker processes")
def test_whatever_is_wrong_in_a_state_is_said_before_anything_changes() -> None:
    texts = [partial(ObjectEnv, "text", "text", env_index=i) for i in range(2)]
    with (
        SyncVectorEnv(walks("parallel", 2), on_fault="mask") as envs,
        SyncVectorEnv(texts, on_fault="mask", env_state="deepcopy") as others,
    ):
        for each in (envs, others):
            each.reset(seed=0)
            each.random_action(seed=1)
            saved, again = each.get_state(), each.get_state()
            for bad in changes_of(saved):
                refused(ArgumentError, "", each.set_state, bad)
                same(each.get_state(), again)
            each.step(each.random_action(seed=2))


def test_an_adapter_takes_no_list_of_other_agents() -> None:
    for kind in ("parallel", "turns"):
        with SyncVectorEnv(walks(kind, 1)) as envs:
            envs.reset(seed=0)
            saved = envs.get_state()
            bad = written(saved)
            bad["envs"][0]["env"]["agents"]["status"].pop()
            refused(EnvRaised, "status: expected 3 values, one for each agent", envs.set_state, bad)
            envs.set_state(saved)  # nothing of the other is left
            same(envs.get_state(), saved)


def changes_of(saved: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """States with one thing in them that is wrong."""
    for odd in (None, "odd", -1, 1 << 70, [], {}, np.zeros(1), np.full(2, -1), np.zeros((2, 2), np.bool_)):
        for name in saved.keys() - {"autoreset"}:
            if not (name == "actions" and odd is None):
                yield {**saved, name: odd}
        for part in ("rows", "recovery"):
            for name in saved[part]:
                yield {**saved, part: {**saved[part], name: odd}}
        for name in ("phase", "done", "ended", "next_seed"):
            if (name, str(odd)) not in {("next_seed", "None"), ("next_seed", str(1 << 70)), ("ended", "[]")}:
                yield {**saved, "envs": [saved["envs"][0], {**saved["envs"][1], name: odd}]}
    yield {**saved, "envs": [saved["envs"][0], {**saved["envs"][1], "ended": [99]}]}
    yield {**saved, "envs": [saved["envs"][0], None]}
    yield {**saved, "agents": [*saved["agents"][1:], np.zeros(3)]}
    yield {**saved, "recovery": {**saved["recovery"], "masked": np.array([True, False])}}


def test_an_episode_that_is_over_goes_on_in_the_same_mode_only() -> None:
    with (
        SyncVectorEnv(walks("slot", 2), autoreset_mode="next_step") as envs,
        SyncVectorEnv(walks("slot", 2), autoreset_mode="disabled") as rollouts,
    ):
        envs.reset(seed=0)
        rollouts.set_state(envs.get_state())  # both run: what follows their end is the vectorizer's own
        while envs.step(envs.random_action())[4]["alive"].any(1).all():
            pass
        with pytest.raises(
            ArgumentError, match="autoreset_mode: expected a state of .* are over; save a state while they run"
        ):
            rollouts.set_state(envs.get_state())


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_nothing_is_saved_while_a_call_is_pending_or_after_the_end(backend: str) -> None:
    envs = vectorize(backend, walks("parallel", 2))
    with envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        envs.step_send(envs.random_action())
        for call in (envs.get_state, lambda: envs.set_state(saved), envs.state_obstacles):
            refused(BusyError, r"while step\(\) is pending", call)
        envs.step_fetch()
    for call in (envs.get_state, lambda: envs.set_state(saved)):
        refused(ClosedError, "", call)


class Picky(ParallelWalk):
    def set_state(self, state: Any) -> None:
        if self.walk.index == 1:
            raise RuntimeError("not I")
        super().set_state(state)


@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_an_env_that_cannot_take_its_state_has_no_episode(backend: str) -> None:
    with vectorize(backend, [partial(Picky, i) for i in range(3)]) as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        want = envs.set_state(envs.get_state([0]))[0]
        refused(EnvRaised, "not I", envs.set_state, saved)
        refused(NotResetError, r"envs \[1\]", envs.step, envs.random_action(env_ids=[0]))
        envs.reset(env_ids=[1])
        obs, *_ = envs.step(np.zeros((3, 3), np.int64))
        assert (obs[0, :, 2] == want[0, :, 2] + 1).all()


def test_who_drives_the_envs_can_be_told() -> None:
    with SyncVectorEnv(walks("parallel", 2)) as envs:
        envs.reset(seed=0)
        count = envs.drive_count
        saved = envs.get_state()
        assert envs.drive_count == count
        envs.set_state(saved)
        assert envs.drive_count > count


# --- faults


class Fragile(ParallelWalk):
    """Raises when it is told to."""

    def step(self, actions: dict[str, Any]) -> Any:
        if 2 in actions.values():
            raise RuntimeError("broken")
        return super().step(actions)


def calm(envs: VectorEnv, k: int) -> list[Any]:
    return [envs.step(np.random.default_rng(t).integers(0, 2, (envs.num_envs, 3))) for t in range(k)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize("backend", HERE_AND_AWAY)
def test_restarts_go_on_with_their_seeds(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Env 1 is built anew before and after the state was saved: each time its next seed is the one that was due."""
    make = partial(vectorize, backend, [partial(Fragile, i) for i in range(3)], on_fault="restart")
    breaking = np.zeros((3, 3), np.int64)
    breaking[1] = 2
    with make() as envs:
        envs.reset(seed=3)
        calm(envs, 2)
        envs.step(breaking)
        saved = envs.get_state()
        want = [*calm(envs, 2), envs.step(breaking)[0], *calm(envs, 12)]
    with make() as other:
        other.set_state(written(saved))
        same([*calm(other, 2), other.step(breaking)[0], *calm(other, 12)], want)


def test_masked_envs_stay_masked(caplog: pytest.LogCaptureFixture) -> None:
    make = partial(SyncVectorEnv, [partial(Fragile, i) for i in range(3)], on_fault="mask")
    breaking = np.zeros((3, 3), np.int64)
    breaking[1] = 2
    with make() as envs, make() as other, SyncVectorEnv([partial(Fragile, i) for i in range(3)]) as third:
        envs.reset(seed=3)
        whole = envs.get_state()
        envs.step(breaking)
        saved = envs.get_state()
        want = calm(envs, 6)
        other.reset(seed=0)
        other.set_state(written(saved))
        assert other.masked_env_ids == (1,)
        same(calm(other, 6), want)
        refused(ArgumentError, r"envs \[1\] are masked for good", envs.set_state, whole)
        envs.set_state(whole, env_ids=[0, 2], from_ids=[1, 2])
        refused(ArgumentError, r"envs \[1\] are masked: that requires on_fault='mask'", third.set_state, saved)


def test_a_fault_that_nobody_was_told_of_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with vectorize("async", walks("parallel", 2), num_workers=2, on_fault="restart") as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        os.kill(envs.worker_pids[1], signal.SIGKILL)
        refused(EnvFault, "", envs.get_state)
        for call in (envs.get_state, lambda: envs.set_state(saved)):
            refused(StateError, r"envs \[1\] lost their episodes to a fault", call)
        envs.set_state(envs.get_state([0]))
        assert envs.step(np.zeros((2, 3), np.int64))[4]["fault"][1]
        want = vectorize("sync", walks("parallel", 2))
        with want:
            want.set_state(saved)
            envs.set_state(saved)
            same(calm(envs, 8), calm(want, 8))


# `save_state` and `load_state`: states of envs in files, through which they go on bit by bit.


def carts(num_envs: int, backend: str = "sync") -> marlvec.VectorEnv:
    return marlvec.make("CartPole-v1", num_envs, backend=backend, env_state="deepcopy")


def walk(envs: marlvec.VectorEnv, steps: int) -> list[bytes]:
    return [envs.step(envs.random_action(seed=t))[0].tobytes() for t in range(steps)]


@pytest.mark.mostly_slow("plays whole episodes in worker processes", quick=2)
@pytest.mark.parametrize("backend", ["sync", "async"])
def test_envs_go_on_from_a_file(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    with carts(3, backend) as envs, carts(1) as one:
        envs.reset(seed=0)
        walk(envs, 3)
        marlvec.save_state(path, envs.get_state())
        expected = walk(envs, 60)
        envs.set_state(marlvec.load_state(path))
        assert walk(envs, 60) == expected
        obs, _ = envs.set_state(marlvec.load_state(path))
        alone, _ = one.set_state(marlvec.load_state(path), env_ids=[0], from_ids=[2])
        np.testing.assert_array_equal(alone[0], obs[2])
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"], "no drafts"


def test_what_is_no_state_is_not_written(tmp_path: Path) -> None:
    for wrong in ({"envs": 1}, None, np.zeros(3)):
        with pytest.raises(ArgumentError, match=r"save_state\(\): expected a state from envs.get_state\(\), got"):
            marlvec.save_state(tmp_path / "state.npz", wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_is_no_file_of_a_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"

    def unread(words: str) -> None:
        refused(CheckpointError, words, marlvec.load_state, path)

    unread("state.npz")
    with carts(2) as envs:
        envs.reset(seed=0)
        marlvec.save_state(path, envs.get_state())
        found: dict[str, Any] = read_archive(path)["envs"]
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        unread("state.npz")
        path.write_bytes(whole.replace(b"$items", b"$itemx", 1) if b"$items" in whole else whole[:-1] + b"0")
        unread("state.npz")
        write_archive(path, {"envs": {**found, "format": 2}})
        unread("of the format 2; this version reads 1")
        write_archive(path, {"envs": {"format": 1}})
        unread("holds a state of envs of the format 1")
        write_archive(path, {"envs": {"$nothing": 1}})
        unread("holds no state of envs: expected one of")
        marlvec.Collector(envs, marlvec.RandomPolicy(), seed=0).save(path)
        unread(r"holds no state of envs, but \['collector'\]")
