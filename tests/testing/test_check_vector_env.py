"""check_vector_env: all backends pass it, and each broken vectorizer is caught by the check that is meant to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from marlvec import SyncVectorEnv, VectorEnv, VectorStep, make
from marlvec.errors import ArgumentError, ContractError
from marlvec.spaces import batch_space
from marlvec.testing import check_vector_env
from marlvec.testing.check_vector_env import CHECKS
from tests.vector.support.kinds import factories_of, vectorize

pytestmark = pytest.mark.many_processes

N = 3
NAMES = (
    "spaces",
    "seeding",
    "determinism",
    "halves",
    "stream",
    "guards",
    "busy",
    "partial reset",
    "autoreset",
    "copies",
    "own answers",
    "close",
)


@pytest.mark.slow("checks whole envs or connectors many times")
@pytest.mark.parametrize("kind", ["parallel", "turns, masked", "keyed", "single", "simple_tag"])
def test_sync_passes(kind: str) -> None:
    """One group and several, masks, agents that wait and that come late."""
    assert check_vector_env(partial(vectorize, "sync", factories_of(kind, N)), seed=1) == NAMES
    assert len(CHECKS) == len(NAMES)


def test_threads_pass() -> None:
    assert check_vector_env(partial(vectorize, "thread", factories_of("parallel", N))) == NAMES


@pytest.mark.slow("checks whole envs or connectors many times")
@pytest.mark.checklist(59)
@pytest.mark.parametrize("kind", ["parallel", "single"])
def test_processes_pass(kind: str) -> None:
    assert check_vector_env(partial(vectorize, "async", factories_of(kind, N), context="fork")) == NAMES


def test_what_make_makes_passes() -> None:
    assert check_vector_env(partial(make, "pettingzoo/classic/tictactoe", 2, backend="sync")) == NAMES


def test_one_env_cannot_be_mixed_up() -> None:
    with pytest.raises(ArgumentError, match="at least 2 envs"):
        check_vector_env(partial(vectorize, "sync", factories_of("parallel", 1)))


# --- mutants: each is a SyncVectorEnv with one fault ---


class Rows(SyncVectorEnv):
    """Broken in the rows it hands out, however they are asked for."""

    def _make_step(self, ids: Any, report: Any) -> VectorStep:
        result = super()._make_step(ids, report)
        self.spoil(result)
        return result

    def spoil(self, result: VectorStep) -> None:
        raise AssertionError("for subclasses")


class SwapsRows(Rows):
    def spoil(self, result: VectorStep) -> None:
        if len(result) == self.num_envs:
            result.obs_leaves = [[leaf[[1, 0, *range(2, N)]] for leaf in leaves] for leaves in result.obs_leaves]


class FinalIsNew(Rows):
    """``final_observation`` is the first observation of the next episode."""

    def spoil(self, result: VectorStep) -> None:
        if result.final_leaves is not result.obs_leaves:
            result.final_leaves = [[leaf.copy() for leaf in leaves] for leaves in result.obs_leaves]


class ForgetsResetMask(Rows):
    def spoil(self, result: VectorStep) -> None:
        result.reset_mask = np.zeros_like(result.reset_mask)


class ForgetsActing(Rows):
    def spoil(self, result: VectorStep) -> None:
        if self.autoreset_mode == "same_step":
            result.acting = result.acting & ~result.done[:, None]


class LosesLastReward(Rows):
    def spoil(self, result: VectorStep) -> None:
        if self.autoreset_mode == "same_step":
            result.rewards[result.done] = 0.0


class SmallRewards(Rows):
    def spoil(self, result: VectorStep) -> None:
        result.rewards = result.rewards.astype(np.float32)


class OutsideTheSpace(Rows):
    def spoil(self, result: VectorStep) -> None:
        for leaf in result.obs_leaves[0]:
            leaf[...] = np.where(result.alive.all(), -1e9, leaf)


class Random(Rows):
    def spoil(self, result: VectorStep) -> None:
        result.rewards = result.rewards + np.random.default_rng().random(result.rewards.shape)


class WrongEnvIds(Rows):
    def spoil(self, result: VectorStep) -> None:
        if len(result) < self.num_envs:
            result.env_ids = (result.env_ids + 1) % self.num_envs


class Stale(SyncVectorEnv):
    """``step`` hands out the observations of the step before."""

    last: Any = None

    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        obs, self.last = obs if self.last is None else self.last, obs
        return obs, *rest


class Views(SyncVectorEnv):
    def __init__(self, factories: Sequence[Callable[[], Any]], **settings: Any) -> None:
        super().__init__(factories, **{**settings, "copy": False})


class WritableViews(Rows):
    def spoil(self, result: VectorStep) -> None:
        if not self.copy and result.final_leaves is not result.obs_leaves:
            result.obs_leaves = [[leaf.copy() for leaf in leaves] for leaves in result.obs_leaves]


class AllAlike(SyncVectorEnv):
    def _request_reset(self, call: str, seed: Any, options: Any, env_ids: Any) -> None:
        super()._request_reset(call, [seed] * self.num_envs if isinstance(seed, int) else seed, options, env_ids)


class NoSeed(SyncVectorEnv):
    def _request_reset(self, call: str, seed: Any, options: Any, env_ids: Any) -> None:
        fresh = np.random.default_rng().integers(2**31, size=self.num_envs).tolist()
        super()._request_reset(call, fresh if isinstance(seed, int) else seed, options, env_ids)


class ResetsAll(SyncVectorEnv):
    def _request_reset(self, call: str, seed: Any, options: Any, env_ids: Any) -> None:
        super()._request_reset(call, None if env_ids is not None else seed, options, None)


class AnswersWhileBusy(SyncVectorEnv):
    def get_attr(self, name: str, indices: Any = None) -> tuple[Any, ...]:
        return tuple(getattr(env.unwrapped, name) for env in self.envs)


class ThrowsThePendingAway(SyncVectorEnv):
    def render(self, indices: Any = None) -> tuple[Any, ...]:
        self.drain()
        return super().render(indices)


class SortsIndices(SyncVectorEnv):
    def exec_func(self, fn: Any, indices: Any = None, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return super().exec_func(fn, None if indices is None else sorted(indices), *args, **kwargs)


class SharesAttributes(SyncVectorEnv):
    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        super().set_attr(name, value)


class StepsWithoutReset(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        if self._call_state.pending is None and not self._call_state.all_run:
            self.reset()
        return super().step(actions)


class ClosesOnce(SyncVectorEnv):
    def close(self, timeout: float = 5.0) -> None:
        if self.closed:
            raise RuntimeError("closed already")
        super().close(timeout)

    def __exit__(self, *error: Any) -> None:
        if not self.closed:
            self.close()


class LivesOn(SyncVectorEnv):
    """After ``close`` a fetch brings the last result as if nothing had happened."""

    def step_fetch(self, timeout: float | None = None) -> Any:
        return None if self.closed else super().step_fetch(timeout)


class NewSpaces(SyncVectorEnv):
    @property
    def action_space(self) -> Any:
        return batch_space(self.single_action_space, self.num_envs)


class IgnoresMasks(SyncVectorEnv):
    def random_action(self, seed: int | None = None, env_ids: Any = None) -> Any:
        actions = super().random_action(seed, env_ids)
        return np.zeros_like(actions)


class DrainsHalf(SyncVectorEnv):
    def drain(self, timeout: float | None = None) -> VectorStep:
        result = super().drain(timeout)
        if len(result) > 1:
            result.env_ids, result.rewards = result.env_ids[:1], result.rewards[:1]
        return result


MUTANTS: list[tuple[type[SyncVectorEnv], str]] = [
    (SwapsRows, "partial reset: obs of env 1 after reset(env_ids=[0])"),
    (FinalIsNew, "autoreset: same_step beside disabled, env 0, event "),
    (ForgetsResetMask, "autoreset: next_step, reset_mask of step "),
    (ForgetsActing, "autoreset: same_step beside disabled, env 0, event "),
    (LosesLastReward, "autoreset: same_step beside disabled, env 0, event "),
    (SmallRewards, "spaces: rewards of step 1: expected float64 (3, 3), got float32 (3, 3)"),
    (OutsideTheSpace, "spaces: observations"),
    (Random, "determinism: step 1 of a second one with seed 0, leaf 'rewards': expected 0."),
    (WrongEnvIds, "stream: env_ids: expected some of the envs under way [0, 2], each once, got ["),
    (Stale, "halves: step_send() and step_fetch() of step 2, leaf 'obs'"),
    (Views, "copies: an earlier result with copy=True after step 1, leaf 'obs'"),
    (WritableViews, "copies: obs with copy=False: expected a view that cannot be written to, got one that can"),
    (AllAlike, "seeding: reset(seed=0) beside reset(seed=env_seeds(0, N)), leaf 'obs'"),
    (NoSeed, "seeding: reset(seed=0) beside reset(seed=env_seeds(0, N)), leaf 'obs'"),
    (ResetsAll, "partial reset: obs of env 1 after reset(env_ids=[0])"),
    (AnswersWhileBusy, "busy: get_attr while step_send() is pending: expected BusyError, got no error"),
    (ThrowsThePendingAway, "busy: render while step_send() is pending: expected BusyError"),
    (SortsIndices, "own answers: exec_func(indices=[2, 1, 0]), leaf '0': expected int 12, got int 10"),
    (SharesAttributes, "own answers: get_attr() after set_attr(indices=[2]), leaf '0': expected int 10, got int 7"),
    (StepsWithoutReset, "guards: step() before a reset: expected NotResetError, got no error"),
    (ClosesOnce, "close: a second close(): expected no error, got RuntimeError: closed already"),
    (LivesOn, "close: step_fetch() after close(): expected ClosedError, got no error"),
    (NewSpaces, "spaces: action_space: expected the same object on each read, got another one"),
    (IgnoresMasks, "spaces: random_action of env 1, agent 'agent_0': expected an action that its mask allows"),
    (DrainsHalf, "stream: drain(): expected all envs under way [0, 2], got [0]"),
]


@pytest.mark.mostly_slow("checks whole envs or connectors many times", quick=3)
@pytest.mark.parametrize(("mutant", "told"), MUTANTS, ids=[mutant.__name__ for mutant, _ in MUTANTS])
def test_mutants_are_caught_and_told(mutant: type[SyncVectorEnv], told: str) -> None:
    factories = factories_of("masked" if mutant is IgnoresMasks else "parallel", N)
    with pytest.raises(ContractError) as caught:
        check_vector_env(partial(mutant, factories, validate="off"))
    assert str(caught.value).startswith("check_vector_env: ")
    assert told in str(caught.value)


def test_a_failed_check_leaves_nothing_open() -> None:
    made: list[VectorEnv] = []

    def make_envs(**settings: Any) -> VectorEnv:
        made.append(Stale(factories_of("parallel", N), **settings))
        return made[-1]

    with pytest.raises(ContractError):
        check_vector_env(make_envs)
    assert len(made) > 2
    assert all(envs.closed for envs in made)
