"""Views with flat rows, each made to answer the same questions, and the rows that a plain loop gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from numpy.typing import NDArray

from marlvec import VectorEnv, env_seeds
from marlvec.interop.cleanrl import CleanRLVectorEnv
from marlvec.interop.sb3 import SB3VecEnv
from marlvec.interop.supersuit import SuperSuitVecEnv
from tests.vector.support.reference import Call, Frame, assert_same, assert_trees_equal, bare, flatten

# --- the views with flat rows, each made to answer the same questions


@dataclass
class Got:
    """What a view said of one step; None where it has no word for it."""

    obs: Any
    rewards: NDArray[Any]
    ended: NDArray[np.bool_]
    episode: Callable[[int], tuple[float, int]]
    terminated: NDArray[Any] | None = None
    truncated: NDArray[Any] | None = None
    final: Callable[[int], Any] | None = None
    said: list[dict[str, Any]] | None = None


class Seen:
    """A view of a vectorizer.

    Args:
        envs: The vectorizer.
    """

    def __init__(self, envs: VectorEnv) -> None:
        self.rows = envs.num_envs * envs.agent_num

    def reset(self, seed: int) -> tuple[Any, list[dict[str, Any]] | None]:
        raise NotImplementedError

    def step(self, actions: Any) -> Got:
        raise NotImplementedError

    def flags(self) -> tuple[Any, Any] | None:
        """Who is alive and acts."""
        return None

    def masks(self) -> NDArray[np.bool_] | None:
        return None


def episode_of(infos: Any) -> Callable[[int], tuple[float, int]]:
    return lambda row: (infos[row]["episode"]["r"], infos[row]["episode"]["l"])


class SB3(Seen):
    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs)
        self.view = SB3VecEnv(envs)
        self.begun: Any = None

    def reset(self, seed: int) -> Any:
        self.view.seed(seed)
        obs = self.view.reset()
        self.begun = [dict(info) for info in self.view.reset_infos]
        return obs, self.view.reset_infos

    def step(self, actions: Any) -> Got:
        obs, rewards, dones, infos = self.view.step(actions)
        assert all(dones[row] == ("terminal_observation" in info) for row, info in enumerate(infos))
        return Got(
            obs,
            rewards,
            dones,
            episode_of(infos),
            final=lambda row: infos[row]["terminal_observation"],
            said=infos,
        )

    def flags(self) -> tuple[Any, Any]:
        return self.view.driver.alive, self.view.driver.acting

    def masks(self) -> NDArray[np.bool_] | None:
        return np.stack(self.view.env_method("action_masks")) if self.view.has_attr("action_masks") else None


class SuperSuit(Seen):
    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs)
        self.view = SuperSuitVecEnv(envs)
        self.infos: Any = None

    def reset(self, seed: int) -> Any:
        obs, self.infos = self.view.reset(env_seeds(seed, self.view.envs.num_envs))
        return obs, self.infos

    def step(self, actions: Any) -> Got:
        obs, rewards, terminated, truncated, self.infos = infos = self.view.step(actions)
        infos = self.infos
        assert terminated.dtype == truncated.dtype == np.uint8
        return Got(
            obs,
            rewards,
            (terminated | truncated).astype(bool),
            episode_of(infos),
            terminated.astype(bool),
            truncated.astype(bool),
            lambda row: infos[row]["terminal_observation"],
        )

    def flags(self) -> tuple[Any, Any]:
        alive, acting = ([info[key] for info in self.infos] for key in ("alive", "acting"))
        return np.array(alive), np.array(acting)

    def masks(self) -> NDArray[np.bool_] | None:
        return np.stack([info["action_mask"] for info in self.infos]) if "action_mask" in self.infos[0] else None


class CleanRL(Seen):
    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs)
        self.view = CleanRLVectorEnv(envs)
        self.infos: Any = None
        self.lost = np.zeros(envs.num_envs, np.bool_)  # envs whose episode the next step will lose

    def reset(self, seed: int) -> Any:
        obs, self.infos = self.view.reset(seed=seed)
        return obs, None

    def step(self, actions: Any) -> Got:
        obs, rewards, terminated, truncated, self.infos = self.view.step(actions)
        infos, ended = self.infos, terminated | truncated
        known = ended & ~np.repeat(self.lost, len(ended) // len(self.lost))
        assert ("final_info" in infos) == known.any()
        assert "final_obs" not in infos
        if known.any():
            assert infos["_final_info"].tolist() == infos["_final_observation"].tolist() == known.tolist()
            assert [info is not None for info in infos["final_info"]] == known.tolist()
        episode = episode_of(infos.get("final_info"))
        final = infos.get("final_observation")
        return Got(obs, rewards, ended, episode, terminated, truncated, None if final is None else final.__getitem__)

    def flags(self) -> tuple[Any, Any] | None:
        return (self.infos["alive"], self.infos["acting"]) if "alive" in self.infos else None

    def masks(self) -> NDArray[np.bool_] | None:
        masks: NDArray[np.bool_] | None = self.infos.get("action_mask")
        return masks


class Puffer(Seen):
    def __init__(self, envs: VectorEnv) -> None:
        from marlvec.interop.pufferlib import PufferView  # where it is installed, or something stands in for it

        super().__init__(envs)
        self.names = envs.agents
        self.view = PufferView(envs)

    def reset(self, seed: int) -> Any:
        obs, infos = self.view.reset(seed)
        assert infos == []
        assert obs is self.view.observations
        return obs.copy(), None

    def step(self, actions: Any) -> Got:
        obs, rewards, terminated, truncated, infos = self.view.step(actions)
        assert obs is self.view.observations
        assert rewards is self.view.rewards
        ended = terminated | truncated
        by_row = dict(zip(np.flatnonzero(ended & ~self.view.driver.lost).tolist(), infos, strict=True))
        for row, info in by_row.items():
            assert info["agent"] == self.names[row % len(self.names)]

        def episode(row: int) -> tuple[float, int]:
            return by_row[row]["episode_return"], by_row[row]["episode_length"]

        return Got(obs.copy(), rewards.copy(), ended, episode, terminated.copy(), truncated.copy())

    def flags(self) -> tuple[Any, Any]:
        return None, self.view.masks


class StandInPufferEnv:
    """PufferLib's protocol for native envs, as its docs tell it: spaces of one agent, and buffers for all.

    Args:
        buf: Arrays to write into; None: the env has its own.
    """

    def __init__(self, buf: Any = None) -> None:
        assert isinstance(self.single_observation_space, Box)
        assert isinstance(self.single_action_space, (Discrete, MultiDiscrete, Box))
        assert self.num_agents >= 1
        assert not hasattr(self, "observation_space")
        assert not hasattr(self, "action_space")
        seen = self.single_observation_space
        if buf is None:
            buf = {
                "observations": np.zeros((self.num_agents, *seen.shape), seen.dtype),
                "rewards": np.zeros(self.num_agents, np.float32),
                "terminals": np.zeros(self.num_agents, np.bool_),
                "truncations": np.zeros(self.num_agents, np.bool_),
                "masks": np.ones(self.num_agents, np.bool_),
                "actions": np.zeros((self.num_agents, *self.single_action_space.shape), np.int32),
            }
        for name, array in buf.items():
            setattr(self, name, array)

    single_observation_space: Any
    single_action_space: Any
    num_agents: int


@contextmanager
def pufferlib_stand_in() -> Iterator[None]:
    """Have something that goes by PufferLib's protocol under its name, whether or not it is installed."""
    module = ModuleType("pufferlib")
    module.PufferEnv = StandInPufferEnv  # type: ignore[attr-defined]
    names = ("pufferlib", "marlvec.interop.pufferlib")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules["pufferlib"] = module
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)


