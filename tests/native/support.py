"""What tests of compiled envs share: an env with rows and no vectorizer, ids, arguments and how they are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import marlvec
from marlvec import VectorEnv
from marlvec.native.kernels import seed_envs
from marlvec.native.native_env import NativeEnv
from marlvec.registry import resolve_all
from marlvec.vector.buffers import Buffers

# --- A native env with rows of its own and no vectorizer around it, and what its rows are held against


NONSENSE = 77  # what agents that are not acting are made to say


class Table:
    """Does for a native env what its runner does before each call, and nothing after it."""

    def __init__(self, env: NativeEnv) -> None:
        self.env = env
        self.rows = Buffers(env.spec(), env.num_envs)
        env.attach(self.rows)

    def reset(self, ids: NDArray[np.int64], seeds: Sequence[int] | None = None) -> None:
        if seeds is not None:
            seed_envs(self.env.rng, ids, seeds)
        self.rows.alive[ids] = self.rows.acting[ids] = False
        self.rows.clear_masks(ids)
        self.env.reset(ids)

    def step(self, ids: NDArray[np.int64], actions: NDArray[np.int64]) -> None:
        """``actions`` are (N, A), or (N,) those of the agents whose turn it is."""
        self.rows.reward[ids] = 0
        self.rows.events[ids] = False
        self.rows.actions[0][0][:] = np.where(
            self.rows.acting, actions if actions.ndim == 2 else actions[:, None], NONSENSE
        )
        self.env.step(ids)


class Shown:
    """What the rows of turn-based games for two are to show; a reference writes here, world by world."""

    def __init__(self, env: NativeEnv) -> None:
        n = env.num_envs
        (obs,) = {(space.shape, space.dtype) for space in env.observation_spaces}
        self.obs = np.zeros((n, 2, *obs[0]), obs[1])
        self.masks = np.ones((n, 2, env.action_spaces[0].n), np.bool_)
        self.reward = np.zeros((n, 2))
        self.terminated, self.truncated, self.alive, self.acting = np.zeros((4, n, 2), np.bool_)

    def turn(self, i: int, mover: int, mask: Any) -> None:
        """It is this agent's turn in world ``i``."""
        self.alive[i] = True
        self.acting[i] = [a == mover for a in range(2)]
        self.masks[i] = True
        self.masks[i, mover] = np.asarray(mask, np.bool_)

    def end(self, i: int, reward: Any, terminated: Any, truncated: Any) -> None:
        """The game in world ``i`` is over."""
        self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
        self.alive[i] = self.acting[i] = False
        self.masks[i] = True

    def hold(self, table: Table, ids: NDArray[np.int64]) -> None:
        """Compare every array of these worlds."""
        rows = table.rows
        for what, got, expected in (
            ("obs", rows.obs[0][0], self.obs),
            ("masks", rows.action_masks[0], self.masks),
            ("reward", rows.reward, self.reward),
            ("terminated", rows.terminated, self.terminated),
            ("truncated", rows.truncated, self.truncated),
            ("alive", rows.alive, self.alive),
            ("acting", rows.acting, self.acting),
            ("done", rows.done, ~self.alive.any(axis=1)),
        ):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got[ids], expected[ids], what)


# --- The scenarios of mpe2, with arguments that are not the defaults, and how to play them


ARGUMENTS: dict[str, list[dict[str, Any]]] = {
    "simple": [{}],
    "simple_spread": [
        {},
        {"N": 1},
        {"N": 5, "local_ratio": 0.3},
        {"N": 2, "terminate_on_success": True, "curriculum": True, "local_ratio": 1},
        {"N": 4, "num_agent_neighbors": 2, "num_landmark_neighbors": 6},
    ],
    "simple_tag": [
        {},
        {"num_good": 3, "num_adversaries": 2, "num_obstacles": 4},
        {"num_good": 2, "num_adversaries": 5, "num_obstacles": 0, "terminate_on_success": True, "curriculum": True},
        {"num_agent_neighbors": 2},
        {"num_good": 2, "num_agent_neighbors": 6, "num_landmark_neighbors": 1},
        {"num_obstacles": 0, "num_landmark_neighbors": 2},
    ],
    "simple_push": [{}],
    "simple_adversary": [{}, {"N": 1}, {"N": 4}, {"N": 5, "num_agent_neighbors": 2, "num_landmark_neighbors": 3}],
    "simple_reference": [{}, {"local_ratio": 0.8}],
    "simple_speaker_listener": [{}],
    "simple_crypto": [{}],
    "simple_world_comm": [
        {},
        {"num_good": 1, "num_adversaries": 2, "num_obstacles": 3, "num_food": 1, "num_forests": 0},
        {"num_good": 3, "num_adversaries": 1, "num_forests": 5},
    ],
    "simple_line": [{}, {"N": 1}, {"N": 9, "terminate_on_success": True}],
    "simple_formation": [{}, {"N": 1, "terminate_on_success": True}, {"N": 10}],
    "collect_treasure": [
        {},
        {"num_collectors": 9, "num_deposits": 1, "num_treasures": 9},
        {"num_collectors": 2, "num_deposits": 4, "num_treasures": 3},
    ],
}
"""Per scenario: the default, and others that reach other branches."""

