"""Shared by views: what they need of the envs that they receive, single values, metadata, dicts of agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec.envs.autoreset import AutoresetMode
from marlvec.envs.spec import AgentGroup, EnvSpec
from marlvec.errors import ActionError, ArgumentError, EnvRaised
from marlvec.spaces import SpaceTree
from marlvec.vector.validation.agent_dicts import lay_out
from marlvec.vector.vector_env import VectorEnv

__all__ = [
    "NEEDS",
    "Needs",
    "ask_envs",
    "check_view",
    "metadata_of",
    "missing_is_attribute_error",
    "one_group",
    "render_mode_of",
    "value_at",
    "viewed",
    "join_actions",
    "places_of",
]

View = TypeVar("View")


class Needs(NamedTuple):
    """The settings that a view supports."""

    why: str  # one clause of the message
    modes: tuple[AutoresetMode, ...]
    num_envs: int | None = None  # None: any
    copies: bool = False  # the view keeps the arrays it receives, so that copy=True is required
    on_fault: tuple[str, ...] = ()  # values; empty: all
    has_make: bool = False  # the view has a `make()` that sets all this


_OF_ROWS = Needs("a new episode's first observation must come with the old one's end", (AutoresetMode.SAME_STEP,))
_OF_ONE_ENV = Needs("it drives one env by itself", (AutoresetMode.DISABLED,), num_envs=1, has_make=True)
_OF_TIANSHOU = Needs(
    "Tianshou resets envs itself and keeps the arrays it receives",
    (AutoresetMode.DISABLED,),
    copies=True,
    has_make=True,
)
NEEDS = {
    "CleanRLVectorEnv": _OF_ROWS,
    "PufferView": _OF_ROWS,
    "SB3VecEnv": _OF_ROWS,
    "SuperSuitVecEnv": _OF_ROWS,
    "ParallelView": _OF_ONE_ENV,
    "RLlibMultiAgentEnv": _OF_ONE_ENV._replace(copies=True),
    "RLlibVectorEnv": Needs(
        "RLlib expects an episode's end and the next one's beginning in two steps, keeps the arrays it receives, "
        "and does not support masked envs",
        (AutoresetMode.NEXT_STEP,),
        copies=True,
        on_fault=("raise", "restart"),
    ),
    "TianshouVectorEnv": _OF_TIANSHOU,
    "TianshouTurnVectorEnv": _OF_TIANSHOU,
    "TorchRLEnv": Needs(
        "TorchRL resets envs itself and keeps the arrays it receives",
        (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED),
        copies=True,
    ),
}
"""Needs of each view, by its class's name; `GymnasiumVectorEnv` supports all settings."""


def check_view(envs: VectorEnv, view: str) -> None:
    """Raise ArgumentError if a view, a key of `NEEDS`, does not support a setting of these envs."""
    why, modes, num_envs, copies, on_fault, has_make = NEEDS[view]
    needs: list[tuple[str, Any, Sequence[Any]]] = []  # setting, its value, supported values
    if num_envs is not None:
        needs.append(("num_envs", envs.num_envs, (num_envs,)))
    needs.append(("autoreset_mode", envs.autoreset_mode, [mode.value for mode in modes]))
    if copies:
        needs.append(("copy", envs.copy, (True,)))
    if on_fault:
        needs.append(("on_fault", envs.on_fault, on_fault))
    if all(got in allowed for _, got, allowed in needs):
        return
    expected = _join([f"{name}={' or '.join(map(repr, allowed))}" for name, _, allowed in needs])
    given = _join([f"{name}={got!r}" for name, got, _ in needs])
    remedy = f"; {view}.make() sets that" if has_make else ""
    raise ArgumentError(f"{view}: {why}: expected {expected}, got {given}{remedy}")