# --- what flat rows must look like in same-step mode, put together from what a plain loop over the raw envs gave


def rows_of(array: NDArray[Any]) -> NDArray[Any]:
    """(N, A, …) to (N * A, …)."""
    return np.concatenate(list(array))


def words(infos: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Per row what its agent was told, and its env."""
    return [{**info.get("__common__", {}), **info.get(name, {})} for info in infos for name in names]


class Expected:
    """A frame of one group, as rows."""

    def __init__(self, frame: Frame, names: tuple[str, ...]) -> None:
        self.rewards = rows_of(frame.rewards)
        self.terminated, self.truncated, self.alive, self.acting = (
            rows_of(frame.flags[name]) for name in ("terminated", "truncated", "alive", "acting")
        )
        self.ended = self.terminated | self.truncated
        self.done = np.repeat(frame.done, len(names))
        self.obs = [rows_of(leaf).copy() for leaf in frame.obs[0]]
        for leaf in self.obs:
            leaf[self.ended & ~self.done] = 0
        self.final = [rows_of(leaf) for leaf in frame.final[0]]
        self.masks = None if frame.masks[0] is None else rows_of(frame.masks[0])
        now, last = words(frame.infos, names), words(frame.final_infos, names)
        # Where a new episode has begun, what was said of the old one stands apart.
        self.said = [last[row] if self.done[row] else now[row] for row in range(len(now))]
        self.begun = [now[row] if self.done[row] else {} for row in range(len(now))]


def check_rows(seen: Seen, calls: list[Call], names: tuple[str, ...]) -> int:
    """Make these calls through a view and compare every row; how many agents ended on the way."""
    ends, returns, lengths, alive = 0, np.zeros(seen.rows), np.zeros(seen.rows, int), np.zeros(seen.rows, bool)
    for number, call in enumerate(call for call in calls if call.env_ids is None):
        where, want = f"call {number}, {call.kind}", Expected(call.expected, names)
        if call.kind == "reset":
            obs, told = seen.reset(call.seed)
            returns[:], lengths[:] = 0, 0
            if told is not None:
                assert_trees_equal([bare_words(info) for info in told], words(call.expected.infos, names), where)
        else:
            got = seen.step(rows_of(call.actions[0]))
            obs = got.obs
            assert_same(got.rewards, want.rewards.astype(got.rewards.dtype), f"{where} rewards")
            for mine, theirs in ((got.terminated, want.terminated), (got.truncated, want.truncated)):
                if mine is not None:
                    assert mine.tolist() == theirs.tolist(), where
            assert got.ended.tolist() == want.ended.tolist(), where
            returns, lengths = returns + want.rewards, lengths + alive
            for row in np.flatnonzero(want.ended):
                ends += 1
                assert got.episode(row) == (returns[row], lengths[row]), where
                if got.final is not None:
                    for mine, leaf in zip(flatten(got.final(row)), want.final, strict=True):
                        assert_same(np.asarray(mine), leaf[row], f"{where} final of row {row}")
            returns[want.ended], lengths[want.ended] = 0, 0
            if got.said is not None:
                assert_trees_equal([bare_words(info) for info in got.said], want.said, f"{where} infos")
        for mine, leaf in zip(flatten(obs), want.obs, strict=True):
            assert_same(np.ascontiguousarray(mine), leaf, f"{where} obs")
        alive = want.alive
        if (flags := seen.flags()) is not None:
            for mine, theirs in zip(flags, (want.alive, want.acting), strict=True):
                assert mine is None or mine.tolist() == theirs.tolist(), where
        if (masks := seen.masks()) is not None and want.masks is not None:
            assert_same(masks, want.masks, f"{where} masks")
    return ends


OURS = {"alive", "acting", "action_mask", "TimeLimit.truncated", "terminal_observation", "episode"}


def bare_words(info: dict[str, Any]) -> dict[str, Any]:
    """A row's info without what views add."""
    return {key: bare(value) for key, value in info.items() if key not in OURS}
