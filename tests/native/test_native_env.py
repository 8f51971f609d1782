"""Native envs as a vectorizer: threads, modes, streams, what is refused; and their states."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")

import marlvec
from marlvec import Collector, NativeVectorEnv, VectorEnv, make
from marlvec.errors import (
    ActionError,
    ArgumentError,
    BrokenError,
    ClosedError,
    ContractError,
    EnvRaised,
    MissingExtraError,
    NotResetError,
)
from marlvec.native import NativeEnv
from marlvec.native.catalog import _entries, native_entry
from marlvec.native.native_env import PaddedNativeEnv
from marlvec.policies import RandomPolicy
from marlvec.registry import resolve
from marlvec.testing import check_vector_env
from marlvec.vector import async_env as auto
from marlvec.vector.buffers import Buffers
from marlvec.vector.thread_team import ThreadTeam
from tests.native.support import ARGUMENTS, factories, maker, native
from tests.vector.support.reference import MODES, refused, replay, same
from tests.vector.support.reference import record as played
from tests.vector.test_saved_states import play, written

# The native backend as a vectorizer: threads, modes, partial resets, streams, control calls, and what it refuses.


@pytest.mark.mostly_slow("compiles, and plays whole games", quick=5)
@pytest.mark.parametrize("name", ["simple_spread", "simple_tag"])
@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
def test_it_keeps_the_contract(name: str, continuous: bool) -> None:
    """One group and several."""
    assert len(check_vector_env(maker(name, 3, continuous_actions=continuous))) == 12


@pytest.mark.slow("compiles kernels")
def test_threads_keep_the_contract() -> None:
    assert len(check_vector_env(maker("simple_spread", 5, num_workers=3), seed=1)) == 12


@pytest.mark.parametrize("mode", MODES)
def test_numbers_do_not_depend_on_threads(mode: str) -> None:
    def play(workers: int) -> list[Any]:
        with native("simple_tag", 37, num_workers=workers, autoreset_mode=mode, max_cycles=6, state=True) as envs:
            assert envs.num_workers == workers
            trace = [envs.reset(seed=4)]
            for t in range(15):
                if mode == "disabled" and t in (6, 12):
                    trace.append(envs.reset(env_ids=range(37)))
                if t == 8:
                    trace.append(envs.reset(seed=[None, 7, 2**40], env_ids=[30, 2, 11]))
                    if mode == "disabled":
                        continue
                trace.append(envs.step(envs.random_action()))
                if mode == "disabled" and trace[-1][3].any():
                    trace.append(envs.reset(env_ids=trace[-1][3].any(axis=1)))
            return trace

    first = play(1)
    for workers in (2, 5):
        same(tuple(first), tuple(play(workers)))


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize("name", ["simple_spread", "lbf/Foraging-8x8-2p-3f-v3", "rware/rware-tiny-2ag-v2", "pursuit"])
def test_numbers_of_hundreds_of_steps_do_not_depend_on_threads(name: str) -> None:
    """One call after the other, so that threads do not sleep between them; episodes end in many of them."""
    make = partial(marlvec.make, name, 300, backend="native", max_episode_steps=40)
    with make(num_workers=1) as a, make(num_workers=2) as b:
        same(a.reset(seed=3), b.reset(seed=3))
        for t in range(200):
            actions = a.random_action(seed=t)
            same(a.step(actions), b.step(actions))


@pytest.mark.parametrize(("num_envs", "is_shared"), [(127, False), (128, True)])
def test_few_envs_are_stepped_by_the_caller(monkeypatch: pytest.MonkeyPatch, num_envs: int, is_shared: bool) -> None:
    monkeypatch.setattr("marlvec.vector.native_shard._FEWEST", 64)
    calls, run = [], ThreadTeam.run
    monkeypatch.setattr(ThreadTeam, "run", lambda team, works: (calls.append(len(works)), run(team, works)))
    with native("simple", num_envs, num_workers=2) as envs:
        envs.reset(seed=0)
        assert calls == ([2] if is_shared else [])
        envs.step(envs.random_action())
        assert calls == ([2, 2] if is_shared else [])


def test_large_results_are_copied_by_all_threads_and_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlvec.vector.native_shard._LARGE", 1)
    with native("simple_tag", 7, num_workers=3) as a, native("simple_tag", 7, num_workers=1) as b:
        same(a.reset(seed=0), b.reset(seed=0))
        kept = a.step(a.random_action())
        wanted = b.step(b.random_action())
        same(a.step(a.random_action()), b.step(b.random_action()))
        same(kept, wanted)
        kept[0]["agent"][:] = 0


@pytest.mark.mostly_slow("compiles kernels", quick="each")
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_plain_loop(mode: str, copy: bool) -> None:
    calls = played(factories("simple_tag", 3, max_cycles=5), mode, interrupt=0.2)
    with native("simple_tag", 3, max_cycles=5, autoreset_mode=mode, copy=copy) as envs:
        replay(envs, calls)


def test_a_limit_cuts_at_its_step() -> None:
    with native("simple_spread", 2, max_cycles=9, max_episode_steps=4) as envs:
        envs.reset(seed=0)
        cut = [envs.step(envs.random_action())[3].all() for _ in range(9)]
    assert np.flatnonzero(cut).tolist() == [3, 7], "each 4th step"


def pair(name: str, num_envs: int, **options: Any) -> tuple[VectorEnv, VectorEnv]:
    return make(name, num_envs, backend="native", **options), make(name, num_envs, backend="sync", **options)


@pytest.mark.slow("compiles, and plays whole games")
@settings(max_examples=25)
@given(
    st.data(),
    st.sampled_from(MODES),
    st.sampled_from([None, 1, 4]),
    st.booleans(),
    st.sampled_from(["simple_spread", "simple_push"]),
)
def test_any_calls_bring_what_sync_brings(data: Any, mode: str, limit: int | None, grouped: bool, name: str) -> None:
    """Halves, partial resets, streams: whatever is called, with a time limit or without."""
    a, b = pair(name, 3, max_cycles=5, autoreset_mode=mode, max_episode_steps=limit, grouped=grouped, state=True)
    ids = st.lists(st.sampled_from(range(3)), min_size=1, unique=True)
    with a, b:
        same(a.reset(seed=9), b.reset(seed=9))
        for _ in range(data.draw(st.integers(1, 12))):
            kind = data.draw(st.sampled_from(["step", "step", "reset", "send"]))
            over = b._call_state._no_episode.copy()
            if kind == "reset" or (over.any() and mode == "disabled"):
                chosen = sorted({*data.draw(ids), *np.flatnonzero(over).tolist()})
                seeds = [data.draw(st.one_of(st.none(), st.integers(0, 2**64 - 1))) for _ in chosen]
                same(a.reset(seed=seeds, env_ids=chosen), b.reset(seed=seeds, env_ids=chosen))
            elif kind == "step":
                same(a.step(a.random_action()), b.step(b.random_action()))
            else:
                chosen = data.draw(ids)
                for envs in (a, b):
                    envs.send(envs.random_action(env_ids=chosen), chosen)
                first, second = a.recv(), b.recv()
                assert first.env_ids.tolist() == second.env_ids.tolist()
                same((first.obs, first.rewards, first.infos), (second.obs, second.rewards, second.infos))
        if not b._call_state._no_episode.any():
            same(a.state(), b.state())


@pytest.mark.mostly_slow("compiles kernels", quick=12)
@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_specs_are_those_of_the_reference(name: str) -> None:
    a, b = pair(name, 1)
    with a, b:
        assert a.spec.difference(b.spec) is None
        assert (a.spec.name, a.metadata, a.groups) == (b.spec.name, b.metadata, b.groups)
        assert a.observation_space == b.observation_space
        assert a.action_space == b.action_space


@pytest.mark.mostly_slow("compiles kernels", quick=2)
@pytest.mark.parametrize("name", ["simple_world_comm", "simple_crypto"])
def test_a_frame_is_the_one_that_the_reference_draws(name: str) -> None:
    a, b = pair(name, 2, render_mode="rgb_array")
    with a, b:
        a.reset(seed=5)
        b.reset(seed=5)
        for _ in range(27):  # and again after an autoreset
            a.step(a.random_action())
            b.step(b.random_action())
        for first, second in zip(a.render(), b.render(), strict=True):
            assert first.tobytes() == second.tobytes()
        assert len(a.render([1])) == 1


def test_one_renderer_alone() -> None:
    with native("simple", 2, render_mode="single_rgb_array") as envs:
        envs.reset(seed=0)
        assert envs.render([0])[0].shape == (700, 700, 3)
        refused(EnvRaised, "made without a render mode", envs.render, [1])


def test_worlds_can_be_asked_and_changed() -> None:
    with native("simple_spread", 3, N=2) as envs:
        envs.reset(seed=0)
        assert envs.get_attr("name") == ("simple_spread_v3",) * 3
        assert [pos.shape for pos in envs.get_attr("pos")] == [(4, 2)] * 3
        envs.step(envs.random_action())
        assert [int(steps) for steps in envs.get_attr("steps", [2, 0])] == [1, 1]
        assert envs.env_is_wrapped(object) == (False,) * 3
        for name in ("advance_curriculum", "step_worlds"):
            refused(EnvRaised, "backend='async'", envs.call, name)
        for name in ("max_cycles", "pos", "note"):
            with pytest.raises(
                EnvRaised, match=rf"attribute '{name}' .*: compiled envs read only their arrays.*backend='async'"
            ):
                envs.set_attr(name, 3)
        envs.set_attr("_note", "mine")
        assert envs.get_attr("_note") == ("mine",) * 3


BAD: list[tuple[str, Callable[[np.ndarray], None]]] = [
    ("too large", lambda actions: actions.__setitem__((2, 1), 5)),
    ("negative", lambda actions: actions.__setitem__((2, 1), -1)),
]


@pytest.mark.parametrize(("what", "spoil"), BAD, ids=[what for what, _ in BAD])
@pytest.mark.parametrize("validate", ["sample", "off"])
def test_bad_actions_are_refused_before_any_world_moves(
    what: str, spoil: Callable[[np.ndarray], None], validate: str
) -> None:
    """In every call, also where values are otherwise looked at now and then or never."""
    with native("simple_spread", 3, validate=validate, max_cycles=100) as envs:
        envs.reset(seed=0)
        for _ in range(20):
            envs.step(envs.random_action())
        actions = envs.random_action()
        before = envs.state()
        spoiled = actions.copy()
        spoil(spoiled)
        refused(ActionError, r"env 2, agent 'agent_1'", envs.step, spoiled)
        assert envs.state().tobytes() == before.tobytes()
        envs.step(actions)


@pytest.mark.parametrize("value", [np.nan, 1.5, -0.1, np.inf])
def test_bad_boxes_are_refused(value: float) -> None:
    with native("simple_tag", 2, continuous_actions=True) as envs:
        envs.reset(seed=0)
        actions = envs.random_action()
        actions["agent"][1, 0, 3] = value
        refused(ActionError, r"group 'agent'.*env 1, agent 'agent_0'", envs.step, actions)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("benchmark_data", {"benchmark_data": True}),
    ("wrappers", {"wrappers": [lambda env: env]}),
    ("different arguments", {"env_kwargs": [{"N": 2}, {"N": 3}]}),
    ("render_mode='human'", {"render_mode": "human"}),
]


@pytest.mark.parametrize(("words", "options"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_not_supported_says_which_backend_is(words: str, options: dict[str, Any]) -> None:
    refused(ArgumentError, f"{re.escape(words)}.*backend='async'", native, "simple_spread", 2, **options)


@pytest.mark.slow("compiles scenarios")
@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize("name", ["simple_speaker_listener", "simple_crypto", "simple_world_comm", "simple_spread"])
def test_padded_worlds_are_padded_envs(name: str, continuous: bool) -> None:
    a, b = pair(name, 3, pad=True, continuous_actions=continuous, max_cycles=4, state=True, max_episode_steps=3)
    with a, b:
        assert a.spec.difference(b.spec) is None
        assert a.groups == b.groups
        same(a.reset(seed=2), b.reset(seed=2))
        for t in range(10):
            ids = [[0, 1, 2], [2, 0]][t % 2]
            for envs in (a, b):
                envs.send(envs.random_action(env_ids=ids), ids)
            first, second = a.recv(), b.recv()
            same((first.obs, first.rewards, first.infos), (second.obs, second.rewards, second.infos))
        same(a.reset(env_ids=[1]), b.reset(env_ids=[1]))


def test_a_padded_action_that_an_agent_has_not_got_is_refused() -> None:
    with native("simple_speaker_listener", 2, pad=True) as envs:
        envs.reset(seed=0)
        with pytest.raises(ActionError, match=r"env 1, agent 'speaker_0': expected one of Discrete\(3\), got 3"):
            envs.step(np.array([[2, 4], [3, 4]]))
        envs.step(np.array([[2, 4], [2, 4]]))


def test_other_envs_have_no_native_form() -> None:
    refused(ArgumentError, "no native form; backend='async'", make, "CartPole-v1", 2, backend="native")
    refused(ArgumentError, "another env beside it", make, ["simple", "simple_push"], backend="native")


WRONG: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ArgumentError, "N: expected an int of at least 1, got 0", {"N": 0}),
    (ArgumentError, "local_ratio: expected a number from 0 to 1, got 2", {"local_ratio": 2}),
    (ArgumentError, "max_cycles: expected", {"max_cycles": 1.5}),
    (ArgumentError, "num_workers must be", {"num_workers": 3}),
    (ArgumentError, "is for worker processes", {"step_timeout": 1.0}),
    (ArgumentError, "supports 'human', 'rgb_array'", {"render_mode": "ansi"}),
    (TypeError, "colour", {"colour": "red"}),
]


@pytest.mark.parametrize(("error", "words", "options"), WRONG, ids=[words for _, words, _ in WRONG])
def test_wrong_arguments_are_told(error: type[Exception], words: str, options: dict[str, Any]) -> None:
    refused(error, words, native, "simple_spread", 2, **options)


AUTO: list[tuple[str, dict[str, Any], str]] = [
    ("simple_spread", {}, "native"),
    ("simple_spread", {"benchmark_data": True}, "async"),
    ("simple_spread", {"wrappers": [lambda env: env]}, "async"),
    ("simple_spread", {"step_timeout": 9.0}, "async"),
    ("CartPole-v1", {}, "async"),
]


@pytest.mark.parametrize(("name", "options", "backend"), AUTO)
def test_auto_is_native_where_it_can_be(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], backend: str
) -> None:
    monkeypatch.setattr(auto, "usable_cores", lambda: 2)
    monkeypatch.setattr(auto, "_seconds_of_a_step", lambda *_: 1.0)  # else processes are worth it
    with make(name, 2, backend="auto", **options) as envs:
        assert envs.backend == backend
        assert repr(envs).startswith(f"<{backend.capitalize()}VectorEnv of ")
        envs.reset(seed=0)


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> Any:
        return original(marlvec.native.NativeEntry(self.id, "marlvec.no_such_module:Env"))

    original = marlvec.native.NativeEntry.load
    monkeypatch.setattr(marlvec.native.NativeEntry, "load", load)
    refused(MissingExtraError, r"marlvec\[native\]", native, "simple", 2)
    with make("simple", 2, backend="auto", num_workers=1) as envs:
        assert envs.backend == "async"


def test_calls_at_the_wrong_time() -> None:
    with native("simple", 2, autoreset_mode="disabled", max_cycles=1) as envs:
        refused(NotResetError, "", envs.step, np.zeros((2, 1), int))
        envs.reset(seed=0)
        envs.step(envs.random_action())
        refused(NotResetError, r"\[0, 1\]", envs.step, np.zeros((2, 1), int))
    refused(ClosedError, "", envs.reset)


def test_close_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    envs = native("simple", 8, num_workers=4)
    envs.reset(seed=0)
    envs.step_send(envs.random_action())
    envs.close()
    envs.close()
    assert threading.active_count() == before


class Fails(NativeEnv):
    """Raises in the middle of a step, as no compiled function would."""

    name, agents = "fails", ("agent_0",)
    error: BaseException = RuntimeError("no more")

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        simple = marlvec.native.catalog.native_entry("mpe/simple_v3")
        assert simple is not None
        whole = simple.load()(1).spec()
        self.observation_spaces, self.action_spaces = whole.observation_spaces, whole.action_spaces

    def reset(self, ids: Any) -> None:
        self.set_alive(ids)

    def step(self, ids: Any) -> None:
        if ids[0] == 0:
            raise self.error


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kernel_that_raises_breaks_the_vectorizer(workers: int) -> None:
    with NativeVectorEnv(Fails(4), num_workers=workers) as envs:
        envs.reset(seed=0)
        refused(RuntimeError, "no more", envs.step, np.zeros((4, 1), int))
        refused(BrokenError, "in the middle of a step: no more", envs.reset)


class Masking(Fails):
    """Gives a mask in its infos, where nothing reads it."""

    has_infos = True

    def __init__(self, num_envs: int, space: Any, others: tuple[Any, ...] = ()) -> None:
        super().__init__(num_envs)
        self.action_spaces = (space, *others)
        self.agents = tuple(f"agent_{a}" for a in range(len(self.action_spaces)))
        self.observation_spaces *= len(self.agents)

    def infos(self, ids: Any) -> Any:
        return {int(i): {"agent_0": {"action_mask": [1, 0]}} for i in ids if i == 1}


@pytest.mark.parametrize("space", [Discrete(2), MultiBinary(2)])
def test_a_mask_in_infos_is_refused(space: Any) -> None:
    words = f"fails: env 1: info of agent 'agent_0': 'action_mask': expected none.*{re.escape(str(space))}"
    with NativeVectorEnv(Masking(2, space)) as envs, pytest.raises(ContractError, match=words):
        envs.reset(seed=0)
    with NativeVectorEnv(Masking(2, Box(0, 1, (2,)))) as envs:
        assert envs.reset(seed=0)[1]["__agents__"]["action_mask"][1].tolist() == [[False], [True]]


def test_a_mask_in_infos_of_padded_envs_is_refused() -> None:
    """Padding declares a mask of its own, which the env did not."""
    padded = PaddedNativeEnv(Masking(2, Discrete(2), (Discrete(3),)))
    with NativeVectorEnv(padded) as envs, pytest.raises(ContractError, match="info of agent 'agent_0'"):
        envs.reset(seed=0)


def test_an_interrupt_costs_the_episodes_and_no_more() -> None:
    env = Fails(4)
    env.error = KeyboardInterrupt()
    with NativeVectorEnv(env) as envs:
        envs.reset(seed=0)
        refused(KeyboardInterrupt, "", envs.step, np.zeros((4, 1), int))
        refused(NotResetError, "", envs.step, np.zeros((4, 1), int))
        envs.reset()


@pytest.mark.slow("compiles scenarios")
@pytest.mark.parametrize("name", ["simple_spread", "simple_tag"])
@pytest.mark.parametrize("batch_mode", ["truncate", "complete"])
def test_the_collector_brings_what_it_brings_of_sync(name: str, batch_mode: str) -> None:
    def collect(backend: str) -> list[Any]:
        with make(name, 3, backend=backend, max_cycles=6, state=True) as envs:
            mapping = {envs.agents[a]: group for group, members in envs.groups.items() for a in members}
            policies = {group: RandomPolicy() for group in envs.groups}
            collector = Collector(envs, policies, mapping, batch_mode=batch_mode, seed=3)
            return [collector.collect(env_steps=40)[group] for _ in range(2) for group in envs.groups]

    for first, second in zip(collect("native"), collect("sync"), strict=True):
        assert first.keys() == second.keys()
        for column, _ in first.items():
            assert np.asarray(first[column]).tobytes() == np.asarray(second[column]).tobytes(), column


# States of native envs: nothing that a world depends on is left out, and they go on bit by bit elsewhere.


GAMES: dict[str, list[dict[str, Any]]] = {
    "tictactoe": [{}],
    "connect_four": [{}],
    "rps": [{"num_actions": 5, "max_cycles": 4}],
    "kuhn_poker": [{}],
    "leduc_poker": [{}],
    "pursuit": [{"max_cycles": 9, "n_pursuers": 3, "n_evaders": 2, "x_size": 5, "surround": False}],
}
GRIDS: dict[str, list[dict[str, Any]]] = {
    "lbf/Foraging-8x8-2p-3f-v3": [{}, {"sight": 2, "players": 4}],
    "lbf/Foraging-grid-2s-6x6-3p-2f-v3": [{}],
    "rware/rware-tiny-4ag-easy-v2": [{}, {"msg_bits": 2, "max_steps": 9, "column_height": 1, "request_queue_size": 2}],
}
ENTRIES = [*sorted(_entries), *GRIDS]
ALL = [(name, kwargs) for name, found in {**ARGUMENTS, **GAMES, **GRIDS}.items() for kwargs in found]
N = 5
# Written from the rest of the state before anything is read from it.
SCRATCH = {"_exp", "_seen", "_reached", "_inside", "_shared", "_stray", "_order", "_key", "_angle"}


@pytest.mark.slow("compiles, and plays whole games")
@settings(max_examples=60)
@given(
    case=st.sampled_from(ALL),
    mode=st.sampled_from(MODES),
    moment=st.integers(0, 40),
    options=st.sampled_from([{}, {"max_episode_steps": 6}, {"pad": True}, {"state": True}]),
    seed=st.integers(0, 1 << 20),
)
def test_worlds_go_on_as_they_did(
    case: tuple[str, dict[str, Any]], mode: str, moment: int, options: dict[str, Any], seed: int
) -> None:
    name, kwargs = case
    if options.get("state") and name in {**GAMES, **GRIDS}:
        options = {}
    make = partial(marlvec.make, name, N, backend="native", autoreset_mode=mode, **options, **kwargs)
    with make() as envs, make() as other:
        envs.reset(seed=seed)
        play(envs, moment, seed, mode)
        saved = envs.get_state()
        want = play(envs, 20, seed + 1, mode)
        envs.set_state(saved)
        same(play(envs, 20, seed + 1, mode), want)
        spoil(other)
        other.set_state(written(saved))
        same(play(other, 20, seed + 1, mode), want)


def spoil(envs: Any) -> None:
    """Fill with nonsense what is said to be written before it is read."""
    env = getattr(envs._env, "_env", envs._env)
    for name in SCRATCH - {"_seen"}:  # of neighbours, those who are not there are written once and for all
        if isinstance(part := getattr(env, name, None), np.ndarray):
            part[...] = 1


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_array_of_a_world_is_in_its_state(entry: str) -> None:
    """What has as many rows as there are worlds is the state, a view of the rows, or scratch."""
    sizes = 31, 37
    each = [build(entry, n) for n in sizes]
    for env in each:
        env.attach(Buffers(env.spec(), env.num_envs))
    arrays = [list(found(env)) for env in each]
    per_world = {name for (name, one), (_, other) in zip(*arrays, strict=True) if (len(one), len(other)) == sizes}
    env = each[0]
    buffers = list(env.rows.arrays())
    views = {name for name, array in arrays[0] if any(np.shares_memory(array, row) for row in buffers)}
    known = {id(array) for array in env.state_arrays().values()}
    saved = {name for name, array in arrays[0] if id(array) in known}
    assert per_world - saved - views <= {name for name in per_world if name.split(".")[0] in SCRATCH}
    assert saved <= per_world


def build(entry: str, num_envs: int) -> Any:
    native = native_entry(entry)
    assert native is not None
    return native.load()(num_envs, **resolve(entry).entry.kwargs)


def found(thing: Any, path: str = "", depth: int = 2) -> Any:
    """All arrays with a first axis among the attributes of an env, and among those of its parts."""
    own = thing._asdict() if hasattr(thing, "_asdict") else getattr(thing, "__dict__", {})
    for name, value in own.items():
        if isinstance(value, np.ndarray) and value.ndim:
            yield f"{path}{name}", value
        elif depth and name not in ("rows", "turn_rows"):
            yield from found(value, f"{path}{name}.", depth - 1)


@pytest.mark.mostly_slow("compiles kernels", quick=12)
@pytest.mark.parametrize("entry", ENTRIES)
def test_numbers_that_kernels_would_follow_out_of_their_arrays_are_refused(entry: str) -> None:
    """Compiled code looks at no bounds: what a file says would be read, and written, anywhere."""
    with marlvec.make(entry, 3, backend="native") as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action(seed=0))
        saved = envs.get_state()
        limits = envs._env.state_limits()  # type: ignore[attr-defined]
        arrays = saved["envs"]["arrays"]
        assert limits.keys() >= {"mover", "goal", "game.deals", "hands", "heights", "holding"} & arrays.keys()
        for name, array in arrays.items():
            least, most = limits.get(name, (None, None))
            odd: list[Any] = [np.nan, np.inf] if array.dtype.kind == "f" else []
            odd += [1e300] if array.dtype == np.float64 else []
            odd += [] if least is None else [least - 1, most + 1]
            for number in odd if array.size else ():
                changed = array.copy()
                changed.flat[-1] = number
                state = {**saved, "envs": {**saved["envs"], "arrays": {**arrays, name: changed}}}
                refused(ArgumentError, f"{name}: expected numbers", envs.set_state, state)
        same(envs.get_state(), saved)


@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_a_game_in_which_all_is_said_goes_no_further(name: str) -> None:
    """No such game runs; one in a file writes nothing behind its moves."""
    with marlvec.make(name, 2, backend="native") as envs:
        envs.reset(seed=0)
        saved = envs.get_state()
        moves = "game.moves" if name == "leduc_poker" else "moves"
        saved["envs"]["arrays"][moves][0] = 1
        envs.set_state(saved)
        envs.step(envs.random_action(seed=0))
        assert np.isin(envs.get_state([1])["envs"]["arrays"][moves], (-1, 0, 1, 2)).all()


def test_one_world_goes_into_many() -> None:
    with marlvec.make("connect_four", 64, backend="native", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        for _ in range(6):
            envs.step(envs.random_action(seed=1))
        root = envs.get_state([7])
        for _ in range(2):
            obs, infos = envs.set_state(root, env_ids=range(64))
            assert (obs == obs[7]).all()
            assert (infos["action_mask"] == infos["action_mask"][7]).all()
            envs.step(envs.random_action())


def test_a_native_env_that_does_not_say_what_its_state_is_cannot_be_saved() -> None:
    class Heir(_entries["pettingzoo/classic/connect_four_v3"].load()):  # type: ignore[misc]  # found at run time
        """Might have more than its base."""

    with NativeVectorEnv(Heir(2)) as envs:
        assert set(envs.state_obstacles()) == {0, 1}
        envs.reset(seed=0)
        refused(ArgumentError, r"connect_four_v3 \(Heir\) does not say .*: declare state_names", envs.get_state)


def test_states_of_other_worlds_are_refused() -> None:
    make = partial(marlvec.make, "simple_spread", 2, backend="native")
    with make() as envs, make(N=4) as larger, make(max_episode_steps=5) as limited:
        for each in (envs, larger, limited):
            each.reset(seed=0)
        saved = envs.get_state()
        refused(ArgumentError, "agents: expected", larger.set_state, saved)
        refused(ArgumentError, "set max_episode_steps in both vectorizers, or in none", limited.set_state, saved)
        arrays = {**saved["envs"]["arrays"], "pos": np.zeros((2, 3, 2))}
        with pytest.raises(ArgumentError, match=r"pos: expected float64 of \(2, 6, 2\), got float64 of \(2, 3, 2\)"):
            envs.set_state({**saved, "envs": {**saved["envs"], "arrays": arrays}})
        with pytest.raises(ArgumentError, match="phases: expected some of"):
            envs.set_state({**saved, "envs": {**saved["envs"], "phase": np.full(2, 5, np.uint8)}})
        envs.step(envs.random_action())  # nothing was changed
        with marlvec.make("simple_spread", 2, backend="sync", env_state="deepcopy") as plain:
            plain.reset(seed=0)
            refused(ArgumentError, "kind: expected 'env', got a state of 'native'", plain.set_state, saved)
            refused(ArgumentError, "kind: expected 'native', got a state of 'env'", envs.set_state, plain.get_state())


@pytest.mark.mostly_slow("compiles kernels", quick=2)
@pytest.mark.parametrize("name", ["kuhn_poker", "leduc_poker"])
def test_a_native_env_alone_in_its_batch_has_a_state_too(name: str) -> None:
    make = partial(marlvec.make, name, 3, backend="sync")
    with make() as envs, make() as other:
        envs.reset(seed=1)
        play(envs, 5, 0)
        saved = envs.get_state()
        want = play(envs, 12, 1)
        other.set_state(written(saved))
        same(play(other, 12, 1), want)
