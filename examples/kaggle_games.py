"""Kaggle's simulation games as an env of one file: connectx, hungry_geese, halite, rps, and others.

    python examples/kaggle_games.py hungry_geese --num-agents 4

An agent observes what Kaggle gives to agents: without hidden fields, with shared ones. Its reward is the change of its
total, and ``forfeit`` where Kaggle takes the total away (an invalid action, an error). Each game is a new one from the
env's seed: an env of Kaggle's plays its first map again and again. Games draw from streams of their own, put in place
of the process's for the time of a call: not for ``backend="thread"``. The package asks for more than it needs:
pip install jsonschema requests, and pip install --no-deps kaggle-environments.
"""

import argparse
import json
import random
from contextlib import contextmanager

import numpy as np
from gymnasium.spaces import Discrete, Space

import marlvec


class Anything(Space):
    """Python values of any form; its samples are one value."""

    def __init__(self, value=None):
        self.value = value
        super().__init__((), None)

    def contains(self, x):
        return True

    def sample(self, mask=None, probability=None):
        return self.value


class KaggleGame(marlvec.MultiAgentEnv):
    """A game of kaggle-environments.

    Args:
        game: Its name.
        num_agents: How many play; None: the fewest.
        choices: Number of actions, where Kaggle's schema names no largest one (connectx: 7), or one that is too large
            (rps: 3, if there are 3 signs).
        forfeit: The reward of an agent whose total Kaggle takes away.
        configuration: Kaggle's, e.g. ``{"episodeSteps": 50}``.
    """

    def __init__(self, game, num_agents=None, choices=None, forfeit=-1.0, configuration=None):
        self.name, self.forfeit = f"kaggle/{game}", forfeit
        self.game, self.configuration = game, dict(configuration or {})
        self.begin(0)
        rules = self.env.specification
        n = rules.agents[0] if num_agents is None else num_agents
        self.begin(0, n)  # raises for a number of agents that the game is not for
        self.fields, self.agents = rules.observation, tuple(f"player_{i}" for i in range(n))
        self.words = rules.action.get("enum")  # actions with names
        first, most = rules.action.get("minimum", 0), rules.action.get("maximum")
        if choices is None and (self.words or most is not None):
            choices = len(self.words) if self.words else most - first + 1
        self.is_discrete = choices is not None
        space = Discrete(choices, start=first) if self.is_discrete else Anything(rules.action.get("default"))
        self.observation_spaces, self.action_spaces = (Anything(),) * n, (space,) * n
        self.seeds = np.random.default_rng()

    def begin(self, seed, num_agents=None):
        """Make a game of Kaggle's, which draws from streams of this seed."""
        from kaggle_environments import make

        self.streams = random.Random(seed).getstate(), np.random.RandomState(seed).get_state()
        with self.own_streams():
            self.env = make(self.game, configuration=dict(self.configuration))
            self.env.reset(num_agents)

    def reset(self, slot, *, seed=None, options=None):
        if seed is not None:
            self.seeds = np.random.default_rng(seed)
        self.begin(int(self.seeds.integers(2**31)), len(self.agents))
        self.totals = [state.reward for state in self.env.state]
        for i in range(len(self.agents)):
            slot.alive[i] = True
        self.look(slot)

    def step(self, slot):
        actions = slot.read_actions()
        for i, acts in enumerate(slot.acting):
            if not acts:
                actions[i] = None
            elif self.is_discrete:
                actions[i] = self.words[actions[i]] if self.words else int(actions[i])
        with self.own_streams():
            self.env.step(actions)
        infos = {}
        for i, state in enumerate(self.env.state):
            if slot.alive[i]:
                slot.reward[i] = self.forfeit if state.reward is None else state.reward - self.totals[i]
                self.totals[i] = state.reward
                infos[self.agents[i]] = {"status": str(state.status)}
        self.look(slot)
        slot.done = not any(slot.alive)
        return infos

    def look(self, slot):
        """Observations of who acts, and the last ones of who has ended."""
        for i, state in enumerate(self.env.state):
            ended = slot.alive[i] and (self.env.done or state.status not in ("ACTIVE", "INACTIVE"))
            slot.acting[i] = slot.alive[i] and not ended and state.status == "ACTIVE"
            if slot.acting[i] or ended:
                slot.write_obs(i, shown(self.fields, self.env.state[0].observation, state.observation))
            if ended:
                slot.terminated[i], slot.alive[i] = True, False

    @contextmanager
    def own_streams(self):
        """In this context, the process draws from the game's streams."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self.streams[0])
        np.random.set_state(self.streams[1])
        try:
            yield
        finally:
            self.streams = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def shown(fields, first, own):
    """What an agent is shown of the first agent's observation and of its own, as plain dicts and lists."""
    out = {}
    for name, field in fields.items():
        source, inner = first if field.get("shared") else own, field.get("properties")
        if not field.get("hidden") and name in source:
            apart = isinstance(inner, dict) and not field.get("shared")
            out[name] = shown(inner, first[name], own[name]) if apart else json.loads(json.dumps(source[name]))
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("game", nargs="?", default="connectx", help="a name of kaggle_environments")
    parser.add_argument("--num-agents", type=int, help="the fewest, if left out")
    parser.add_argument("--games", type=int, default=8, help="how many random games are played")
    args = parser.parse_args()
    options = {"num_agents": args.num_agents, "choices": {"connectx": 7, "rps": 3}.get(args.game)}
    with marlvec.make(KaggleGame, num_envs=4, backend="sync", game=args.game, **options) as envs:
        collector = marlvec.Collector(envs, marlvec.RandomPolicy(), batch_mode="complete", seed=0)
        for number, game in enumerate(collector.collect(episodes=args.games)["main"].split_by_episode()):
            returns = [float(game.rewards[game.agent_index == i].sum()) for i in range(envs.agent_num)]
            print(f"game {number}: {len(game)} rows, returns {returns}")
