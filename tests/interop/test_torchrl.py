"""TorchRL's view gives the numbers of the plain envs, and TorchRL's own parts run on it."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, MultiBinary, MultiDiscrete, Text
from pettingzoo import ParallelEnv

import marlvec
from marlvec import env_seeds
from marlvec.errors import (
    ActionError,
    ArgumentError,
    ContractError,
    MissingExtraError,
    NotResetError,
    UnsupportedSpaceError,
)
from marlvec.testing import KeyedEnv, RaisingEnv
from tests.interop.envs import SPACES, SampleEnv, archers
from tests.vector.support.kinds import SCRIPTED, factories_of, recorded
from tests.vector.support.reference import Call, Frame, assert_same, record

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

from tensordict import TensorDict, TensorDictBase  # noqa: E402
from tensordict.nn import TensorDictModule, TensorDictSequential  # noqa: E402
from torch.distributions import Categorical  # noqa: E402
from torchrl.envs import (  # noqa: E402
    Compose,
    EnvBase,
    InitTracker,
    MarlGroupMapType,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)
from torchrl.modules import MaskedCategorical, MultiAgentMLP, ProbabilisticActor  # noqa: E402
from torchrl.objectives.multiagent import IPPOLoss, MAPPOLoss  # noqa: E402

from marlvec.interop.torchrl import TorchRLEnv  # noqa: E402
from marlvec.testing import ScriptedParallelEnv  # noqa: E402
from marlvec.testing.scripted import Script  # noqa: E402

# --- TorchRL's view gives the numbers of the plain envs: whole episodes, every key, every row


N = 3
MODES = ("same_step", "disabled")
TAG = {"adversary": ["adversary_0", "adversary_1", "adversary_2"], "agent": ["agent_0"]}

Factory = Callable[[], Any]


# --- plain envs, and the view


class Replay:
    """Calls that were recorded of plain envs, made on a view; all that comes is compared.

    In "same_step" mode what was recorded holds the next episode already; TorchRL asks for it.
    """

    def __init__(self, view: TorchRLEnv) -> None:
        self.view = view
        self.names = view.envs.agents
        self.same_step = view.envs.autoreset_mode == "same_step"
        shape = view.envs.num_envs, len(self.names)
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)

    def run(self, calls: list[Call]) -> None:
        td = None
        for number, call in enumerate(calls):
            where, frame = f"call {number}, {call.kind}", call.expected
            if call.kind == "reset":
                td = self.reset(td, frame, call.env_ids, call.seed, where)
                continue
            assert td is not None
            self.act(td, call.actions)
            out = self.view.step(td)
            self.check(out["next"], at_ends(frame, self.view.envs.spec.groups) if self.same_step else frame, where)
            self.check_step(out["next"], frame, where)
            td = step_mdp(out)
            if self.same_step and frame.done.any():
                td = self.reset(td, frame, np.flatnonzero(frame.done).tolist(), None, where)

    def reset(self, td: Any, frame: Frame, ids: list[int] | None, seed: Any, where: str) -> TensorDict:
        if ids is None:
            self.view.set_seed(seed)
            td = self.view.reset()
        else:
            td["_reset"] = torch.zeros(len(frame.done), 1, dtype=torch.bool)
            td["_reset"][ids] = True
            td = self.view.reset(td, seed=seed)
        for flags in (self.terminated, self.truncated):
            flags[slice(None) if ids is None else ids] = False
        self.check(td, frame, where)
        self.check_flags(td, where)
        return td

    def columns(self) -> list[tuple[str, int, int, int, int]]:
        """TorchRL's group and row, the reference's group and place, and the place on the agent axis, of every agent."""
        groups = self.view.envs.spec.groups
        seats = {a: (g, j) for g, group in enumerate(groups) for j, a in enumerate(group.agents)}
        return [
            (group, row, *seats[self.names.index(name)], self.names.index(name))
            for group, members in self.view.group_map.items()
            for row, name in enumerate(members)
        ]

    def act(self, td: TensorDict, actions: list[Any]) -> None:
        for group, members in self.view.group_map.items():
            rows = {row: actions[g][:, j] for name, row, g, j, _ in self.columns() if name == group}
            td[group, "action"] = torch.from_numpy(np.stack([rows[row] for row in range(len(members))], axis=1))

    def check(self, td: TensorDict, frame: Frame, where: str) -> None:
        for group, row, g, j, a in self.columns():
            place, own = f"{where}, {group} {row}", td[group][:, row]
            (leaf,) = frame.obs[g]
            assert_same(own["observation"].numpy(), np.ascontiguousarray(leaf[:, j]), f"{place} observation")
            assert_same(own["mask"].numpy(), np.ascontiguousarray(frame.flags["acting"][:, a]), f"{place} mask")
            if (mask := frame.masks[g]) is not None:
                assert_same(own["action_mask"].numpy(), np.ascontiguousarray(mask[:, j]), f"{place} action_mask")

    def check_step(self, td: TensorDict, frame: Frame, where: str) -> None:
        gone = ~frame.flags["alive"] | frame.done[:, None]
        self.terminated = frame.flags["terminated"] | (self.terminated & gone)
        self.truncated = frame.flags["truncated"] | (self.truncated & gone)
        self.check_flags(td, where)
        for group, row, _, _, a in self.columns():
            assert_same(
                td[group, "reward"][:, row, 0].numpy(), frame.rewards[:, a].astype(np.float32), f"{where} reward"
            )
        cut = frame.done & frame.flags["truncated"].any(axis=1)
        for name, flag in (("done", frame.done), ("truncated", cut), ("terminated", frame.done & ~cut)):
            assert_same(td[name].numpy(), flag[:, None], f"{where} {name}")

    def check_flags(self, td: TensorDict, where: str) -> None:
        for name in ("terminated", "truncated", "done"):
            flags = self.terminated | self.truncated if name == "done" else getattr(self, name)
            for group, row, _, _, a in self.columns():
                assert_same(td[group, name][:, row, 0].numpy(), np.ascontiguousarray(flags[:, a]), f"{where} {name}")


def at_ends(frame: Frame, groups: Any) -> Frame:
    """What is seen in the end, in the place of the next episode's beginning: nothing of those who ended before."""
    done = frame.done
    ended = frame.flags["terminated"] | frame.flags["truncated"]
    obs = [[leaf.copy() for leaf in leaves] for leaves in frame.obs]
    for group, leaves, last in zip(groups, obs, frame.final, strict=True):
        for i in np.flatnonzero(done):
            for j, a in enumerate(group.agents):
                for leaf, final in zip(leaves, last, strict=True):
                    leaf[i, j] = final[i, j] if ended[i, a] else 0
    masks = [None if mask is None else mask | done[:, None, None] for mask in frame.masks]
    return replace(frame, obs=obs, masks=masks, flags={**frame.flags, "acting": frame.flags["acting"] & ~done[:, None]})


