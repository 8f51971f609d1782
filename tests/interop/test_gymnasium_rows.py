"""The Gymnasium view of envs with several agents: one row each, and padding where an agent is not there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics
from hypothesis import given, settings
from hypothesis import strategies as st

import marlvec
from marlvec import SyncVectorEnv
from marlvec.errors import ArgumentError
from marlvec.interop.gymnasium import GymnasiumVectorEnv
from marlvec.testing import Script, ScriptedParallelEnv, TurnEnv, decode
from tests.interop.envs import SPACES
from tests.interop.frames import rows_of, words
from tests.vector.support.kinds import SCRIPTED, asynchronous, factories_of, recorded, sync
from tests.vector.support.reference import MODES, Call, Frame, assert_same, assert_trees_equal, flatten, record

N = 3


def plain(value: Any) -> Any:
    """Scalars as Python's."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.item() if isinstance(value, np.generic) else value


class Rows:
    """What a frame must look like as rows, put together from what a plain loop over the raw envs gave."""

    def __init__(self, frame: Frame, names: tuple[str, ...], mode: str, *, stepped: bool) -> None:
        agent_num = len(names)
        self.rewards = rows_of(frame.rewards)
        self.terminated, self.truncated = rows_of(frame.flags["terminated"]), rows_of(frame.flags["truncated"])
        self.ended = self.terminated | self.truncated
        self.obs = [rows_of(leaf) for leaf in frame.obs[0]]
        early = self.ended & ~np.repeat(frame.done, agent_num)
        self.infos = words(frame.infos, names)
        last = words(frame.final_infos, names)
        for row, info in enumerate(self.infos):
            i, a = divmod(row, agent_num)
            info |= {"alive": bool(frame.flags["alive"][i, a]), "acting": bool(frame.flags["acting"][i, a])}
            info |= {"reset_mask": bool(frame.reset_mask[i])}
            if frame.masks[0] is not None:
                info["action_mask"] = frame.masks[0][i, a]
            if mode == "same_step" and stepped and self.ended[row]:
                mine = words(frame.infos, names)[row] if early[row] else last[row]
                info |= {"final_obs": rows_of(frame.final[0][0])[row], "final_info": mine}
        if mode == "same_step":
            for leaf in self.obs:
                leaf[early] = 0
        self.stepped = stepped

    def check(self, got: Any, where: str, *, whole: bool = True) -> None:
        """``whole``: whether the call was about all envs; else what the last step said of the others is left out."""
        for mine, expected in zip(flatten(got[0]), self.obs, strict=True):
            assert_same(np.ascontiguousarray(mine), expected, f"{where} obs")
        if self.stepped:
            assert_same(got[1], self.rewards, f"{where} rewards")
            assert_same(np.ascontiguousarray(got[2]), self.terminated, f"{where} terminated")
            assert_same(np.ascontiguousarray(got[3]), self.truncated, f"{where} truncated")
        infos = got[-1]
        for key, value in infos.items():
            assert len(value) == len(self.rewards) or isinstance(value, dict), key
            assert key.startswith("_") or infos["_" + key].shape == self.rewards.shape
        listed = DictInfoToList._convert_info_to_list(_Rows(len(self.rewards)), infos)  # type: ignore[arg-type]
        if not whole:
            for info in (*listed, *self.infos):
                del info["reset_mask"]
        assert_trees_equal([plain(info) for info in listed], self.infos, f"{where} infos")
        assert ("final_obs" in infos) == any("final_obs" in info for info in self.infos)


