"""What the benchmark of connectors gives them: rows, a case for every connector there is, and the chains."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space

from marlvec import connectors as c
from marlvec.connectors import Connector, Rows
from marlvec.sampling import SpaceSampler
from marlvec.spaces import AnyText, SpaceTree

__all__ = [
    "AGENTS",
    "CASES",
    "LARGE",
    "QUESTIONS",
    "SMALL",
    "UNIT",
    "VECTOR",
    "WIDTH",
    "Case",
    "Tick",
    "chains",
    "rows_of",
]

Tick = Callable[[], Any]
"""One call with all rows."""

AGENTS = ("agent_0", "agent_1", "agent_2")
WIDTH = 18  # as simple_spread's observations
SMALL, LARGE = 16, 4096  # envs
VECTOR = Box(-np.inf, np.inf, (WIDTH,), np.float32)
UNIT = Box(-1.0, 1.0, (WIDTH,), np.float32)
IMAGE = Box(0, 255, (16, 16, 3), np.uint8)
ARM = Box(-2.0, 3.0, (WIDTH,), np.float32)
CHOICE = Discrete(5)
TEXT = AnyText(examples=["a text " * 40])
STATE = Box(-np.inf, np.inf, (2 * WIDTH,), np.float32)


# --- rows


def draw(space: Space[Any], n: int, seed: int = 0) -> Any:
    """A column of n members of a space; the same one again for the same space."""
    key = id(space), n, seed
    if key not in _DRAWN:
        _DRAWN[key] = space, SpaceSampler(SpaceTree(space)).sample(np.random.default_rng(seed), n)
    return _DRAWN[key][1]


_DRAWN: dict[tuple[int, int, int], tuple[Space[Any], Any]] = {}  # holds the spaces too, so that no id comes twice


def rows_of(envs: int, space: Space[Any], *, first: bool = False, seed: int = 0) -> Rows:
    """Rows as a collector gives them in, one for each of 3 agents of every env."""
    return _rows(envs, first, seed).replace(obs=draw(space, envs * len(AGENTS), seed))


@cache
def _rows(envs: int, first: bool, seed: int) -> Rows:
    n, rng = envs * len(AGENTS), np.random.default_rng(seed)
    env_id, agent_index = np.divmod(np.arange(n), len(AGENTS))
    return Rows(
        env_id=env_id,
        agent_index=agent_index,
        eps_id=env_id,
        t=np.full(n, 0 if first else seed + 1),
        rewards=rng.normal(size=n),
        terminated=np.zeros(n, np.bool_),
        truncated=np.zeros(n, np.bool_),
        first=np.full(n, first),
        last=np.zeros(n, np.bool_),
        action_mask=(rng.random((n, 5)) < 0.7) | (np.arange(5) == 0),
        state=draw(STATE, n, seed),
    )


def answered(rows: Rows, space: Space[Any], seed: int = 0) -> Rows:
    """The same with what a policy answers, on its way to the env."""
    actions = draw(space, len(rows), seed)
    numbers = np.random.default_rng(seed).normal(size=(2, len(rows))).astype(np.float32)
    return rows.replace(actions=actions, logp=numbers[0], values=numbers[1], actions_for_env=actions)


def batch_of(envs: int, seed: int = 0) -> Rows:
    """A finished batch: fragments of 16 steps, as many rows as there are in a tick."""
    rows = answered(rows_of(envs, VECTOR, seed=seed), CHOICE, seed)
    n = len(rows)
    time_n, ends = np.arange(n) % 16, np.arange(n) % 16 == 15
    return Rows(
        {
            **{name: rows[name] for name in ("env_id", "agent_index", "eps_id", "obs", "actions", "logp", "values")},
            "t": time_n,
            "unroll_id": np.arange(n) // 16,
            "rewards": rows.rewards,
            "next_obs": draw(VECTOR, n, seed + 1),
            "next_values": rows["values"],
            "terminated": ends & (np.arange(n) % 32 == 31),
            "truncated": np.zeros(n, np.bool_),
            "target_logp": rows.logp,
            "advantages": rows["values"],
        }
    )


# --- every connector


class Case(NamedTuple):
    """A connector and what it is given.

    Attributes:
        name: Its class in ``marlvec.connectors``.
        args: What it is made with.
        space: Agent side: of one observation. Action side: of one action that the env takes.
    """

    name: str
    args: tuple[Any, ...] | dict[str, Any] = ()
    space: Space[Any] = VECTOR

    def make(self) -> Connector:
        """Make it."""
        cls = getattr(c, self.name)
        piece: Connector = cls(**self.args) if isinstance(self.args, dict) else cls(*self.args)
        return piece

    def tick(self, envs: int) -> Tick:
        """One call of it, set up and in the middle of an episode."""
        piece = self.make()
        if isinstance(piece, c.AgentConnector):
            return agent_tick(c.AgentPipeline([piece]), self.space, envs)
        if isinstance(piece, c.ActionConnector):
            return action_tick(c.ActionPipeline([piece]), self.space, envs)
        batch = batch_of(envs)
        if self.name == "UnpadSequences":
            batch = c.PadSequences(8)(batch)
        return lambda: piece(batch)


def agent_tick(pipeline: c.AgentPipeline, space: Space[Any], envs: int) -> Tick:
    """One call of agent connectors in the middle of an episode."""
    pipeline.bind(space, AGENTS, CHOICE)
    begun = pipeline(rows_of(envs, space, first=True))
    states = np.zeros((len(begun), 8), np.float32)
    pipeline.on_policy_output(answered(begun, CHOICE).replace(state_out=states))
    return _in_turn(pipeline, [rows_of(envs, space, seed=seed) for seed in (1, 2)])


def action_tick(pipeline: c.ActionPipeline, space: Space[Any], envs: int) -> Tick:
    """One call of action connectors."""
    pipeline.bind(space, AGENTS)
    drawn = [answered(rows_of(envs, VECTOR, seed=seed), pipeline.policy_space_, seed) for seed in (1, 2)]
    return _in_turn(pipeline, drawn)


def _in_turn(pipeline: Connector, rows: list[Rows]) -> Tick:
    turn = 0

    def tick() -> Rows:
        nonlocal turn
        turn ^= 1
        return pipeline(rows[turn])

    return tick


def _same(obs: Any, *_: Any) -> Any:
    return obs


def _keep(rows: Rows) -> Any:
    return rows.obs[:, 0] > 0


CASES = (
    Case("ActionMaskFromObs", (), Dict(observation=VECTOR, action_mask=MultiBinary(5))),
    Case("AgentIndicator"),
    Case("CastObs", ("float64",)),
    Case("ClipObs", (-1.0, 1.0)),
    Case("ClipReward", {"limit": 1.0}),
    Case("DeathMask"),
    Case("DelayObs", (2,)),
    Case("DropKeys", ("b",), Dict(a=VECTOR, b=Discrete(3))),
    Case("FilterRows", (_keep, 0)),
    Case("FlattenObs", (), Dict(a=VECTOR, b=Discrete(3))),
    Case("FrameSkip", (2,)),
    Case("FrameStack", (4,)),
    Case("GrayscaleObs", (), IMAGE),
    Case("History", {"keep": 4}, TEXT),
    Case("MapObs", (_same,)),
    Case("MapReward", (_same,)),
    Case("MaxObs", (2,)),
    Case("NormalizeObs"),
    Case("NormalizeReward"),
    Case("OneHotObs", (), CHOICE),
    Case("PadObs", (24,)),
    Case("PerAgent", (_same,)),
    Case("PrevActions", (1,)),
    Case("PrevRewards", (1,)),
    Case("ReshapeObs", ((6, 3),)),
    Case("ResizeObs", ((8, 8),), IMAGE),
    Case("RnnState", (np.zeros(8, np.float32),)),
    Case("ScaleObs", (), UNIT),
    Case("ScaleReward", (0.1,)),
    Case("StateInObs", (STATE,)),
    Case("TeamObs"),
    Case("Template", ("<user>{obs}</user>",), TEXT),
    Case("TimeFeature", (100,)),
    Case("TransposeObs", (), IMAGE),
    Case("View", ("before", "obs", "-3:-1")),
    Case("ToNumpy", (), ARM),
    Case("UnsquashActions", (), ARM),
    Case("ClipActions", (), ARM),
    Case("ReadOnlyActions", (), ARM),
    Case("DiscretizeActions", (5,), ARM),
    Case("EpsilonGreedy", (), CHOICE),
    Case("GaussianNoise", (), ARM),
    Case("MapActions", (_same,), ARM),
    Case("MaskInvalid", (), CHOICE),
    Case("OrnsteinUhlenbeckNoise", (), ARM),
    Case("PadActions", (7,), CHOICE),
    Case("RepeatActions", (2,), CHOICE),
    Case("ReplaceNaN", (), ARM),
    Case("StickyActions", (), CHOICE),
    Case("AddLastObs"),
    Case("AddView", ("after", "obs", "0:2")),
    Case("GeneralAdvantageEstimation"),
    Case("NStep", (3,)),
    Case("PadSequences", (8,)),
    Case("ReturnsToGo"),
    Case("Standardize"),
    Case("UnpadSequences"),
    Case("VTrace"),
)


# --- chains


def chains(envs: int) -> dict[str, Tick]:
    """The chains that the targets are of, beside one copy of the observations."""
    source = rows_of(envs, VECTOR).obs
    target = np.empty_like(source)
    four = [Case(name, args).make() for name, args in _FOUR]
    frozen = [Case(name, args).make() for name, args in _FOUR]
    agent = agent_tick(c.AgentPipeline.default(), VECTOR, envs)
    box, discrete = (action_tick(c.ActionPipeline.default(), space, envs) for space in (ARM, CHOICE))
    return {
        "one copy of the observations": lambda: np.copyto(target, source),
        "default chains, Discrete(5)": lambda: (agent(), discrete()),
        f"default chains, Box({WIDTH})": lambda: (agent(), box()),
        "four connectors": agent_tick(c.AgentPipeline(four), VECTOR, envs),
        "four connectors, eval": agent_tick(c.AgentPipeline(frozen).eval(), VECTOR, envs),
    }


_FOUR = (("FlattenObs", ()), ("NormalizeObs", ()), ("FrameStack", (4,)), ("AgentIndicator", ()))


# --- what others can do too

QUESTIONS = {
    "frame stack of 4": Case("FrameStack", (4,)),
    "running mean and standard deviation": Case("NormalizeObs"),
    "from bounds to [0, 1]": Case("ScaleObs", (), UNIT),
}
"""What is asked of all, and which of ours answers it."""
