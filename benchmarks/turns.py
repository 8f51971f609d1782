"""What `collect()` costs where three agents move by turns and die one by one, beside a loop by hand; processor time.

Run ``python benchmarks/turns.py``. The game is an AEC env on a board of 64 squares: each move takes a square, and some
moves end the next player. Both loops step the same envs in this process with the same policy, in turns, one batch each;
the batches are compared first. Each is measured as it is, and with `NormalizeObs` and `FrameStack`. Figures are medians
over the turns, a step of all envs; the env, which is Python, is a column of its own, and both others are without it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from numpy.typing import NDArray
from pettingzoo import AECEnv
from prepared_obs import FRAMES, PreparedObs
from rich.console import Console
from rich.table import Table

import marlvec
from marlvec.connectors import FrameStack, NormalizeObs, Rows
from marlvec.policies import Policy

SQUARES, PLAYERS = 64, 3
SIZES = {64: 60, 1024: 20}  # envs to steps of each in one batch


class Squares(AECEnv):  # type: ignore[misc]  # pettingzoo has no type information
    """Three players take squares by turns; a move ends the next player with probability 1/12."""

    metadata = {"name": "squares"}

    def __init__(self) -> None:
        self.possible_agents = [f"player_{a}" for a in range(PLAYERS)]
        space = Dict(observation=Box(-1, 1, (SQUARES,), np.float32), action_mask=Box(0, 1, (SQUARES,), np.int8))
        self.observation_spaces = dict.fromkeys(self.possible_agents, space)
        self.action_spaces = dict.fromkeys(self.possible_agents, Discrete(SQUARES))

    def observation_space(self, agent: str) -> Any:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> Any:
        own = float(agent[-1])
        obs = np.where(self.board < 0, 0, np.where(self.board == own, 1, -1)).astype(np.float32)
        return {"observation": obs, "action_mask": (self.board < 0).astype(np.int8)}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.board = np.full(SQUARES, -1)
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.agent_selection, self._skip_agent_selection = self.agents[0], None

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.board[action] = int(agent[-1])
        following = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self.rewards = {other: 1.0 if other == agent else -0.25 for other in self.agents}
        self.agent_selection = following
        if self.rng.random() < 1 / 12:
            self.terminations[following] = True
        left = [other for other in self.agents if not self.terminations[other]]
        if len(left) == 1 or not (self.board < 0).any():
            self.terminations = dict.fromkeys(self.agents, True)
        elif self.terminations[following]:
            self.agent_selection = self.agents[(self.agents.index(following) + 1) % len(self.agents)]
        self._accumulate_rewards()
        self._deads_step_first()


class LowestSquare(Policy):
    """Takes the first free square."""

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        return rows["action_mask"].argmax(axis=1)


class ByHand:
    """Steps envs and keeps what a learner wants."""

    def __init__(self, envs: marlvec.VectorEnv, ticks: int, prepared: bool) -> None:
        self.envs, self.ticks, n = envs, ticks, envs.num_envs
        self.every, self.stepping = np.arange(n), 0.0  # seconds of processor time in step()
        self.prepare = PreparedObs(n * PLAYERS, SQUARES) if prepared else None
        self.paid = np.zeros((n, PLAYERS))
        self.open = np.zeros((n, PLAYERS), np.bool_)  # an agent has decided and waits for what comes of it
        self.fresh = np.ones((n, PLAYERS), np.bool_)
        self.last_obs = np.zeros((n, PLAYERS, SQUARES * (FRAMES if prepared else 1)), np.float32)
        self.last_action = np.zeros((n, PLAYERS), np.int64)
        obs, self.infos = envs.reset(seed=0)
        self.turn = self.infos["acting"].argmax(axis=1)
        self.obs = self._seen(self.every, self.turn, obs[self.every, self.turn])

    def _seen(self, ids: NDArray[Any], agents: NDArray[Any], obs: NDArray[Any]) -> NDArray[Any]:
        if self.prepare is None:
            return obs
        first = self.fresh[ids, agents]
        self.fresh[ids, agents] = False
        return self.prepare(ids * PLAYERS + agents, obs, first)

    def __call__(self) -> dict[str, NDArray[Any]]:
        """One batch."""
        envs, every = self.envs, self.every
        parts: list[tuple[Any, ...]] = []

        def close(ids: Any, agents: Any, next_obs: Any, over: bool) -> None:
            place = ids, agents
            lanes = ids * PLAYERS + agents
            parts.append((lanes, self.last_obs[place], self.last_action[place], self.paid[place], next_obs, over))
            self.paid[place], self.open[place] = 0.0, False

        for _ in range(self.ticks):
            turn = self.turn
            chosen = self.infos["action_mask"][every, turn].argmax(axis=1)
            self.last_obs[every, turn], self.last_action[every, turn] = self.obs, chosen
            self.open[every, turn] = True
            actions = np.zeros((len(every), PLAYERS), np.int64)
            actions[every, turn] = chosen
            began = time.process_time()
            obs, rewards, terminated, truncated, self.infos = envs.step(actions)
            self.stepping += time.process_time() - began
            self.paid += rewards
            if (ended := terminated | truncated).any():
                ids, agents = np.nonzero(ended)
                final = self._seen(ids, agents, self.infos["final_obs"][ids, agents])
                had = self.open[ids, agents]
                close(ids[had], agents[had], final[had], True)
                self.paid[ended] = 0.0
                self.fresh[ended] = True
            turn = self.turn = self.infos["acting"].argmax(axis=1)
            self.obs = self._seen(every, turn, obs[every, turn])
            back = np.flatnonzero(self.open[every, turn])
            close(back, turn[back], self.obs[back], False)
        columns = [np.concatenate([part[i] for part in parts]) for i in range(5)]
        terminated = np.concatenate([np.full(len(part[0]), part[5]) for part in parts])
        order = np.argsort(columns[0].astype(np.uint16), kind="stable")
        names = ("obs", "actions", "rewards", "next_obs")
        found = {name: column[order] for name, column in zip(names, columns[1:], strict=True)}
        return {**found, "terminated": terminated[order]}


def measure(num_envs: int, ticks: int, turns: int, prepared: bool) -> tuple[float, float, float]:
    """Microseconds a step: of the envs, and of `collect()` and the loop by hand without the envs."""
    connectors = [NormalizeObs(), FrameStack(FRAMES)] if prepared else None
    found = []
    with (
        marlvec.make(Squares, num_envs, backend="sync") as envs,
        marlvec.make(Squares, num_envs, backend="sync") as bare,
    ):
        by_hand = ByHand(bare, ticks, prepared)
        collector = marlvec.Collector(envs, LowestSquare(), agent_connectors=connectors, seed=0)
        for k in range(turns + 3):
            by_hand.stepping = 0.0
            began = time.process_time()
            batch = collector.collect(env_steps=num_envs * ticks)["main"]
            middle = time.process_time()
            columns = by_hand()
            ended = time.process_time()
            if k < 3:
                for name, column in columns.items():
                    exact = not prepared or not name.endswith("obs")  # sums of squares are rounded in another order
                    np.testing.assert_allclose(batch[name], column, rtol=0, atol=0 if exact else 1e-4, err_msg=name)
                continue
            step = by_hand.stepping
            found.append((step, middle - began - step, ended - middle - step))
    step, ours, hand = np.median(found, axis=0) / ticks * 1e6
    return float(step), float(ours), float(hand)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    table = Table("envs", "connectors", "step() µs", "collect() without, µs", "by hand without, µs", "ratio")
    for num_envs, ticks in SIZES.items():
        for prepared in (False, True):
            step, whole, hand = measure(num_envs, ticks, args.turns, prepared)
            named = "NormalizeObs, FrameStack" if prepared else "none"
            table.add_row(f"{num_envs:,}", named, *(f"{us:,.0f}" for us in (step, whole, hand)), f"{whole / hand:.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