def replay(view: TorchRLEnv, calls: list[Call]) -> None:
    Replay(view).run(calls)
    view.close()


# --- the same numbers


@pytest.mark.mostly_slow("steps with TorchRL", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["parallel", "masked", "turns", "turns, masked", "keyed", "float32"])
def test_whole_episodes_of_scripts_are_the_same(kind: str, mode: str) -> None:
    """Births, deaths, turns, masks; some envs are reset in the middle of it."""
    calls = record(factories_of(kind, N), mode, interrupt=0.1)
    replay(TorchRLEnv.make(factories_of(kind, N), backend="sync", autoreset_mode=mode), calls)


@pytest.mark.parametrize("group_map", ["each", "all", {"b": ["agent_2", "agent_0"], "a": ["agent_1"]}])
def test_whole_episodes_are_the_same_in_other_groups(group_map: Any) -> None:
    view = TorchRLEnv.make(factories_of("masked", N), backend="sync", group_map=group_map)
    assert len(view.group_map) in (1, 2, 3)
    replay(view, recorded("masked", N, "same_step"))


@pytest.mark.parametrize("backend", ["async", "thread"])
def test_whole_episodes_are_the_same_from_workers(backend: str) -> None:
    view = TorchRLEnv.make(factories_of("masked", N), backend=backend, num_workers=2)
    replay(view, recorded("masked", N, "same_step"))