def viewed(view: Callable[..., View], envs: VectorEnv, *args: Any, **kwargs: Any) -> View:
    """Build a view of new envs, ``view(envs, …)``; close the envs if that raises."""
    try:
        return view(envs, *args, **kwargs)
    except BaseException:
        envs.close()
        raise


def one_group(envs: VectorEnv, view: str) -> AgentGroup:
    """Return the single group of all agents, or raise ArgumentError."""
    if len(envs.groups) > 1:
        raise ArgumentError(
            f"{view}: expected envs whose agents have equal spaces, one group; {envs.spec.name} has "
            f"{len(envs.groups)}: {', '.join(envs.groups)}. make(..., pad=True) makes them equal"
        )
    return envs.spec.groups[0]


def value_at(tree: SpaceTree, leaves: list[NDArray[Any]], where: tuple[int, ...]) -> Any:
    """Return one value of a space as a single env would: a copy; a scalar only if the space is Discrete."""
    index: tuple[Any, ...] = (*where, ...)  # with the ellipsis, numpy returns 0-d arrays instead of scalars
    parts = [array[index].copy() for array in leaves]
    return tree.unflatten(
        [
            part[()] if leaf.is_object or isinstance(leaf.space, Discrete) else part
            for leaf, part in zip(tree.leaves, parts, strict=True)
        ]
    )


def ask_envs(envs_of_rows: Sequence[int], ask: Callable[[list[int]], Iterable[Any]]) -> list[Any]:
    """Return one answer per row: each env is asked once, in ascending order, and answers for all of its rows."""
    env_ids = sorted(set(envs_of_rows))
    answers = dict(zip(env_ids, ask(env_ids), strict=True))
    return [answers[i] for i in envs_of_rows]


def metadata_of(envs: VectorEnv) -> dict[str, Any]:
    """Return the envs' metadata, without the autoreset mode."""
    return {key: value for key, value in envs.metadata.items() if key != "autoreset_mode"}


def render_mode_of(envs: VectorEnv) -> str | None:
    """Return the render mode of all envs; None if they have none, or different ones."""
    try:
        with missing_is_attribute_error():
            modes = set(envs.get_attr("render_mode"))
    except AttributeError:
        return None
    return modes.pop() if len(modes) == 1 else None


@contextmanager
def missing_is_attribute_error() -> Iterator[None]:
    """Convert the error of a call for a missing attribute to AttributeError, as other libraries expect."""
    try:
        yield
    except EnvRaised as error:
        if isinstance(error.__cause__, ArgumentError):
            raise AttributeError(str(error.__cause__)) from error
        raise


def _join(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def places_of(spec: EnvSpec) -> dict[str, tuple[int, int]]:
    """Return each agent's group, and its index in that group."""
    return {spec.agents[a]: (g, j) for g, group in enumerate(spec.groups) for j, a in enumerate(group.agents)}


def join_actions(envs: VectorEnv, actions: Sequence[Mapping[str, Any]], acting_NA: NDArray[np.bool_]) -> Any:
    """Convert one dict of actions per env to the form of `VectorEnv.step`; the agents ``acting_NA`` must have one.

    ActionError names agent and, if there are several, env. Actions of other agents are ignored.
    """
    names, known = envs.agents, set(envs.agents)
    for i, (own, acting) in enumerate(zip(actions, acting_NA.tolist(), strict=True)):
        where = "actions" if envs.num_envs == 1 else f"actions of env {i}"
        if unknown := [name for name in own if name not in known]:
            raise ActionError(f"{where}: no agent {unknown[0]!r}; the agents are {list(names)}")
        if missing := [name for name in compress(names, acting) if name not in own]:
            raise ActionError(
                f"{where}: expected one for each agent that must act, {[*compress(names, acting)]}; "
                f"missing are {missing}"
            )

    def place(i: int, a: int) -> str:
        return f"action of agent {names[a]!r}" if envs.num_envs == 1 else f"action of env {i}, agent {names[a]!r}"

    return lay_out(envs.spec, envs.grouped, actions, acting_NA, place)
