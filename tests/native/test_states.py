"""States of native envs: nothing that a world depends on is left out, and they go on bit by bit elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the extra `native` is not installed")

import marlvec
from marlvec.errors import ArgumentError
from marlvec.native.catalog import _entries, native_entry
from marlvec.registry import resolve
from marlvec.vector.buffers import Buffers
from marlvec.vector.in_process import NativeVectorEnv
from tests.native.scenarios import ARGUMENTS
from tests.vector.support.reference import MODES
from tests.vector.test_saved_states import play, same, written

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
    "rware/rware-tiny-4ag-easy-v2": [
        {},
        {"msg_bits": 2, "max_steps": 9, "column_height": 1, "request_queue_size": 2},
    ],
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
                with pytest.raises(ArgumentError, match=f"{name}: expected numbers"):
                    envs.set_state(state)
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
        with pytest.raises(ArgumentError, match=r"connect_four_v3 \(Heir\) does not say .*: declare state_names"):
            envs.get_state()


def test_states_of_other_worlds_are_refused() -> None:
    make = partial(marlvec.make, "simple_spread", 2, backend="native")
    with make() as envs, make(N=4) as larger, make(max_episode_steps=5) as limited:
        for each in (envs, larger, limited):
            each.reset(seed=0)
        saved = envs.get_state()
        with pytest.raises(ArgumentError, match="agents: expected"):
            larger.set_state(saved)
        with pytest.raises(ArgumentError, match="set max_episode_steps in both vectorizers, or in none"):
            limited.set_state(saved)
        arrays = {**saved["envs"]["arrays"], "pos": np.zeros((2, 3, 2))}
        with pytest.raises(ArgumentError, match=r"pos: expected float64 of \(2, 6, 2\), got float64 of \(2, 3, 2\)"):
            envs.set_state({**saved, "envs": {**saved["envs"], "arrays": arrays}})
        with pytest.raises(ArgumentError, match="phases: expected some of"):
            envs.set_state({**saved, "envs": {**saved["envs"], "phase": np.full(2, 5, np.uint8)}})
        envs.step(envs.random_action())  # nothing was changed
        with marlvec.make("simple_spread", 2, backend="sync", env_state="deepcopy") as plain:
            plain.reset(seed=0)
            with pytest.raises(ArgumentError, match="kind: expected 'env', got a state of 'native'"):
                plain.set_state(saved)
            with pytest.raises(ArgumentError, match="kind: expected 'native', got a state of 'env'"):
                envs.set_state(plain.get_state())


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
