"""`RandomPolicy`: random actions, within action masks; `ScriptedPolicy`: a function of one agent's row."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete, Space
from numpy.typing import NDArray

from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError, StateError
from marlvec.policies.policy import Policy, PolicyOutput, PolicyState
from marlvec.sampling import SpaceSampler
from marlvec.spaces import Leaf, SpaceTree
from marlvec.spaces.members import fit
from marlvec.trees import Tree, map_tree


class RandomPolicy(Policy):
    """Acts uniformly at random; with an action mask, uniformly over the allowed actions.

    `marlvec.sampling.SpaceSampler` describes how each kind of space is sampled, and the meaning of masks.

    Args:
        seed: Seed of its random generator; None: from the collector's seed.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self._rng = np.random.default_rng(seed)
        self._sampler: SpaceSampler | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self._sampler = SpaceSampler(SpaceTree(action_space))
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        if self.seed is None:
            self._rng = np.random.default_rng(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Draw one action per row.

        Raises:
            StateError: `setup` was not called.
            ContractError: A mask allows no action, or does not fit the action space; names the env and the agent.
        """
        if self._sampler is None:
            raise StateError("this RandomPolicy has no action space yet: call setup() first, or use a Collector")

        def where(i: int) -> str:
            return f"env {int(rows['env_id'][i])}, agent {int(rows['agent_index'][i])}"

        drawn: Tree = self._sampler.sample(self._rng, len(rows), rows.get("action_mask"), where)
        return drawn

    def probabilities(self, rows: Rows) -> NDArray[np.float64]:
        """Return the probability of each action, for n rows: (n, k) float64; masked actions have 0.

        Returns:
            Rows that sum to 1.

        Raises:
            StateError: `setup` was not called.
            ArgumentError: The action space is not Discrete.
        """
        space = self.action_space
        if space is None:
            raise StateError("this RandomPolicy has no action space yet: call setup() first, or use a Collector")
        if not isinstance(space, Discrete):
            raise ArgumentError(f"probabilities(): expected a Discrete action space, got {space}")
        allowed = np.asarray(rows.get("action_mask", np.ones((len(rows), int(space.n)))), np.float64)
        shares: NDArray[np.float64] = allowed / allowed.sum(axis=1, keepdims=True)
        return shares

    def state_dict(self) -> PolicyState:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rng = np.random.default_rng()
        try:
            rng.bit_generator.state = state["rng"]
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"expected the state of a RandomPolicy, got {dict(state)!r}") from error
        self._rng = rng

    def __repr__(self) -> str:
        return "RandomPolicy()" if self.seed is None else f"RandomPolicy(seed={self.seed})"


class Memory(dict[Any, Any]):
    """A script's memory of one agent's episode: a dict, empty at the episode's start.

    ``action_mask`` is (k,) bool, the allowed actions; None if the env has no masks.
    """

    __slots__ = ("_key", "_rng", "action_mask")

    def __init__(self, key: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self._key = key
        self._rng: np.random.Generator | None = None
        self.action_mask: NDArray[np.bool_] | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Random generator of this agent's episode: a function of the policy's seed, env, agent and episode."""
        if self._rng is None:
            self._rng = np.random.default_rng(self._key)
        return self._rng

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain data."""
        rng = None if self._rng is None else self._rng.bit_generator.state
        return {"key": self._key, "items": dict(self), "rng": rng}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Memory:
        """Rebuild a memory from a state of `state_dict`."""
        memory = cls(tuple(state["key"]))
        memory.update(state["items"])
        if state["rng"] is not None:
            memory.rng.bit_generator.state = state["rng"]
        return memory


Script = Callable[[Any, int, int, Memory], Any]
"""``(obs, agent, t, memory) -> action``: one agent's observation, its index, the number of its decision, and its
memory; returns one action."""


class ScriptedPolicy(Policy):
    """A policy made of a script that is called once per row: write it for one agent at a time.

    For rule-based opponents, fixed openings and teachers. It is the only policy with a Python loop over rows; a
    `FunctionPolicy` of all rows is faster.

        def corner(obs, agent, t, memory):
            memory.setdefault("side", int(memory.rng.integers(4)))
            return memory["side"] if t < 10 else 4

        ScriptedPolicy(corner)

    Answers are in the policy's space, which connectors derive from the env's: with the default action connectors a
    bounded Box becomes [-1, 1], and `UnsquashActions` scales answers to the env's bounds (0.8 is sent to Pendulum as
    1.6). To answer in the env's own units, leave it out: ``action_connectors=[ToNumpy(), ClipActions()]``. The first
    answer outside of [-1, 1] warns.

    Args:
        script: ``(obs, agent, t, memory) -> action``. ``memory`` is a `Memory` per (env, agent), new with each episode.
            It can be saved if it holds plain values (numbers, texts, arrays, lists, dicts, tuples).
    """

    def __init__(self, script: Script) -> None:
        if not callable(script):
            raise ArgumentError(
                f"ScriptedPolicy(): expected a function (obs, agent, t, memory), got {type(script).__name__}"
            )
        self.script = script
        self._seed = 0
        self._tree: SpaceTree | None = None
        self._memories: dict[tuple[int, int], tuple[int, Memory]] = {}  # (env, agent) to episode id and memory

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        self._tree = SpaceTree(action_space)
        super().setup(observation_space, action_space, seed=seed)

    def reseed(self, seed: int) -> None:
        """Restart the random generators, and drop all memories."""
        self._seed = seed
        self._memories.clear()

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        """Call the script for each row.

        Raises:
            StateError: `setup` was not called.
            ContractError: The script's action does not fit the action space; names the env and the agent.
            Exception: As raised by the script, with a note that names the row. Memories of earlier rows have changed.
        """
        if self._tree is None:
            raise StateError("this ScriptedPolicy has no action space yet: call setup() first, or use a Collector")
        obs, masks = rows["obs"], rows.get("action_mask")
        eps_ids = rows["eps_id"].tolist() if "eps_id" in rows else [-1] * len(rows)
        names = zip(rows["env_id"].tolist(), rows["agent_index"].tolist(), eps_ids, rows["t"].tolist(), strict=True)
        chosen: list[list[Any]] = []
        for i, (env, agent, eps_id, t) in enumerate(names):
            memory = self._memory(env, agent, eps_id, begins=t == 0)
            memory.action_mask = None if masks is None else masks[i]
            where = f"env {env}, agent {agent}, decision {t}"
            try:
                action = self.script(map_tree(itemgetter(i), obs), agent, t, memory)
            except Exception as error:
                error.add_note(f"in the script of {self!r}, {where}")
                raise
            chosen.append(self._leaves(self._tree, action, where))
        parts = [_stack(leaf, [leaves[k] for leaves in chosen]) for k, leaf in enumerate(self._tree.leaves)]
        return self._tree.unflatten(parts)

    def _memory(self, env: int, agent: int, eps_id: int, *, begins: bool) -> Memory:
        """Return the episode's memory, a new one for a new episode."""
        known, memory = self._memories.get((env, agent), (None, None))
        if memory is None or known != eps_id or (begins and eps_id < 0):
            memory = Memory((self._seed, env, agent, eps_id + 1))
            self._memories[env, agent] = eps_id, memory
        return memory

    def _leaves(self, tree: SpaceTree, action: Any, where: str) -> list[Any]:
        try:
            return [
                value if leaf.is_object else fit(leaf.blank(), value, leaf)
                for leaf, value in zip(tree.leaves, tree.flatten(action), strict=True)
            ]
        except ContractError as error:
            raise self._bad(action, where) from error

    def _bad(self, action: Any, where: str) -> ContractError:
        assert self._tree is not None  # set by `setup`, which `act` requires
        return ContractError(f"script of {self!r}, {where}: expected one action of {self._tree.space}, got {action!r}")

    def state_dict(self) -> PolicyState:
        memories = {key: (eps_id, memory.state_dict()) for key, (eps_id, memory) in self._memories.items()}
        return {"seed": self._seed, "memories": copy.deepcopy(memories)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"seed", "memories"}:
            raise ArgumentError(f"expected the state of a ScriptedPolicy, got {list(state)}")
        memories = copy.deepcopy(dict(state["memories"]))
        self._seed = state["seed"]
        self._memories = {key: (eps_id, Memory.from_state_dict(one)) for key, (eps_id, one) in memories.items()}

    def __repr__(self) -> str:
        return f"ScriptedPolicy({getattr(self.script, '__name__', repr(self.script))})"


def _stack(leaf: Leaf, values: list[Any]) -> NDArray[Any]:
    """Stack n single actions to (n, …)."""
    out = leaf.blank(len(values))
    for i, value in enumerate(values):
        out[i] = value
    return out
