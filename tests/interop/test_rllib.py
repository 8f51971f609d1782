"""RLlib's runner on marlvec's envs gives the numbers of the plain envs: whole episodes, every agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore:::ray", "ignore::DeprecationWarning")

from ray.rllib.env.multi_agent_env import MultiAgentEnv  # noqa: E402
from ray.rllib.utils.pre_checks.env import check_multiagent_environments  # noqa: E402

import marlvec  # noqa: E402
from marlvec import env_seeds  # noqa: E402
from marlvec.errors import ActionError, ArgumentError, BusyError  # noqa: E402
from marlvec.interop.rllib_env import RLlibEnv  # noqa: E402
from marlvec.interop.rllib_vector import RLlibVectorEnv  # noqa: E402
from marlvec.registry import resolve  # noqa: E402
from marlvec.testing import RaisingEnv, ScriptedParallelEnv  # noqa: E402
from tests.interop.rllib_runner import config_of, played, runner_of  # noqa: E402
from tests.vector.drivers import News, driver_of  # noqa: E402
from tests.vector.kinds import SCRIPTED, factories_of  # noqa: E402

N = 2

Factory = Callable[[], Any]


def archers() -> Any:
    """Knights and archers that die one by one."""
    return resolve("knights_archers_zombies")(spawn_delay=2, max_zombies=30, line_death=True, max_cycles=200)


@contextmanager
def running(env: Any, env_num: int = N, **how: Any) -> Iterator[Any]:
    runner = runner_of(env, env_num, **how)
    try:
        yield runner
    finally:
        runner.stop()


class Life:
    """What one agent's episode must hold, by a plain loop."""

    def __init__(self, first: Any) -> None:
        self.obs, self.rewards, self.owed, self.ended = [first], [], 0.0, (False, False)
        self.hanging = False

    def step(self, obs: Any, ended: tuple[bool, bool]) -> None:
        self.obs.append(obs)
        self.rewards.append(self.owed)
        self.owed, self.hanging, self.ended = 0.0, False, ended


def lives(driver: Any, news: News, actions_of: Callable[[int, int], Any]) -> tuple[dict[int, Life], News]:
    """Play an episode to its end with each agent's own actions."""
    found = {a: Life(news.obs[a]) for a in sorted(news.acting)}
    while news.alive:
        acting = sorted(news.acting)
        for a in acting:
            found[a].hanging = True
        news = driver.step({a: actions_of(a, len(found[a].rewards)) for a in acting})
        for a, reward in news.rewards.items():
            if a in found:
                found[a].owed += reward
        for a in sorted(news.acting | set(news.ended)):
            if a in found and found[a].hanging:
                found[a].step(news.obs[a], news.ended.get(a, (False, False)))
            elif a not in found and a not in news.ended:  # RLlib counts what was paid before as nobody's
                found[a] = Life(news.obs[a])
    return found, news


def check(factories: list[Factory], episodes: list[list[Any]], masked: str | None = None) -> tuple[int, int]:
    """Compare whole episodes with those of plain envs; how many there were, and how many of them time cut off."""
    count = cut = 0
    for factory, seed, own in zip(factories, env_seeds(3, len(factories)), episodes, strict=True):
        driver = driver_of(factory())
        news = driver.reset(seed, None)
        for number, episode in enumerate(own):
            if number:
                news = driver.reset(None, None)
            agents = episode.agent_episodes
            found, news = lives(driver, news, lambda a, t, driver=driver: agents[driver.names[a]].get_actions(t))
            assert {driver.names[a] for a in found} == set(agents)
            last = [found[a].ended for a in news.ended]
            assert episode.is_done
            assert (episode.is_terminated, episode.is_truncated) == (
                not any(truncated for _, truncated in last),
                any(truncated for _, truncated in last),
            )
            for a, life in found.items():
                mine = agents[driver.names[a]]
                seen = mine.get_observations()
                seen = seen["observations"] if masked else seen
                np.testing.assert_array_equal(np.asarray(seen), np.array(life.obs, np.asarray(seen).dtype))
                assert mine.get_rewards().tolist() == life.rewards
                assert mine.is_terminated == life.ended[0], (driver.names[a], number)
                assert not life.ended[1] or mine.is_truncated
            count, cut = count + 1, cut + episode.is_truncated
        driver.env.close()
    return count, cut


@pytest.mark.parametrize("kind", ["simple_tag", "archers", "connect_four"])
def test_whole_episodes_are_those_of_the_plain_env(kind: str) -> None:
    factories = {
        "simple_tag": [partial(resolve("simple_tag"), max_cycles=12)] * N,
        "archers": [archers] * N,
        "connect_four": list(factories_of("pettingzoo/classic/connect_four", N)),
    }[kind]
    modules = {"simple_tag": {"adversary", "agent"}, "archers": {"archer", "knight"}, "connect_four": {"player"}}[kind]
    steps = {"simple_tag": 40, "archers": 400, "connect_four": 90}[kind]
    masks = {"action_masks": True} if kind == "connect_four" else {}
    with running(factories[0], modules=modules, marlvec={"backend": "sync", **masks}) as runner:
        count, cut = check(factories, played(runner, steps), masked=kind if masks else None)
    assert count >= 2 * N
    assert cut == (count if kind == "simple_tag" else 0)
