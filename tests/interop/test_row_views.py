"""Views with one row per agent carry the numbers of a plain loop over the raw envs: all of them, in whole episodes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import marlvec
from marlvec import SyncVectorEnv
from marlvec.errors import ActionError, ArgumentError, MissingExtraError
from marlvec.registry import resolve
from marlvec.testing import RaisingEnv, Script, ScriptedParallelEnv, decode
from tests.interop.envs import SampleEnv
from tests.interop.row_views import SB3, CleanRL, Puffer, Seen, SuperSuit, check_rows, pufferlib_stand_in
from tests.vector.support.kinds import SCRIPTED, Factories, factories_of, recorded
from tests.vector.support.reference import Call, record

# --- views with one row per agent carry the numbers of a plain loop over the raw envs: all of them, in whole episodes


N = 3
ARCHERS = "pettingzoo/butterfly/knights_archers_zombies"
CONNECT_FOUR = "pettingzoo/classic/connect_four"

VIEWS: dict[str, type[Seen]] = {"sb3": SB3, "cleanrl": CleanRL, "supersuit": SuperSuit, "pufferlib": Puffer}


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest) -> Iterator[type[Seen]]:
    with pufferlib_stand_in():
        yield VIEWS[request.param]


def factories(kind: str) -> Factories:
    if kind == ARCHERS:  # such zombies come soon, and an archer dies at once
        kwargs = {"spawn_delay": 2, "max_zombies": 30, "line_death": True, "max_cycles": 60}
        return [partial(resolve(ARCHERS), **kwargs)] * 2
    return factories_of(kind, N)


@cache
def calls_of(kind: str) -> list[Call]:
    return record(factories(kind), "same_step") if kind == ARCHERS else recorded(kind, N, "same_step")


@pytest.mark.mostly_slow("steps or trains with another library", quick=4)
@pytest.mark.parametrize("kind", [*SCRIPTED, "single", "simple_spread", CONNECT_FOUR, ARCHERS])
def test_rows_are_what_a_plain_loop_gives(view: type[Seen], kind: str) -> None:
    """Agents that enter, wait and leave; games of two; archers that die while the others fight on."""
    calls = calls_of(kind)
    with SyncVectorEnv(factories(kind)) as envs:
        if view is Puffer and not isinstance(envs.spec.groups[0].observation_space, Box):
            with pytest.raises(ArgumentError, match="expected one Box of observations"):
                Puffer(envs)
            return
        ends = check_rows(view(envs), calls, envs.agents)
    assert ends >= 3 * len(factories(kind))
    if kind == ARCHERS:
        assert any(
            (call.expected.flags["alive"].any(axis=1) & ~call.expected.flags["alive"].all(axis=1)).any()
            for call in calls
        )


@pytest.mark.parametrize("name", ["sb3", "supersuit"])
def test_returned_arrays_never_change(name: str) -> None:
    """Also where the vectorizer hands out views: models keep an observation until after the next step."""
    calls = [call for call in calls_of("parallel") if call.kind == "step"]
    with SyncVectorEnv(factories("parallel"), copy=False) as envs:
        seen = VIEWS[name](envs)
        kept = [(obs := seen.reset(0)[0], obs.copy())]
        for call in calls[:12]:
            got = seen.step(np.concatenate(list(call.actions[0])))
            kept += [(got.obs, got.obs.copy()), (got.rewards, got.rewards.copy()), (got.ended, got.ended.copy())]
    assert all(array.tobytes() == then.tobytes() for array, then in kept)


# --- several groups


@pytest.mark.mostly_slow("builds views of several libraries", quick=2)
@pytest.mark.parametrize("name", VIEWS)
def test_several_groups_are_refused_and_padding_makes_them_one(name: str) -> None:
    """A predator and the prey see, as rows, what they see in the raw env."""
    with (
        pufferlib_stand_in(),
        marlvec.make("simple_tag", 2, backend="sync") as envs,
        pytest.raises(ArgumentError, match=r"one group; .* has 2: adversary, agent\. make\(..., pad=True\)"),
    ):
        VIEWS[name](envs)
    calls = recorded("simple_tag", 2, "same_step")
    with pufferlib_stand_in(), marlvec.make("simple_tag", 2, backend="sync", pad=True) as envs:
        seen = VIEWS[name](envs)
        assert seen.rows == 2 * envs.agent_num
        places = [
            (a, g, j) for g, agents in enumerate(((0, 1, 2), (3,))) for j, a in enumerate(agents)
        ]  # agent, group, place in it
        for call in calls:
            obs, got = seen.reset(call.seed)[0] if call.kind == "reset" else None, None
            if call.kind == "step":
                actions = np.concatenate(call.actions, axis=1).reshape(-1)
                got = seen.step(actions)
                obs = got.obs
                rewards = call.expected.rewards.reshape(-1)
                assert got.rewards.tobytes() == rewards.astype(got.rewards.dtype).tobytes()
            for a, g, j in places:
                (leaf,) = call.expected.obs[g]
                mine = obs.reshape(2, 4, -1)[:, a]
                assert mine[:, : leaf.shape[-1]].tobytes() == np.ascontiguousarray(leaf[:, j]).tobytes()
                assert not mine[:, leaf.shape[-1] :].any()
                if got is not None and got.final is not None:
                    for i in np.flatnonzero(call.expected.done).tolist():
                        last = got.final(4 * i + a)[: leaf.shape[-1]]
                        assert last.tobytes() == call.expected.final[g][0][i, j].tobytes()


# --- what is refused, and faults


@pytest.mark.parametrize("name", VIEWS)
def test_dicts_that_are_not_one_for_each_env_are_told_from_arrays(name: str) -> None:
    with pufferlib_stand_in(), marlvec.make("simple_spread", 2, backend="sync") as envs:
        seen = VIEWS[name](envs)
        seen.reset(0)
        one = dict.fromkeys(envs.agents, 0)
        for wrong, words in (
            ({"hunter": [0, 0]}, r"got a dict with keys \['hunter'\]"),
            ([one] * 6, "got dicts with keys"),
        ):
            with pytest.raises(ActionError, match=rf"shape \(6,\), one row per env and agent, {words}.* np\.array\("):
                seen.step(wrong)
        assert len(seen.step([one, one]).rewards) == 6


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_another_autoreset_mode_is_refused(view: type[Seen], mode: str) -> None:
    with (
        marlvec.make("simple_spread", 2, backend="sync", autoreset_mode=mode) as envs,
        pytest.raises(ArgumentError, match=f"expected autoreset_mode='same_step', got autoreset_mode='{mode}'"),
    ):
        view(envs)


def test_a_lost_episode_is_cut_at_the_last_observation(view: type[Seen]) -> None:
    """Env 1 raises in its third step and is built anew: nothing of that step is known."""
    envs = marlvec.make(partial(RaisingEnv, 9, agent_num=2, at=2, only_env=1), 2, backend="sync", on_fault="restart")
    with envs:
        seen = view(envs)
        seen.reset(0)
        for _ in range(2):
            before = seen.step(np.zeros(4, int)).obs
        if isinstance(seen, CleanRL):
            seen.lost[1] = True
        got = seen.step(np.zeros(4, int))
        assert got.ended.tolist() == [False, False, True, True]
        if got.final is not None:
            for row in (2, 3):
                assert np.array_equal(got.final(row), before[row])
        if got.said is not None:
            assert [info.get("fault", False) for info in got.said] == [False, False, True, True]
            assert [info["TimeLimit.truncated"] for info in got.said] == [False, False, True, True]
            assert not any("episode" in info for info in got.said)
        stamps = [decode(row) for row in got.obs]
        assert [(stamp.env, stamp.t, stamp.agent) for stamp in stamps] == [(0, 3, 0), (0, 3, 1), (1, 0, 0), (1, 0, 1)]
        if isinstance(seen, CleanRL):
            seen.lost[1] = False
        assert not seen.step(np.zeros(4, int)).ended.any()


# --- the view for PufferLib, by its protocol: it compiles extensions, and cannot be had everywhere
# `tests.interop.test_row_views` plays whole episodes through it.


def test_results_are_written_into_the_buffers_that_it_is_given() -> None:
    """Slices of larger arrays, as PufferLib's vectorizers hand them out."""
    from_above = {
        "observations": np.full((8, 18), -1, np.float32),
        "rewards": np.full(8, -1, np.float32),
        "terminals": np.ones(8, np.bool_),
        "truncations": np.ones(8, np.bool_),
        "masks": np.zeros(8, np.bool_),
        "actions": np.zeros(8, np.int32),
    }
    with pufferlib_stand_in(), marlvec.make("simple_spread", 2, backend="sync") as envs:
        from marlvec.interop.pufferlib import PufferView

        view = PufferView(envs, {name: array[1:7] for name, array in from_above.items()})
        assert view.num_agents == 6
        assert (view.single_observation_space.shape, view.single_action_space) == ((18,), Discrete(5))
        obs, infos = view.reset(seed=[3])  # as its Multiprocessing does
        first = obs.copy()
        obs, infos = view.reset(seed=3)
        assert first.tobytes() == obs.tobytes()
        assert infos == []
        with marlvec.make("simple_spread", 2, backend="sync") as plain:
            want = plain.reset(seed=3)[0].reshape(6, 18)
            assert from_above["observations"][1:7].tobytes() == obs.tobytes() == want.tobytes()
            assert (from_above["masks"][1:7].all(), from_above["terminals"][1:7].any()) == (True, False)
            for step in range(25):
                actions = np.full(6, step % 5, np.int32)
                infos = view.step(actions)[4]
                wanted = plain.step(actions.reshape(2, 3))
                assert from_above["observations"][1:7].tobytes() == wanted[0].reshape(6, 18).tobytes()
                assert from_above["rewards"][1:7].tobytes() == wanted[1].reshape(6).astype(np.float32).tobytes()
        assert from_above["truncations"].tolist() == [True] * 8
        assert not from_above["terminals"][1:7].any()
        assert [(info["agent"], info["episode_length"]) for info in infos] == [
            ("agent_0", 25),
            ("agent_1", 25),
            ("agent_2", 25),
        ] * 2
        for edge in (0, 7):
            assert (from_above["observations"][edge] == -1).all()
            assert from_above["rewards"][edge] == -1
        view.close()


