"""The state of some envs of a vectorizer, as one dict of plain data: put together, checked, and taken apart.

format      1
kind        "native", or "env" for envs that are objects of their own
env         the envs' name, and ``agents``: theirs
autoreset   the mode in which they were
env_ids     (n,) int64, which envs these were; the first axis of all that follows
running     (n,) bool, which have a running episode
over        (n,) bool, which wait for their next one
rows        name → (n, …), what `Buffers` has of them
recovery    seeds, and what is known of faults
envs        what the shard says of them and their envs: of native ones arrays (n, …), else a list of n
actions     the random stream of `VectorEnv.random_action`, or None; only in a state of all envs
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, check_env_ids
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError
from marlvec.serialization.state_fields import check_array, check_fields

__all__ = [
    "FORMAT",
    "check_each",
    "check_entries",
    "check_states",
    "choose_states",
    "describe_obstacles",
    "is_state",
    "stream_from",
    "take_states",
]

FORMAT = 1
_KEYS = frozenset(
    {
        "format",
        "kind",
        "env",
        "agents",
        "autoreset",
        "env_ids",
        "running",
        "over",
        "rows",
        "recovery",
        "envs",
        "actions",
    }
)
IntArray = NDArray[np.int64]


def is_state(state: Any) -> bool:
    """Whether this has the parts of what `VectorEnv.get_state` returns."""
    return isinstance(state, Mapping) and state.keys() == _KEYS


def check_states(state: Any, *, kind: str, spec: EnvSpec, autoreset_mode: str) -> IntArray:
    """Make sure that a state is of such envs.

    Args:
        state: What `VectorEnv.get_state` returned.
        kind: ``"native"`` or ``"env"``.
        spec: What these envs look like.
        autoreset_mode: Theirs.

    Returns:
        (n,) int64, which envs it is of.

    Raises:
        ArgumentError: It is no state, or one of other envs; says what differs.
    """
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"set_state(): expected what get_state() returned, got {got}")
    wanted = {"format": FORMAT, "kind": kind, "env": spec.name, "agents": list(spec.agents)}
    for what, expected in wanted.items():
        if repr(state[what]) != repr(expected):  # where an array stands in it, == would have no answer
            raise ArgumentError(f"set_state(): {what}: expected {expected!r}, got a state of {state[what]!r:.200}")
    of = check_array(state, "env_ids", np.int64, (None,), "set_state()")
    for what in ("running", "over"):
        check_array(state, what, np.bool_, of.shape, "set_state()")
    if state["autoreset"] != autoreset_mode and np.any(state["over"]):
        over = of[state["over"]].tolist()
        raise ArgumentError(
            f"set_state(): the episodes of envs {over} are over, and what follows differs: the state is of "
            f"autoreset_mode={state['autoreset']!r}, this is {autoreset_mode!r}"
        )
    return of


def check_entries(saved: Any, own: Mapping[str, Any], n: int, where: str) -> None:
    """Make sure that what is kept for each env is what it should be, one entry for each.

    Args:
        saved: Name → what a state has.
        own: Name → what it would be of no envs: an array (0, …), or a list where it is of numbers and None.
        n: Of how many envs the state is.
        where: What it belongs to, for messages.

    Raises:
        ArgumentError: It is not; says what differs.
    """
    check_fields(saved, own, where)
    for name, empty in own.items():
        if isinstance(empty, np.ndarray):
            found = check_array(saved, name, empty.dtype, (n, *empty.shape[1:]), where)
            if found.dtype.kind == "i" and (found < 0).any():
                raise ArgumentError(f"{where}: {name}: expected no negative numbers, got {found.min()}")
            continue
        numbers = saved[name]
        if (
            not isinstance(numbers, list)
            or len(numbers) != n
            or not all(one is None or _is_number(one) for one in numbers)
        ):
            raise ArgumentError(f"{where}: {name}: expected {n} numbers from 0, or None, got {numbers!r:.200}")


def check_each(saved: Any, n: int, phases: Collection[int], agent_num: int, masked: Any) -> None:
    """Make sure that this is what shards say of so many envs that are objects of their own.

    Args:
        saved: One dict for each; None for one that is masked.
        n: How many.
        phases: Those in which one can be saved.
        agent_num: A.
        masked: (n,) bool, which are masked.

    Raises:
        ArgumentError: It is not; names the first that is wrong.
    """
    if not isinstance(saved, list) or len(saved) != n:
        raise ArgumentError(f"set_state(): envs: expected a list of {n} states, got {saved!r:.200}")
    for k, one in enumerate(saved):
        if not masked[k] if one is None else masked[k] or not _is_of_env(one, phases, agent_num):
            raise ArgumentError(f"set_state(): envs[{k}]: expected the state of an env, got {one!r:.200}")


def _is_of_env(one: Any, phases: Collection[int], agent_num: int) -> bool:
    if not isinstance(one, Mapping) or one.keys() != {"phase", "done", "ended", "next_seed", "env"}:
        return False
    phase, ended, seed = one["phase"], one["ended"], one["next_seed"]
    return (
        _is_number(phase)
        and phase in phases
        and isinstance(one["done"], bool)
        and isinstance(ended, list)
        and all(_is_number(a) and a < agent_num for a in ended)
        and (seed is None or _is_number(seed))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def choose_states(
    of: IntArray, env_ids: EnvIds | None, from_ids: EnvIds | None, num_envs: int
) -> tuple[IntArray, IntArray]:
    """Which envs get a state, and the place of each one's in the state.

    Args:
        of: (n,) int64, which envs the state is of.
        env_ids: Which envs get one. None: those that it is of; with ``from_ids``: all.
        from_ids: For each, whose state it gets. None: the only one there is, or one each in order.
        num_envs: N.

    Raises:
        ArgumentError: They do not fit one another.
    """
    if env_ids is None:
        ids = of if from_ids is None else np.arange(num_envs)
    else:
        ids = np.asarray(env_ids)
    if len(ids) and ids.dtype != np.bool_ and ids.max(initial=0) >= num_envs and env_ids is None:
        raise ArgumentError(f"set_state(): the state is of envs {of.tolist()}, and there are {num_envs}; name env_ids")
    ids = check_env_ids(ids, num_envs)
    if from_ids is None:
        if len(of) not in (1, len(ids)):
            raise ArgumentError(
                f"set_state(): the state is of {len(of)} envs, and {len(ids)} are to get one; say by from_ids whose"
            )
        return ids, np.zeros(len(ids), np.int64) if len(of) == 1 else np.arange(len(ids))
    wanted = np.asarray(from_ids)
    if wanted.shape != ids.shape or wanted.dtype.kind not in "iu" or not np.isin(wanted, of).all():
        raise ArgumentError(
            f"set_state(): from_ids: expected one of {of.tolist()} for each of {len(ids)} envs, got {wanted.tolist()}"
        )
    order = np.argsort(of, kind="stable")
    return ids, order[np.searchsorted(of, wanted, sorter=order)]


def take_states(saved: Mapping[str, Any], places: IntArray) -> dict[str, Any]:
    """Those at these places of what is kept for each env: arrays by their first axis, lists by item."""
    return {
        name: np.asarray(part)[places] if isinstance(part, np.ndarray) else [part[k] for k in places.tolist()]
        for name, part in saved.items()
    }


def describe_obstacles(obstacles: Mapping[int, str], ids: IntArray, call: str) -> str | None:
    """The message for those of these envs whose states cannot be had, or None if there are none."""
    found: dict[str, list[int]] = {}
    for i in ids.tolist() if obstacles else ():
        if i in obstacles:
            found.setdefault(obstacles[i], []).append(i)
    if not found:
        return None
    each = (f"{'env' if len(of) == 1 else 'envs'} {', '.join(map(str, of[:8]))}" for of in found.values())
    more = (f" and {len(of) - 8} more" if len(of) > 8 else "" for of in found.values())
    return f"{call}(): " + "; ".join(f"{who}{rest}: {why}" for who, rest, why in zip(each, more, found, strict=True))


def stream_from(state: Mapping[str, Any]) -> np.random.Generator:
    """The random stream that is in this state: the ``state`` of a numpy PCG64.

    Raises:
        ArgumentError: There is none in this.
    """
    generator = np.random.Generator(np.random.PCG64(0))
    try:
        generator.bit_generator.state = state
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ArgumentError(f"set_state(): actions: expected the state of a PCG64, got {state!r:.200}") from error
    return generator
