"""Random programs of collecting, and all that comes of them as text: run by another build of marlvec, too.

``python -m tests.collect.both_builds 0 50`` prints a line for each batch and for the metrics after it, of the
programs from 0 to 49. Two builds that do the same print the same; see `tests.collect.rollout.test_old_and_new`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import marlvec
from marlvec.connectors import (
    AgentIndicator,
    ClipActions,
    FrameStack,
    GeneralAdvantageEstimation,
    NormalizeObs,
    ToNumpy,
)
from marlvec.testing import NoOpEnv
from marlvec.trees import tree_leaves
from tests.collect.players import KINDS, MODES, Scattered, factories, sync

NATIVE = {"simple_spread": {"max_cycles": 7}, "simple_tag": {"max_cycles": 9}, "connect_four": {}, "tictactoe": {}}
IDS = ("first", "second", "third")


class Player(marlvec.Policy):
    """Acts by what it sees, gives what it is told to, and writes into its rows."""

    def __init__(self, salt: int, gives: str, sizes: Any, *, writes: bool) -> None:
        self.salt, self.gives, self.sizes, self.writes = salt, gives, sizes, writes
        self.asked = 0

    def act(self, rows: Any, *, explore: bool = True) -> Any:
        self.asked += 1
        if self.asked % 11 == 0:
            self.version += 1
        number = np.full(len(rows), self.salt + self.asked)
        for _, leaf in tree_leaves(rows["obs"]):
            flat = leaf.reshape(len(rows), -1).astype(np.float64)
            number = number + (np.abs(flat).sum(axis=1) * 31).astype(np.int64)
        number = number + rows["t"] + 3 * rows["agent_index"] + rows["eps_id"]
        mask = rows.get("action_mask")
        if mask is None:
            actions = number % self.sizes
        else:
            order = np.cumsum(mask, axis=1)
            actions = (order > (number % np.maximum(order[:, -1], 1))[:, None]).argmax(axis=1)
        if self.writes:
            for name in ("obs", "rewards", "t"):
                for _, leaf in tree_leaves(rows[name]):
                    leaf[...] = 0
        if self.gives == "actions":
            return actions
        columns: dict[str, Any] = {"logp": np.log1p(number % 7), "values": (number % 5).astype(np.float32)}
        if self.gives == "tree":
            columns["state_out"] = {"h": np.stack([number, actions], axis=1).astype(np.float32), "c": number * 0.5}
        return actions, columns


def by_lot(agent: str, episode: Any) -> str:
    return IDS[int(episode.rng.integers(3))]


def by_number(agent: str, episode: Any) -> str:
    return IDS[(sum(map(ord, agent)) + episode.env_id + episode.number) % 3]


def envs_of(draw: random.Random) -> Any:
    """Any envs, and how they reply."""
    kind = draw.choice([*KINDS, *KINDS, *NATIVE, *NATIVE, "nothing"])
    n, mode = draw.randint(1, 6), draw.choice(MODES)
    if kind == "nothing":
        return marlvec.make(NoOpEnv, num_envs=n, backend="sync", length=draw.randint(1, 12))
    if kind in NATIVE:
        state = kind.startswith("simple") and draw.random() < 0.3
        return marlvec.make(kind, num_envs=n, backend="native", autoreset_mode=mode, state=state, **NATIVE[kind])
    agents, copy = draw.randint(1, 4), draw.random() < 0.8
    if draw.random() < 0.3:
        return Scattered(factories(kind, n, agents), draw.randint(0, 99), autoreset_mode=mode, copy=copy)
    return sync(kind, n, agents, mode, copy=copy)


def collector_of(envs: Any, draw: random.Random) -> marlvec.Collector:
    """Any collector."""
    if len(envs.spec.groups) > 1:
        names = {group.name: group for group in envs.spec.groups}
        agents = {envs.agents[i]: name for name, group in names.items() for i in group.agents}
        spaces, mapping = {name: group.action_space for name, group in names.items()}, dict(agents)
    else:
        mapping = draw.choice(["first", by_number, by_lot])
        spaces = dict.fromkeys(IDS, envs.spec.groups[0].action_space)
    gives, writes = draw.choice(["actions", "actions", "columns", "tree"]), draw.random() < 0.3
    policies = {name: Player(k, gives, int(space.n), writes=writes) for k, (name, space) in enumerate(spaces.items())}
    options: dict[str, Any] = {}
    if draw.random() < 0.4:
        chains = [
            [AgentIndicator()],
            [NormalizeObs()],
            [FrameStack(3)],
            [NormalizeObs(), FrameStack(2), AgentIndicator()],
        ]
        options["agent_connectors"] = draw.choice(chains)
    if draw.random() < 0.2:
        options["action_connectors"] = [ToNumpy(), ClipActions()]
    if gives != "actions" and draw.random() < 0.3:
        options["learner_connectors"] = [
            GeneralAdvantageEstimation(0.9, 0.8, value_function=lambda rows: np.asarray(rows["rewards"]) * 0.5)
        ]
    if draw.random() < 0.2:
        options["random_steps"] = draw.randint(1, 40)
    if draw.random() < 0.3:
        options["policies_to_train"] = [next(iter(policies))]
    if draw.random() < 0.2:
        options["callbacks"] = [{"on_episode_step": lambda episodes, *_: None}]
    found = marlvec.Collector(
        envs,
        policies,
        mapping,
        seed=draw.randint(0, 99),
        batch_mode=draw.choice(["truncate", "truncate", "truncate", "complete"]),
        overlap=draw.random() < 0.2,
        **options,
    )
    if callable(mapping) and draw.random() < 0.4:
        found.remove_policy("third")
        found.add_policy("third", Player(9, gives, policies["first"].sizes, writes=writes), like="first", frozen=True)
    return found


def digest(leaf: Any) -> str:
    array = np.asarray(leaf)
    data = repr(array.tolist()).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
    return f"{array.dtype}{list(array.shape)}:{hashlib.blake2b(data, digest_size=6).hexdigest()}"


def text_of(rows: Any) -> str:
    """All columns."""
    return " ".join(
        f"{name}/{path}={digest(leaf)}" for name, column in rows.items() for path, leaf in tree_leaves(column)
    )


def metrics_of(collector: marlvec.Collector) -> str:
    """Counts, and the last episodes but for their seconds."""
    found = collector.metrics
    names = ("env_steps", "agent_steps", "episodes_total", "env_steps_lost", "agent_steps_lost", "noop_steps")
    arrays = ("returns_A", "lengths_A", "present_A", "truncated_A")
    episodes = [
        (e.eps_id, e.env_id, e.number, e.length, *(digest(getattr(e, name)) for name in arrays), *e.policies)
        for e in found.episodes
    ]
    return f"{[getattr(found, name) for name in names]} {digest(np.array(repr(episodes)))}"


def lines(seed: int) -> Iterator[str]:
    """What one program gives."""
    draw = random.Random(seed)
    with envs_of(draw) as envs:
        collector = collector_of(envs, draw)
        state = None
        for _ in range(draw.randint(2, 7)):
            move = draw.random()
            if move < 0.08:
                collector.reset(draw.choice([None, 5]))
            elif move < 0.2:
                state = collector.get_state()
            elif move < 0.26 and state is not None:
                collector.set_state(state)
            unit = draw.choice(["env_steps", "env_steps", "agent_steps", "episodes", "rounds"])
            amount = draw.randint(1, 3 if unit == "episodes" else 60)
            if unit == "rounds":
                unit, amount = "env_steps", draw.randint(1, 15) * envs.num_envs
            batch = collector.collect(**{unit: amount})
            yield f"{unit}={amount} {batch.env_steps} {batch.agent_steps} {list(batch)}"
            how = draw.random()
            for name, rows in batch.items():
                if how < 0.3:
                    yield f"{name} {text_of(rows.take(np.arange(len(rows))[::-2]))}"
                elif how < 0.4:
                    yield f"{name} {text_of(rows.slice(1, len(rows)))}"
                elif how < 0.5:
                    yield f"{name} {text_of(rows.replace(more=rows['rewards'] + 1))}"
                yield f"{name} {text_of(rows)}"
            yield metrics_of(collector)


def main() -> None:
    """Print the lines of some programs."""
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        try:
            for line in lines(seed):
                sys.stdout.write(f"{seed} {line}\n")
        except Exception as error:  # both builds must refuse the same
            sys.stdout.write(f"{seed} {type(error).__name__}: {error}"[:300] + "\n")


if __name__ == "__main__":
    main()