@pytest.mark.mostly_slow("steps or trains with another library", quick=3)
@pytest.mark.parametrize("env", ["simple_tag", "knights_archers_zombies", "connect_four"])
def test_whole_episodes_of_real_envs_are_the_same(env: str) -> None:
    """Two groups; agents that die; turns and masks."""
    if env != "simple_tag":
        pytest.importorskip("pygame" if env == "connect_four" else "pymunk")
    factories = [archers] * 2 if env == "knights_archers_zombies" else factories_of(env, 2)
    calls = record(factories, "same_step", episodes=1 if env == "knights_archers_zombies" else 3)
    deaths = sum(bool((call.expected.flags["terminated"].any(axis=1) & ~call.expected.done).any()) for call in calls)
    assert (deaths > 0) == (env == "knights_archers_zombies")
    view = TorchRLEnv.make(factories, backend="sync")
    assert list(view.group_map) == {
        "simple_tag": ["adversary", "agent"],
        "knights_archers_zombies": ["agents"],
        "connect_four": ["player"],
    }.get(env)
    replay(view, calls)


def test_states_and_last_states_are_told() -> None:
    for mode in MODES:
        factories = factories_of("parallel", N)
        plain = marlvec.make(factories, backend="sync", state=True)
        view = TorchRLEnv.make(factories, backend="sync", autoreset_mode=mode, state=True)
        view.set_seed(4)
        td = view.reset()
        _, infos = plain.reset(seed=4)
        for _ in range(20):
            assert_same(td["state"].numpy(), infos["state"], mode)
            td = view.rand_action(td)
            infos = plain.step(td["agent", "action"].numpy())[4]
            td = view.step(td)
            state = infos["state"].copy()
            if "final_state" in infos:
                state[infos["_final_state"]] = infos["final_state"][infos["_final_state"]]
            assert_same(td["next", "state"].numpy(), state, mode)
            td = view.maybe_reset(step_mdp(td))
        plain.close()
        view.close()


@pytest.mark.slow("steps with TorchRL")
@pytest.mark.parametrize("env", ["simple_spread", "connect_four"])
def test_a_seed_decides_whole_episodes(env: str) -> None:
    """Not one step, as PettingZoo's own test does: several episodes, and other seeds give others."""

    def played(seed: int, backend: str = "sync") -> TensorDict:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            view = TorchRLEnv.make(env, 3, backend=backend)
            view.set_seed(seed)
            data = view.rollout(60, break_when_any_done=False)
            view.close()
            return data

    one, same, workers, other = played(5), played(5), played(5, "async"), played(6)
    assert one["next", "done"].sum() >= 3
    assert (one == same).all()
    assert (one == workers).all()
    assert not (one == other).all()


def test_a_seed_is_spread_as_marlvecs_own_and_counts_once() -> None:
    plain = marlvec.make("simple_spread", 3, backend="sync")
    view = TorchRLEnv.make("simple_spread", 3, backend="sync")
    view.set_seed(7)
    for seed in (7, None):
        assert_same(view.reset()["agent", "observation"].numpy(), plain.reset(seed=seed)[0], str(seed))
    td = view.reset(seed=env_seeds(9, 3))
    assert_same(td["agent", "observation"].numpy(), plain.reset(seed=9)[0], "a list")
    view.set_seed(3)  # of envs that are reset one by one, each has its own
    td["_reset"] = torch.tensor([[False], [True], [False]])
    td = view.reset(td)
    obs = plain.reset(seed=3)[0]
    assert_same(td["agent", "observation"][1].numpy(), obs[1], "partial")
    assert_same(view.reset()["agent", "observation"][::2].numpy(), obs[::2], "the others")
    plain.close()
    view.close()


# --- what TorchRL asks of an env


