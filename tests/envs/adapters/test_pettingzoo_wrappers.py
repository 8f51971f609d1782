"""Envs in wrappers: what PettingZoo's own hand on is read where it stands, and what a user's says counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pettingzoo.utils.wrappers import AssertOutOfBoundsWrapper, BaseWrapper, OrderEnforcingWrapper

from marlvec.envs import adapt
from marlvec.envs.adapters.aec import state_owner
from marlvec.testing.scripted import Script, TurnEnv
from tests.envs.adapters.test_turns import assert_same, last_says, rig_says
from tests.envs.support.rig import Rig


class Doubled(BaseWrapper):  # type: ignore[misc]  # pettingzoo has no type information
    """Pays twice as much, by a property."""

    @property
    def rewards(self) -> dict[str, float]:
        return {agent: 2 * reward for agent, reward in self.env.rewards.items()}

    @property
    def _cumulative_rewards(self) -> dict[str, float]:
        return {agent: 2 * reward for agent, reward in self.env._cumulative_rewards.items()}


class Kept(BaseWrapper):  # type: ignore[misc]
    """Has attributes of its own, as all wrappers once had, from the first move on."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.rewards = {agent: reward + 1 for agent, reward in self.env.rewards.items()}


class Asked(BaseWrapper):  # type: ignore[misc]
    """Answers when it is asked."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return {agent: -reward for agent, reward in found.items()} if name == "rewards" else found


def usual(env: Any) -> Any:
    """As PettingZoo's envs come."""
    return OrderEnforcingWrapper(AssertOutOfBoundsWrapper(env))


@pytest.mark.parametrize("seed", range(4))
def test_games_in_wrappers_are_those_without(seed: int) -> None:
    plain, rig = TurnEnv(agent_num=3), Rig(adapt(usual(TurnEnv(agent_num=3))))
    for episode in range(3):
        by_hand, by_rig = np.random.default_rng(episode), np.random.default_rng(episode)
        first = seed if episode == 0 else None
        expected = last_says(plain, by_hand, first)
        assert_same(rig_says(rig, by_rig, first), expected)


@pytest.mark.parametrize("inside", [usual, lambda env: env], ids=["over wrappers", "over the env"])
@pytest.mark.parametrize("outside", [usual, lambda env: env], ids=["under wrappers", "outermost"])
@pytest.mark.parametrize(
    ("own", "change"), [(Doubled, lambda paid: 2 * paid), (Kept, lambda paid: paid + 1), (Asked, lambda paid: -paid)]
)
def test_a_users_wrapper_overrides_attributes(
    own: Any, change: Callable[[float], float], inside: Callable[[Any], Any], outside: Callable[[Any], Any]
) -> None:
    script = Script(births=(0, 0), deaths=(7, 7), ends=("terminated", "truncated"))
    plain, rig = Rig(adapt(TurnEnv(script))), Rig(adapt(outside(own(inside(TurnEnv(script))))))
    for _ in range(3):
        plain.reset(seed=5)
        rig.reset(seed=5)
        for _ in range(6):  # in the seventh move dead turns follow, which a wrapper may pay for, too
            plain.step([0, 0])
            rig.step([0, 0])
            assert plain.reward_A.all()
            assert rig.reward_A.tolist() == list(map(change, plain.reward_A.tolist()))
        assert plain.acting_A.any()


def test_which_layer_answers() -> None:
    raw = TurnEnv()
    raw.reset(seed=0)
    assert state_owner(raw) is raw
    assert state_owner(usual(raw)) is raw
    assert state_owner(usual(usual(raw))) is raw
    for own in (Doubled, Kept, Asked):
        wrapper = own(usual(raw))
        assert state_owner(usual(wrapper)) is wrapper
    telling = BaseWrapper(raw)
    telling.rewards = {}
    assert state_owner(OrderEnforcingWrapper(telling)) is telling
    assert state_owner(None) is None
