"""A training that may be killed at any moment: ``python -m tests.checkpoints.training CASE FOLDER [--resume]``.

After each batch it writes its digest to FOLDER/batches.txt, says so, learns, and saves a checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space

import marlvec
from marlvec import Collector, SampleBatch
from marlvec.connectors import Rows
from marlvec.connectors.agent import AgentPipeline, FrameStack, NormalizeObs
from marlvec.policies import Policy
from marlvec.selfplay import (
    Elo,
    Every,
    Latest,
    Mirror,
    Mixture,
    OpponentPool,
    Prioritised,
    RatingTracker,
    SelfPlayMapping,
)
from tests.collect.saved import columns_of, counted, without_clock

# --- What learns, cheaply, in tests of checkpoints: a softmax over linear logits, by policy gradient, in numpy


class Linear(Policy):
    """Draws actions with its own random stream, from logits that are linear in the observation.

    Attributes:
        weights: (inputs, actions) float64; none before it knows its spaces.
    """

    def __init__(self) -> None:
        self.weights = np.zeros((0, 0))
        self.rng = np.random.default_rng(0)

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        assert isinstance(action_space, Discrete)
        if not self.weights.size:  # else they were loaded
            self.weights = np.zeros((int(np.prod(observation_space.shape or ())), int(action_space.n)))
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> Any:
        logits = self.logits(rows)
        noise = self.rng.gumbel(size=logits.shape) if explore else 0.0
        actions = (logits + noise).argmax(axis=1)
        return actions, {"logit": logits[np.arange(len(actions)), actions]}

    def logits(self, rows: Rows) -> np.ndarray[Any, Any]:
        """One per action, -inf where it is forbidden."""
        logits = rows["obs"].reshape(len(rows), -1).astype(np.float64) @ self.weights
        mask = rows.get("action_mask")
        return logits if mask is None else np.where(mask, logits, -np.inf)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights = np.array(state["weights"])
        self.rng.bit_generator.state = state["rng"]


class Momentum:
    """Learns from one batch after the other; what it remembers of earlier ones is a part of the training.

    Args:
        policy: Whose weights.
    """

    def __init__(self, policy: Linear) -> None:
        self._policy, self._speed, self._baseline = policy, np.zeros(()), 0.0

    def learn(self, rows: SampleBatch) -> None:
        """One step along the gradient."""
        policy, n = self._policy, len(rows)
        if n == 0:
            return
        logits = policy.logits(rows)
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        off = -chances
        off[np.arange(n), rows.actions] += 1.0
        gain = rows.rewards - self._baseline
        self._baseline += 0.1 * float(gain.mean())
        gradient = rows.obs.reshape(n, -1).astype(np.float64).T @ (off * gain[:, None]) / n
        self._speed = 0.9 * self._speed + gradient
        policy.weights = policy.weights + 0.05 * self._speed
        policy.version += 1

    def state_dict(self) -> dict[str, Any]:
        return {"speed": self._speed, "baseline": self._baseline}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._speed, self._baseline = np.array(state["speed"]), state["baseline"]


# --- A training that may be killed at any moment: ``python -m tests.checkpoints.training CASE FOLDER [--resume]``


@dataclass
class Training:
    """What is trained, and how.

    Attributes:
        collector: Its collector; its envs are closed with it.
        amount: What one batch is.
        learner: What learns from the batches of ``main``, and goes into checkpoints.
        after: Called after each batch that was learned from.
        is_in_background: Whether batches are made while others are learned from; the policy that acts is not changed.
    """

    collector: Collector
    amount: dict[str, int]
    learner: dict[str, Any]
    after: Callable[[], None] = lambda: None
    is_in_background: bool = False

    def batches(self, count: int) -> Iterator[marlvec.MultiAgentBatch]:
        """The next batches."""
        with ExitStack() as stack:
            made: Iterable[marlvec.MultiAgentBatch] = (self.collector.collect(**self.amount) for _ in range(count))
            if self.is_in_background:
                made = stack.enter_context(self.collector.background(**self.amount, ahead=2))
            yield from islice(made, count)


def connectors() -> AgentPipeline:
    return AgentPipeline([NormalizeObs(), FrameStack(2)])


def spread(folder: Path) -> Training:
    """Compiled envs, cut batches."""
    policy = Linear()
    envs = marlvec.make("simple_spread", 6, backend="native")
    collector = Collector(envs, {"main": policy}, "main", agent_connectors=connectors(), seed=1)
    return Training(collector, {"env_steps": 70}, {"momentum": Momentum(policy)})


def league(folder: Path) -> Training:
    """Self-play with a pool and ratings, whole episodes."""
    policy = Linear()
    envs = marlvec.make("connect_four", 6, backend="native")
    board = RatingTracker(envs.agents, ratings=Elo())
    options: dict[str, Any] = {"capacity": 2, "when": [Every(90)], "board": board}
    home = folder / "pool"
    pool = (OpponentPool.load if (home / "pool.npz").exists() else new_pool)(home, Linear, **options)
    makers = (1.0, Mirror()), (2.0, Latest(2)), (2.0, Prioritised(board.table))
    mapping = SelfPlayMapping(pool, envs.agents, {"main": Mixture(*makers)})
    collector = Collector(envs, {"main": policy}, mapping, callbacks=[board], batch_mode="complete", seed=2)

    def after() -> None:
        if pool.offer(collector, "main"):
            mapping.update(collector)

    return Training(collector, {"env_steps": 60}, {"momentum": Momentum(policy)}, after)


def new_pool(folder: Path, make: Any, **options: Any) -> OpponentPool:
    return OpponentPool(make, folder=folder, **options)


def wrapped(folder: Path) -> Training:
    """PettingZoo's envs in processes, saved as copies of their attributes; connectors that learn and remember."""
    policy = Linear()
    envs = marlvec.make("simple_spread", 4, backend="async", num_workers=2, env_state="deepcopy", N=2, max_cycles=9)
    collector = Collector(envs, {"main": policy}, "main", agent_connectors=connectors(), seed=3, overlap=True)
    return Training(collector, {"env_steps": 30}, {"momentum": Momentum(policy)})