class _Rows:
    """As much of a vector env as Gymnasium's own reader of infos needs."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self._convert_info_to_list = partial(DictInfoToList._convert_info_to_list, self)  # type: ignore[arg-type]


def replay(view: GymnasiumVectorEnv, calls: list[Call]) -> None:
    """Make these calls through the view and compare every row."""
    envs = view.envs
    for number, call in enumerate(calls):
        where = f"call {number}, {call.kind}"
        frame = Rows(call.expected, envs.agents, envs.autoreset_mode, stepped=call.kind == "step")
        if call.kind == "step":
            frame.check(view.step(rows_of(call.actions[0])), where)
        elif call.env_ids is None:
            frame.check(view.reset(seed=call.seed), where)
        else:
            mask = np.isin(np.arange(view.num_envs) // envs.agent_num, call.env_ids)
            seeds = [None] * envs.num_envs
            for i, seed in zip(call.env_ids, call.seed, strict=True):
                seeds[i] = seed
            frame.check(view.reset(seed=seeds, options={"reset_mask": mask}), where, whole=False)


@pytest.mark.mostly_slow("steps or trains with another library", quick=6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [*SCRIPTED, "simple_spread", "pettingzoo/classic/tictactoe"])
@pytest.mark.parametrize("copy", [True, False], ids=["copies", "views"])
def test_rows_are_what_a_plain_loop_gives(kind: str, mode: str, copy: bool) -> None:
    """Agents that enter, wait and leave, in whole episodes, to the last bit."""
    with sync(kind, N, mode, copy=copy) as envs:
        view = GymnasiumVectorEnv(envs)
        assert view.num_envs == N * envs.agent_num
        replay(view, recorded(kind, N, mode))


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_workers_and_of_a_named_group_are_the_same(mode: str) -> None:
    with asynchronous("masked", N, mode, num_workers=2) as envs:
        replay(GymnasiumVectorEnv(envs), recorded("masked", N, mode))
    with sync("masked", N, mode, grouped=True) as envs:
        replay(GymnasiumVectorEnv(envs), recorded("masked", N, mode))


@settings(max_examples=30)
@given(
    n=st.integers(1, 4),
    agent_num=st.integers(2, 4),
    longest=st.integers(1, 9),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(["parallel", "turns, masked", "keyed"]),
    seed=st.integers(0, 2**32),
)
def test_rows_of_any_script(n: int, agent_num: int, longest: int, mode: str, kind: str, seed: int) -> None:
    factories = factories_of(kind, n, agent_num=agent_num, longest=longest)
    with SyncVectorEnv(factories, autoreset_mode=mode) as envs:
        replay(GymnasiumVectorEnv(envs), record(factories, mode, seed=seed, interrupt=0.1))


class Talker(ScriptedParallelEnv):
    """Says at both levels what Gymnasium and marlvec have words for."""

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        infos = {
            agent: {"alive": 5, "_alive": 6, "shared": 1, "_x": 2, "final_obs": 3, "__common__": 4} for agent in infos
        }
        return *rest, {**infos, "__common__": {"shared": 7, "reset_mask": 8, "elsewhere": 9}}


@pytest.mark.parametrize("mode", MODES)
def test_words_that_are_taken_stand_aside(mode: str) -> None:
    script = Script([0, 0], [2, 3], ["terminated"] * 2)
    view = GymnasiumVectorEnv(
        marlvec.make(partial(Talker, [script], agent_num=2), 1, backend="sync", autoreset_mode=mode)
    )
    view.reset()
    infos = view.step([0, 0])[4]
    assert infos["alive"].tolist() == infos["_alive"].tolist() == [True, True]
    assert infos["shared"].tolist() == [1, 1]
    assert infos["_x"].tolist() == [2, 2]
    assert infos["elsewhere"].tolist() == [9, 9]
    aside = {
        level: {key: (values.tolist(), there.tolist()) for key, (values, there) in infos[level].items()}
        for level in ("__agents__", "__common__")
    }
    everyone = [True, True]
    assert aside["__agents__"] == {
        key: ([n, n], everyone) for key, n in (("alive", 5), ("_alive", 6), ("final_obs", 3), ("__common__", 4))
    }
    assert aside["__common__"] == {"shared": ([7, 7], everyone), "reset_mask": ([8, 8], everyone)}
    infos = view.step([0, 0])[4]
    if mode == "same_step":  # there nothing is taken
        final = infos["final_info"]
        assert {key: final[key].tolist() for key in ("alive", "shared", "_x", "final_obs", "reset_mask")} == {
            "alive": [5, 0],
            "shared": [1, 0],
            "_x": [2, 0],
            "final_obs": [3, 0],
            "reset_mask": [8, 0],
        }
        values, there = final["__common__"]["shared"]
        assert (values.tolist(), there.tolist()) == ([7, 0], [True, False])
    view.close()


def test_the_global_state_is_in_every_row() -> None:
    envs = SyncVectorEnv(
        [partial(ScriptedParallelEnv, [Script.together(2, 2)], agent_num=2, state=True)] * 2, state=True
    )
    view = GymnasiumVectorEnv(envs)
    _, infos = view.reset()
    states = envs.state()
    assert infos["state"].tolist() == states.repeat(2, axis=0).tolist()
    assert "final_state" not in infos
    view.step([0] * 4)
    infos = view.step([0] * 4)[4]
    assert infos["_state"].tolist() == infos["_final_state"].tolist() == [True] * 4
    assert infos["final_state"][:, 2:4].tolist() == [[0, 2]] * 4, "episode and step"
    assert infos["state"][:, 2:4].tolist() == [[1, 0]] * 4
    view.close()


# --- resets and actions


def test_a_partial_reset_shows_nothing_of_an_agent_that_has_just_gone() -> None:
    script = Script([0, 0], [2, 9], ["terminated"] * 2)
    envs = marlvec.make(partial(ScriptedParallelEnv, [script], agent_num=2), 2, backend="sync")
    view = GymnasiumVectorEnv(envs)
    view.reset()
    view.step([0] * 4)
    stepped, _, terminated, _, _ = view.step([0] * 4)
    assert terminated.tolist() == [True, False, True, False]
    obs, infos = view.reset(options={"reset_mask": np.array([False, False, True, True])})
    assert obs[:2].tolist() == stepped[:2].tolist()
    assert obs.any(axis=1).tolist() == infos["alive"].tolist() == [False, True, True, True]
    view.close()


def test_agents_of_an_env_are_reset_together() -> None:
    envs = marlvec.make(ScriptedParallelEnv, 2, backend="sync", autoreset_mode="disabled", agent_num=3)
    view = GymnasiumVectorEnv(envs)
    view.reset(seed=[1, 2])
    with pytest.raises(
        ArgumentError, match=r"the same for all 3 agents.*env 1 \(rows 3 to 5\) has \[True, False, True"
    ):
        view.reset(options={"reset_mask": np.array([True, True, True, True, False, True])})
    with pytest.raises(ArgumentError, match=r"expected shape \(6,\), dtype bool, got shape \(2,\)"):
        view.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(ArgumentError, match="seed: expected one per env, 2 in all, got 6"):
        view.reset(seed=[0] * 6)
    obs, infos = view.reset(seed=[5, 6], options={"reset_mask": np.repeat([False, True], 3)})
    assert [int(decode(row)[2]) for row, alive in zip(obs, infos["alive"], strict=True) if alive] == [
        i for i, alive in zip([0, 0, 0, 1, 1, 1], infos["alive"], strict=True) if alive
    ], "episodes"
    view.close()


def test_several_groups_are_refused() -> None:
    with marlvec.make("simple_tag", 2, backend="sync") as envs:
        with pytest.raises(ArgumentError, match=r"simple_tag_v3 has 2: adversary, .*pad=True") as refusal:
            GymnasiumVectorEnv(envs)
        assert "one group" in str(refusal.value)


def test_sampling_the_view_leaves_the_envs_alone() -> None:
    """An env in this process may draw from the very space that it showed."""
    env = ScriptedParallelEnv(action_space=SPACES["discrete"])
    view = GymnasiumVectorEnv(marlvec.make([lambda: env], backend="sync"))
    env.action_space("agent_0").seed(3)
    expected = [int(draw) for draw in (SPACES["discrete"].sample() for _ in range(5))]
    SPACES["discrete"].seed(3)
    view.single_action_space.seed(1)
    view.single_action_space.sample()
    view.action_space.sample()
    assert [int(SPACES["discrete"].sample()) for _ in range(5)] == expected
    view.close()


def test_a_frame_is_shown_in_every_row_of_its_env() -> None:
    envs = marlvec.make("simple_spread", 2, backend="sync", render_mode="rgb_array")
    view = GymnasiumVectorEnv(envs)
    view.reset(seed=0)
    frames = view.render()
    assert view.render_mode == "rgb_array"
    assert len(frames) == view.num_envs == 6
    assert all(frames[row] is frames[3 * (row // 3)] for row in range(6))
    assert frames[0].shape[2] == 3
    view.close()


# --- Gymnasium's statistics


@pytest.mark.checklist(127)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", [False, True])
def test_statistics_of_rows_are_those_of_agents(mode: str, turns: bool) -> None:
    """Returns are exact whoever ends when; lengths count the row's steps since its last flag, padding included."""
    scripts = [
        Script([0, 0, 0], [2, 4, 5], ["terminated", "truncated", "terminated"]),
        Script([0, 2, 0], [3, 3, 3], ["truncated"] * 3),
    ]
    kind = partial(TurnEnv, agent_num=3) if turns else ScriptedParallelEnv
    view = GymnasiumVectorEnv(marlvec.make(partial(kind, scripts), 2, backend="sync", autoreset_mode=mode))
    envs = RecordEpisodeStatistics(view)
    _, infos = envs.reset(seed=4)
    returns, since = np.zeros(6), np.zeros(6, int)
    resetting = np.zeros(6, bool)  # Gymnasium's wrapper leaves out the one step behind a flag
    told: list[tuple[float, int]] = []
    for _ in range(60):
        over = ~infos["alive"].reshape(2, 3).any(axis=1).repeat(3)
        if mode == "disabled" and over.any():
            _, infos = envs.reset(options={"reset_mask": over})
            returns[over], since[over], resetting[over] = 0, 0, False
            continue
        _, rewards, terminated, truncated, infos = envs.step(np.zeros(6, int))
        returns += rewards
        since += ~resetting
        ended = terminated | truncated
        resetting = ended & (mode != "same_step")
        assert ("episode" in infos) == ended.any()
        if ended.any():
            assert infos["_episode"].tolist() == ended.tolist()
            assert infos["episode"]["r"].tolist() == np.where(ended, returns, 0).tolist()
            assert infos["episode"]["l"].tolist() == np.where(ended, since, 0).tolist()
            told += [(returns[row], since[row]) for row in np.flatnonzero(ended)]
            returns[ended], since[ended] = 0, 0
    assert list(zip(envs.return_queue, envs.length_queue, strict=True)) == told
    assert len(told) > 40
    envs.close()