def test_masks_say_whose_rows_count() -> None:
    script = Script([0, 0], [2, 4], ["terminated", "truncated"])
    with (
        pufferlib_stand_in(),
        SyncVectorEnv([partial(ScriptedParallelEnv, [script], agent_num=2)]) as envs,
    ):
        from marlvec.interop.pufferlib import PufferView

        view = PufferView(envs)
        view.reset()
        seen = []
        for _ in range(4):
            view.step(np.zeros(2, np.int32))
            seen.append((view.masks.tolist(), view.terminals.tolist(), view.truncations.tolist()))
        up, down, both = [True, False], [False, True], [True, True]
        none = [False, False]
        assert seen == [(both, none, none), (down, up, none), (down, none, none), (both, none, down)]


@pytest.mark.parametrize(
    ("spaces", "said"),
    [
        ((Discrete(3), Discrete(4)), "expected one Box of observations"),
        ((Box(0, 1, (2,), np.float32), Discrete(4, start=3)), "expected choices that start at 0"),
    ],
)
def test_spaces_that_it_cannot_hold_are_refused(spaces: tuple[Any, Any], said: str) -> None:
    with pufferlib_stand_in(), SyncVectorEnv([partial(SampleEnv, *spaces)]) as envs:
        from marlvec.interop.pufferlib import PufferView

        with pytest.raises(ArgumentError, match=said):
            PufferView(envs)


@pytest.mark.parametrize(
    ("module", "library", "hint"),
    [
        ("pufferlib", "pufferlib", r"puffer\.ai/docs"),
        ("sb3", "stable_baselines3", r"pip install 'marlvec\[sb3\]'"),
        ("sb3.decisions", "stable_baselines3", r"pip install 'marlvec\[sb3\]'"),
    ],
)
def test_a_library_that_is_missing_is_named(
    module: str, library: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"marlvec.interop.{module}"
    folder = name.removesuffix(".decisions")
    for loaded in [key for key in sys.modules if key.startswith(folder) or key.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=hint):
        importlib.import_module(name)