CASES = [
    (name, {**kwargs, "continuous_actions": continuous})
    for name, found in ARGUMENTS.items()
    for kwargs in found
    for continuous in (False, True)
]


def words(case: tuple[str, dict[str, Any]]) -> str:
    """A case as the name of a test."""
    name, kwargs = case
    return " ".join([name, *(f"{key}={value}" for key, value in kwargs.items())])


def factories(name: str, num_envs: int, **kwargs: Any) -> list[Callable[[], Any]]:
    """One factory per env, of mpe2's own."""
    return [factory.with_kwargs(**kwargs) for factory in resolve_all(name, num_envs)]


def native(name: str, num_envs: int, **options: Any) -> VectorEnv:
    return marlvec.make(name, num_envs, backend="native", **options)


def maker(name: str, num_envs: int, **options: Any) -> Callable[..., VectorEnv]:
    return partial(native, name, num_envs, **options)


# --- Foraging and the warehouse: ids of each kind, and how they are played


SMALL = """
    .....
    gx.xg
    .....
    .x.x.
    """
"""A warehouse in which chance delivers."""


def loads(envs: VectorEnv, rng: np.random.Generator) -> Any:
    """Random actions of foraging, of which many load: by chance few foods are."""
    actions = rng.integers(0, 6, (envs.num_envs, envs.agent_num))
    actions[rng.random(actions.shape) < 0.4] = 5
    return actions


def forward(envs: VectorEnv, rng: np.random.Generator) -> Any:
    """Mostly forward, so that many want to the same places, and now and then something is taken up or put down."""
    shape = (envs.num_envs, envs.agent_num)
    actions = rng.choice(5, shape, p=[0.05, 0.6, 0.1, 0.1, 0.15])
    messages = envs.action_space.shape[2:]
    if not messages:
        return actions
    return np.concatenate([actions[..., None], rng.integers(0, 2, (*shape, messages[0] - 1))], axis=2)


class Grid(NamedTuple):
    """A package's grid envs: ids of each kind, the default first, and how they are played.

    ``short`` are arguments with which an episode is not long, and so many ``episodes`` of some envs are thousands of
    env steps; with ``busy`` much happens, and episodes end.
    """

    package: str
    ids: list[str]
    actions: Callable[[VectorEnv, np.random.Generator], Any]
    short: dict[str, Any]
    episodes: int
    busy: dict[str, Any]


FORAGING = Grid(
    package="lbforaging",
    ids=[
        "lbf/Foraging-8x8-2p-3f-v3",
        "lbf/Foraging-2s-8x8-2p-2f-coop-v3",
        "lbf/Foraging-15x15-4p-5f-v3",
        "lbf/Foraging-2s-10x10-3p-3f-v3",
        "lbf/Foraging-5x5-9p-4f-v3",
        "lbf/Foraging-6x6-3p-2f-ind-pen-v3",
        "lbf/Foraging-grid-8x8-3p-2f-coop-v3",
        "lbf/Foraging-grid-2s-7x7-4p-3f-v3",
    ],
    actions=loads,
    short={},
    episodes=6,
    busy={},
)
WAREHOUSE = Grid(
    package="rware",
    ids=[
        "rware/rware-tiny-2ag-v2",
        "rware/rware-tiny-4ag-hard-v2",
        "rware/rware-small-10ag-easy-v2",
        "rware/rware-2s-small-3h-19ag-v2",
        "rware/rware-1x3-2h-12ag-5req-twostage-v2",
        "rware/rware-2x3-1h-6ag-4req-global-v2",
    ],
    actions=forward,
    short={"max_steps": 100},
    episodes=2,
    busy={"layout": SMALL, "max_steps": 50, "request_queue_size": 2},
)


def grid_of(env_id: str) -> Grid:
    """The grid that an id is of."""
    return FORAGING if env_id.startswith("lbf/") else WAREHOUSE


def case(env_id: str, *more: Any, slow: str = "") -> Any:
    """A case of a test: an id and what else the test takes; skipped where the package is not installed.

    Args:
        env_id: The id.
        more: The test's other arguments.
        slow: Why it is slow, if it is.
    """
    package = grid_of(env_id).package
    marks = [pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")]
    marks += [pytest.mark.slow(slow)] if slow else []
    return pytest.param(env_id, *more, marks=marks)