def background(folder: Path) -> Training:
    """Whole episodes that a thread makes beforehand."""
    envs = marlvec.make("simple_spread", 6, backend="native")
    options: dict[str, Any] = {"agent_connectors": connectors(), "batch_mode": "complete", "seed": 4}
    collector = Collector(envs, {"main": Linear()}, "main", **options)
    student = Linear()
    student.weights = np.zeros((36, 5))
    learner = {"student": student, "momentum": Momentum(student)}
    return Training(collector, {"episodes": 4}, learner, is_in_background=True)


CASES: dict[str, Callable[[Path], Training]] = {
    "spread": spread,
    "league": league,
    "wrapped": wrapped,
    "background": background,
}


def digest(value: Any) -> str:
    """Sha256 over plain data, to the bit."""
    whole = hashlib.sha256()

    def take(value: Any) -> None:
        whole.update(type(value).__name__.encode())
        if isinstance(value, dict):
            for key, part in value.items():
                whole.update(repr(key).encode())
                take(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                take(part)
        elif isinstance(value, np.ndarray):
            whole.update(f"{value.dtype} {value.shape}".encode())
            whole.update(value.tobytes())
        else:
            whole.update(repr(value).encode())

    take(value)
    return whole.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--hold-at", type=int, help="wait for being killed once so many batches are there")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    training, done = CASES[args.case](args.folder), 0
    collector = training.collector
    with collector.envs, (args.folder / "batches.txt").open("a", buffering=1) as lines:
        saved: dict[str, Any] = {"collector": collector, "learner": training.learner}
        if args.resume and (args.folder / "last.npz").exists():
            done = marlvec.load_checkpoint(args.folder, **saved)["done"]
        lines.write(f"begins at {done}\n")
        for batch in training.batches(args.batches - done):
            sums = None if training.is_in_background else counted(collector)
            lines.write(f"{done} {digest([columns_of(batch), sums])}\n")
            done += 1
            sys.stdout.write(f"{done}\n")
            sys.stdout.flush()
            training.learner["momentum"].learn(batch["main"])
            training.after()
            marlvec.save_checkpoint(args.folder, progress={"done": done}, keep=2, **saved)
            if args.hold_at is not None and done >= args.hold_at:
                signal.pause()
        state = None if training.is_in_background else without_clock(collector.get_state())
        lines.write(f"end {digest([state, training.learner['momentum'].state_dict()])}\n")


if __name__ == "__main__":
    main()