@pytest.mark.mostly_slow("steps or trains with another library", quick=2)
@pytest.mark.checklist(126)
@pytest.mark.parametrize("group_map", [None, "each", "prefix", "all", "custom", MarlGroupMapType.ONE_GROUP_PER_AGENT])
def test_tensors_are_nested_by_groups_and_share_memory_and_wrong_groups_are_named(
    group_map: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = ["adversary_0", "adversary_1", "adversary_2", "agent_0"]
    custom = {"hunters": ["adversary_2", "adversary_0"], "prey": ["agent_0"], "lone": ["adversary_1"]}
    view = TorchRLEnv.make(
        "simple_tag",
        5,
        backend="sync",
        group_map=custom if group_map == "custom" else group_map,
        pad=group_map == "all",
    )
    expected = {None: TAG, "prefix": TAG, "all": {"agents": everyone}, "custom": custom}
    assert view.group_map == expected.get(group_map, {name: [name] for name in everyone})
    check_env_specs(view, break_when_any_done="both")
    results = []
    recv = view.envs.recv
    monkeypatch.setattr(view.envs, "recv", lambda: results.append(recv()) or results[-1])
    td = view.rand_step(view.reset())
    for name, members in view.group_map.items():
        own = td["next", name]
        assert own.batch_size == td[name].batch_size == (5, len(members))
        assert {key: tensor.shape[2:] for key, tensor in own.items()} == {
            "observation": (14,) if members == ["agent_0"] and group_map != "all" else (16,),
            **dict.fromkeys(("reward", "done", "terminated", "truncated"), (1,)),
            "mask": (),
        }
        for data, result in ((td[name], results[0]), (own, results[1])):
            leaves = [leaves[0] for leaves in result.obs_leaves]
            shared = any(np.shares_memory(data["observation"].numpy(), leaf) for leaf in leaves)
            assert shared == (name != "hunters"), "a choice of rows that is no slice is a copy"
            assert np.shares_memory(data["mask"].numpy(), result.acting) == (name != "hunters")
    assert {key: td["next", key].shape for key in ("done", "terminated", "truncated")} == dict.fromkeys(
        ("done", "terminated", "truncated"), (5, 1)
    )
    wrong: list[tuple[Any, str]] = [
        ({**TAG, "nobody": []}, "groups are empty: nobody"),
        ({**TAG, "x": ["agent_7", 3]}, "agents are unknown: agent_7, 3"),
        ({**TAG, "agent": ["agent_0", "adversary_1"]}, "agents are in it more than once: adversary_1"),
        ({**TAG, "agent": ["agent_0", "agent_0"]}, "agents are in it more than once: agent_0"),
        ({"adversary": ["adversary_0"]}, "agents are missing: adversary_1, adversary_2, agent_0"),
        ({}, "agents are missing"),
        ({"x": "agent_0"}, "expected a list of agent names"),
        ({3: everyone}, "names of groups that are strings"),
        ({"a": TAG["adversary"], "done": TAG["agent"]}, "'done' is a key of TorchRL"),
        ("nonsense", "expected 'spaces', 'all', 'each', 'prefix'"),
    ]
    if group_map != "all":
        wrong.append(("all", "'adversary_0' and 'agent_0' differ: observation space.*pad=True"))
    for bad, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            TorchRLEnv(view.envs, group_map=bad)
    view.close()


@pytest.mark.mostly_slow("steps with TorchRL", quick=8)
@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_every_space_has_specs_and_actions_arrive(space: str, categorical: bool) -> None:
    """The env checks that each action is in its space."""
    factories = [partial(SampleEnv, SPACES[space], SPACES[space], length) for length in (2, 3)]
    view = TorchRLEnv.make(factories, backend="sync", categorical_actions=categorical, validate="strict")
    check_env_specs(view, seed=1, break_when_any_done="both")
    data = view.rollout(20, break_when_any_done=False)
    assert data["next", "done"].sum() == 10 + 6
    view.close()


@pytest.mark.mostly_slow("steps with TorchRL", quick=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", SCRIPTED)
def test_the_specs_of_scripts_hold(kind: str, mode: str) -> None:
    one_hot = mode == "disabled"
    view = TorchRLEnv.make(factories_of(kind, N), backend="sync", autoreset_mode=mode, categorical_actions=not one_hot)
    check_env_specs(view, seed=2, break_when_any_done="both")
    view.close()


def test_random_actions_keep_to_the_masks() -> None:
    for categorical in (True, False):
        view = TorchRLEnv.make("connect_four", 4, backend="sync", categorical_actions=categorical, validate="strict")
        data = view.rollout(80, break_when_any_done=False)
        own = data["player"]
        taken = own["action"] if not categorical else torch.nn.functional.one_hot(own["action"], 7).bool()
        assert (own["action_mask"] | ~taken).all()
        assert not own["action_mask"].all()
        assert (own["mask"].sum(dim=-1) == 1).all()
        assert data["next", "done"].sum() > 4
        view.close()


class Pairs(ParallelEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Two choices at a time, of which each has one that is forbidden."""

    metadata = {"name": "pairs"}
    possible_agents = ["a", "b"]

    def __init__(self, nvec: list[Any]) -> None:
        self.space = MultiDiscrete(nvec)
        k = int(self.space.nvec.sum())
        self.seen = Dict(observation=Box(0, 1, (2,)), action_mask=MultiBinary(k))
        self.mask = np.arange(k) % 3 != 0

    def observation_space(self, agent: str) -> Any:
        return self.seen

    def action_space(self, agent: str) -> Any:
        return self.space

    def look(self) -> Any:
        return {who: {"observation": np.zeros(2, np.float32), "action_mask": self.mask} for who in ("a", "b")}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, ["a", "b"]
        return self.look(), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        if self.space.nvec.ndim == 1:
            assert all(action[0] == 1 and action[1] != 1 for action in actions.values()), actions
        over = self.t == 4
        self.agents = [] if over else self.agents
        flags = dict.fromkeys(actions, False)
        return self.look(), dict.fromkeys(actions, 1.0), flags, dict.fromkeys(actions, over), {}


@pytest.mark.mostly_slow("steps or trains with another library", quick=4)
@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("nvec", [[2, 3], [[2, 3], [2, 2]]])
def test_masks_of_several_choices_hold(nvec: list[Any], categorical: bool) -> None:
    # TorchRL's own random actions know masks of one axis alone.
    options: Any = {"validate": "strict" if np.ndim(nvec) == 1 else "off"}
    view = TorchRLEnv.make(partial(Pairs, nvec), N, backend="sync", categorical_actions=categorical, **options)
    check_env_specs(view, break_when_any_done="both")
    data = view.rollout(20, break_when_any_done=False)
    assert data["agents", "action_mask"].shape[-1] == np.sum(nvec)
    view.close()


def test_only_some_envs_may_be_asked_to_step() -> None:
    """``break_when_all_done``: each env stops where its episode ends."""
    view = TorchRLEnv.make(factories_of("parallel", 4), backend="sync")
    plain = marlvec.make(factories_of("parallel", 4), backend="sync", autoreset_mode="disabled")
    torch.manual_seed(0)
    view.set_seed(1)
    data = view.rollout(30, break_when_any_done=False, break_when_all_done=True)
    obs, _ = plain.reset(seed=1)
    lengths = data["next", "done"][..., 0].int().argmax(dim=1) + 1
    assert len(set(lengths.tolist())) > 1
    for i, length in enumerate(lengths.tolist()):
        for t in range(length):
            assert_same(data["agent", "observation"][i, t].numpy(), obs[i], f"env {i}, step {t}")
            plain.send(data["agent", "action"][i, t].numpy()[None], [i])
            step = plain.recv()
            obs[i] = step.obs[0]
            assert_same(data["next", "agent", "reward"][i, t, :, 0].numpy(), step.rewards[0].astype(np.float32), "")
            assert_same(data["next", "agent", "observation"][i, t].numpy(), step.obs[0], "")
        assert data["next", "done"][i, length - 1 :].all()
        assert (data[i, length - 1 :] == data[i, length - 1]).all(), "nothing happens any more"
    plain.close()
    view.close()


def test_lost_episodes_are_reported(tmp_path: Path) -> None:
    for mode in MODES:
        (tmp_path / mode).mkdir()
        factory = partial(RaisingEnv, 6, at=2, only_env=1, only_incarnation=0, marks=str(tmp_path / mode))
        view = TorchRLEnv.make(factory, 2, backend="sync", autoreset_mode=mode, on_fault="restart")
        check = view.rollout(4, break_when_any_done=False)
        lost = check["next", "fault"][..., 0]
        assert lost[0].sum() == 0
        assert lost[1].sum() >= 1
        at = int(lost[1].int().argmax())
        assert check["next", "truncated"][1, at].all()
        assert check["next", "agent", "truncated"][1, at].all()
        assert not check["next", "agent", "mask"][1, at].any()
        assert (check["next", "agent", "observation"][1, at] == check["agent", "observation"][1, at]).all()
        view.close()


# --- what it refuses


def test_masks_that_come_with_infos_are_asked_for() -> None:
    class Shy(ScriptedParallelEnv):
        def step(self, actions: dict[str, Any]) -> Any:
            *rest, infos = super().step(actions)
            mask = np.array([True] * 4 + [False])
            return *rest, {agent: {**info, "action_mask": mask} for agent, info in infos.items()}

    view = TorchRLEnv.make(Shy, 2, backend="sync")
    with pytest.raises(ContractError, match="action_masks=True"):
        view.rollout(3)
    view.close()
    for wanted in (True, False):
        view = TorchRLEnv.make(Shy, 2, backend="sync", action_masks=wanted)
        data = view.rollout(3)
        assert (data.get(("agent", "action_mask"), None) is not None) == wanted
        if wanted:
            assert data["agent", "action_mask"][:, 0].all()
            masks = data["agent", "action_mask"][:, 1, :, 4]
            assert (masks == ~data["agent", "mask"][:, 1]).all(), "who does not act is allowed everything"
        view.close()


def test_what_makes_no_sense_is_refused() -> None:
    for options in ({"autoreset_mode": "next_step"}, {"copy": False}):
        with pytest.raises(ArgumentError, match="'disabled' and copy=True"):
            TorchRLEnv.make("simple_spread", 2, backend="sync", **options)
    with pytest.raises(UnsupportedSpaceError, match="observation: Text"):
        TorchRLEnv.make(partial(SampleEnv, Text(5), SPACES["discrete"]), 1, backend="sync")
    for mode in MODES:
        view = TorchRLEnv.make("simple_spread", 2, backend="sync", autoreset_mode=mode, max_episode_steps=1)
        assert isinstance(view, EnvBase)
        assert repr(view) == "TorchRLEnv(simple_spread_v3, num_envs=2, agent: 3, device=None)"
        first = TensorDict({"_reset": torch.tensor([[True], [False]])}, batch_size=[2])
        with pytest.raises(NotResetError, match="must cover all"):
            view.reset(first)
        td = view.reset()
        with pytest.raises(ActionError, match=r"\('agent', 'action'\)"):
            view.step(td)
        td = view.rand_step(td)
        with pytest.raises(NotResetError, match="env 0: its episode is over"):
            view.rand_step(step_mdp(td))
        view.reset()
        td = view.rand_action()
        td["agent", "action"] += 5
        with pytest.raises(ActionError, match="env 0, agent 'agent_0'"):
            view.step(td)
        view.close()
        assert view.is_closed
        assert view.envs.closed


def test_int_keys_and_numbers_of_agents_are_names() -> None:
    view = TorchRLEnv.make(partial(KeyedEnv, agent_num=2, int_ids=True), 2, backend="sync", group_map="each")
    assert list(view.group_map) == list(view.envs.agents) == ["0", "1"]
    check_env_specs(view)
    view.close()


# --- where the next episodes have begun already, TorchRL's view resets at once; TorchRL's own way gives the same


class Counting(TorchRLEnv):
    """Counts how often TorchRL's own way was taken."""

    asked = 0

    def reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        self.asked += 1
        return super().reset(*args, **kwargs)


class Slow(Counting):
    """Resets as TorchRL does it for everybody."""

    def maybe_reset(self, tensordict: TensorDictBase) -> TensorDictBase:
        return EnvBase.maybe_reset(self, tensordict)


def played(view: TorchRLEnv, steps: int, seed_at: int = -1) -> list[TensorDictBase]:
    """All that a view says in so many steps at random, with a column of somebody else's."""
    view.set_seed(3)
    torch.manual_seed(0)
    said = []
    td = view.reset()
    for t in range(steps):
        if t == seed_at:
            view.set_seed(11)
        td = view.rand_action(td)
        td["mine"] = torch.full((view.envs.num_envs, 2), float(t + 1))
        before, td = view.step_and_maybe_reset(td)
        said += [before.clone(), td.clone()]
    return said


@pytest.mark.mostly_slow("steps or trains with another library", quick=6)
@pytest.mark.checklist(125)
@pytest.mark.parametrize("mode", ["same_step", "disabled"])
@pytest.mark.parametrize(
    ("env", "steps", "seed_at"),
    [
        ("simple_spread", 60, -1),
        ("simple_tag", 60, 30),
        ("connect_four", 120, -1),
        (partial(archers, 60), 130, -1),
        ("CartPole-v1", 120, 40),
    ],
)
def test_both_ways_say_the_same(env: Any, steps: int, seed_at: int, mode: str) -> None:
    fast, slow = (kind.make(env, 3, autoreset_mode=mode, backend="sync") for kind in (Counting, Slow))
    try:
        pairs = list(zip(played(fast, steps, seed_at), played(slow, steps, seed_at), strict=True))
        assert sum(int(before["next", "done"].any()) for before, _ in pairs[::2]) > 1
        for ours, theirs in pairs:
            keys = set(ours.keys(True, True))
            assert keys == set(theirs.keys(True, True))
            assert [key for key in keys if not torch.equal(ours[key], theirs[key])] == []
        assert (fast.asked < slow.asked) == (mode == "same_step")
    finally:
        fast.close()
        slow.close()


# --- TorchRL's own parts on marlvec's view: collectors, transforms, MAPPO's and IPPO's losses, masks in distributions


with warnings.catch_warnings():  # it warns of classes of its own when they are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchrl.collectors import Collector


ENV_NUM = 4


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


def actor_of(env: Any, group: str, inputs: int, actions: int, agents: int, *, masked: bool) -> Any:
    net = MultiAgentMLP(inputs, actions, agents, centralized=False, share_params=True, depth=1, num_cells=16)

    in_keys = {"logits": (group, "logits")} | ({"mask": (group, "action_mask")} if masked else {})
    return ProbabilisticActor(
        TensorDictModule(
            torch.nn.Sequential(torch.nn.Flatten(-3), Cast(), net) if masked else net,
            in_keys=[(group, "observation")],
            out_keys=[(group, "logits")],
        ),
        spec=env.full_action_spec[group, "action"],
        in_keys=in_keys if masked else [(group, "logits")],
        out_keys=[(group, "action")],
        distribution_class=MaskedCategorical if masked else Categorical,
        return_log_prob=True,
        log_prob_key=(group, "log_prob"),
    )


class Cast(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.float()


@pytest.mark.usefixtures("seeded")
def test_a_collectors_batches_are_whole_episodes_in_a_row() -> None:
    """What is next is where the following step begins, but for a new episode; sums and counts begin with it."""
    env = TransformedEnv(
        TorchRLEnv.make("simple_spread", ENV_NUM, backend="sync", max_episode_steps=7),
        Compose(RewardSum(in_keys=[("agent", "reward")], out_keys=[("agent", "sum")]), StepCounter(), InitTracker()),
    )
    actor = actor_of(env, "agent", 18, 5, 3, masked=False)
    collector = Collector(
        env, actor, frames_per_batch=ENV_NUM * 10, total_frames=ENV_NUM * 30, auto_register_policy_transforms=False
    )
    data = torch.cat([batch.clone() for batch in collector], dim=1)
    collector.shutdown()
    assert env.base_env.envs.closed
    assert data.shape == (ENV_NUM, 30)
    done = data["next", "done"][..., 0]
    assert (done == (torch.arange(1, 31) % 7 == 0)).all()
    obs, following = data["agent", "observation"], data["next", "agent", "observation"]
    same = (obs[:, 1:] == following[:, :-1]).flatten(2).all(dim=2)
    assert (same == ~done[:, :-1]).all()
    assert (data["is_init"][:, 1:, 0] == done[:, :-1]).all()
    assert (data["next", "step_count"][..., 0] == torch.arange(30) % 7 + 1).all()
    rewards = data["next", "agent", "reward"]
    torch.testing.assert_close(data["next", "agent", "sum"][:, 6], rewards[:, :7].sum(dim=1))
    torch.testing.assert_close(data["next", "agent", "sum"][:, 13], rewards[:, 7:14].sum(dim=1))


@pytest.mark.usefixtures("seeded")
def test_after_an_agents_death_the_roots_done_ends_episodes_and_traj_ids_do_not() -> None:
    """As docs/libraries/torchrl.md says of TorchRL's `Collector`; the first agent ends in step 2 of 6."""
    script = Script([0, 0], [2, 6], ["terminated"] * 2)
    env = TorchRLEnv.make(partial(ScriptedParallelEnv, script, agent_num=2), 2, backend="sync", group_map="each")
    collector = Collector(env, None, frames_per_batch=24, total_frames=24)
    (data,) = (batch.clone() for batch in collector)
    collector.shutdown()
    ids = data["collector", "traj_ids"]
    changes = (ids[:, 1:] != ids[:, :-1]).tolist()
    assert changes == [[False, True, True, True, True, True, False, True, True, True, True]] * 2
    done = data["next", "done"][..., 0].long()
    assert (done.cumsum(-1) - done).tolist() == [[0] * 6 + [1] * 6] * 2


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("loss_class", "centralized"), [(MAPPOLoss, True), (IPPOLoss, False)])
def test_the_losses_of_mappo_and_ippo_learn_from_each_group(loss_class: Any, centralized: bool) -> None:
    """Two groups of unequal agents; an update changes the actor and the critic of its own group."""
    env = TorchRLEnv.make("simple_tag", ENV_NUM, backend="sync", max_episode_steps=5)
    sizes = {"adversary": (16, 3), "agent": (14, 1)}
    actors = {group: actor_of(env, group, inputs, 5, n, masked=False) for group, (inputs, n) in sizes.items()}
    policy = TensorDictSequential(*actors.values())
    with torch.no_grad():
        data = env.rollout(12, policy, break_when_any_done=False)
    assert data["next", "done"].sum() == 2 * ENV_NUM
    for group, (inputs, n) in sizes.items():
        critic = TensorDictModule(
            MultiAgentMLP(inputs, 1, n, centralized=centralized, share_params=True, depth=1, num_cells=16),
            in_keys=[(group, "observation")],
            out_keys=[(group, "state_value")],
        )
        loss = loss_class(actors[group], critic)
        loss.set_keys(
            action=(group, "action"),
            sample_log_prob=(group, "log_prob"),
            value=(group, "state_value"),
            reward=(group, "reward"),
            done=(group, "done"),
            terminated=(group, "terminated"),
        )
        loss.make_value_estimator(gamma=0.9, lmbda=0.9)
        with torch.no_grad():
            loss.value_estimator(data)
        assert data["advantage"].shape == (ENV_NUM, 12, n, 1)
        values = loss(data.reshape(-1))
        sum(value for name, value in values.items() if name.startswith("loss_")).backward()
        gradients = [parameter.grad for parameter in loss.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert sum(bool(gradient.any()) for gradient in gradients) > len(gradients) / 2
        # A step that was cut off is worth what follows; the value of the state after the end is not forgotten.
        cut = data["next", group, "truncated"][..., 0]
        assert (cut.all(dim=-1) == data["next", "done"][..., 0]).all()
        assert not data["next", group, "terminated"].any()
    env.close()


@pytest.mark.usefixtures("seeded")
def test_masks_go_into_distributions() -> None:
    """Whole games of connect four; nobody ever does what its mask forbids, or the env would raise."""
    pytest.importorskip("pygame")
    env = TorchRLEnv.make("connect_four", ENV_NUM, backend="sync", validate="strict")
    actor = actor_of(env, "player", 84, 7, 2, masked=True)
    with torch.no_grad():
        data = env.rollout(90, actor, break_when_any_done=False)
    allowed = data["player", "action_mask"].gather(-1, data["player", "action"].unsqueeze(-1))
    assert allowed.all()
    assert not data["player", "action_mask"].all()
    assert data["next", "done"].sum() >= 2 * ENV_NUM
    won = data["next", "player", "reward"][data["next", "done"][..., 0]]
    assert (won.sum(dim=(1, 2)) == 0).all(), "one wins what the other loses"
    env.close()


@pytest.mark.usefixtures("seeded")
def test_to_moves_tensors_to_the_device() -> None:
    env = TorchRLEnv.make("simple_spread", 2, backend="sync", device="cpu")
    td = env.rand_step(env.reset())
    assert td.device == td["next"].device == td["agent"].device == torch.device("cpu")
    env.close()


@pytest.mark.usefixtures("seeded")
def test_without_torchrl_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "marlvec.interop.torchrl")
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(MissingExtraError, match=r"TorchRLEnv needs torchrl.*pip install 'marlvec\[torchrl\]'"):
        importlib.import_module("marlvec.interop.torchrl")
