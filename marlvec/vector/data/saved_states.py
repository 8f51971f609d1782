"""The state of some envs of a vectorizer, as one dict of plain data: validation, choice of parts, and files.

format      a number of `FORMATS`
kind        "native", "pool", or "env" for env objects
env         the envs' name
agents      names of their agents
autoreset   the autoreset mode of the vectorizer
env_ids     (n,) int64, ids of the saved envs; the first axis of all following entries
running     (n,) bool, whether the env has a running episode
over        (n,) bool, whether the episode is over and the next one not begun
rows        name → (n, …), the envs' rows in `Buffers`
recovery    seeds and fault states
envs        states from the shards: arrays (n, …) of native envs, else a list of n
actions     the random stream of `VectorEnv.random_action`, or None; only in a state of all envs
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, check_env_ids
from marlvec.envs.spec import EnvSpec
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.serialization.archive import FilePath
from marlvec.serialization.state_fields import check_array, check_fields
from marlvec.serialization.values import read_value, write_value

__all__ = [
    "FORMATS",
    "check_each",
    "check_entries",
    "check_states",
    "choose_states",
    "describe_obstacles",
    "is_state",
    "load_state",
    "save_state",
    "stream_from",
    "take_states",
]

FORMATS = {"env": 1, "native": 2, "pool": 2}
"""Kind of envs → format of their states."""
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
    """Return whether ``state`` has the keys of a state from `VectorEnv.get_state`."""
    return isinstance(state, Mapping) and state.keys() == _KEYS


def check_states(state: Any, *, kind: str, spec: EnvSpec, autoreset_mode: str) -> IntArray:
    """Check that a state from `VectorEnv.get_state` fits a vectorizer's envs; return the saved ids, (n,) int64."""
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"set_state(): expected a state from get_state(), got {got}")
    wanted = {"kind": kind, "format": FORMATS[kind], "env": spec.name, "agents": list(spec.agents)}
    for what, expected in wanted.items():
        if repr(state[what]) != repr(expected):  # an array in it has no truth value for ==
            raise ArgumentError(f"set_state(): {what}: expected {expected!r}, got a state of {state[what]!r:.200}")
    of = check_array(state, "env_ids", np.int64, (None,), "set_state()")
    for what in ("running", "over"):
        check_array(state, what, np.bool_, of.shape, "set_state()")
    if state["autoreset"] != autoreset_mode and np.any(state["over"]):
        over = of[state["over"]].tolist()
        raise ArgumentError(
            f"set_state(): autoreset_mode: expected a state of {autoreset_mode!r}, got one of "
            f"{state['autoreset']!r}, and the episodes of envs {over} are over; save a state while they run"
        )
    return of


def check_entries(saved: Any, own: Mapping[str, Any], n: int, where: str) -> None:
    """Validate the per-env entries of a state of ``n`` envs."""
    # `own` has each entry for no envs: an array (0, …), or an empty list for numbers and None.
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
    """Validate the shards' states of ``n`` env objects: one dict per env; None for a masked env."""
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
    """Return the ids of the envs that receive a state, and the index of each one's state among the saved ones, ``of``.

    `env_ids` None: the saved envs; with `from_ids`: all. `from_ids`, the saved env for each, None: one each in order,
    or the only one.
    """
    if env_ids is None:
        ids = of if from_ids is None else np.arange(num_envs)
    else:
        ids = np.asarray(env_ids)
    if len(ids) and ids.dtype != np.bool_ and ids.max(initial=0) >= num_envs and env_ids is None:
        raise ArgumentError(f"set_state(): state of envs {of.tolist()} for {num_envs} envs: choose with env_ids=")
    ids = check_env_ids(ids, num_envs)
    if from_ids is None:
        if len(of) not in (1, len(ids)):
            raise ArgumentError(
                f"set_state(): state of {len(of)} envs for {len(ids)} envs: choose which with from_ids="
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
    """Take the entries at these indices: of arrays along their first axis, of lists by item."""
    return {
        name: np.asarray(part)[places] if isinstance(part, np.ndarray) else [part[k] for k in places.tolist()]
        for name, part in saved.items()
    }


def describe_obstacles(obstacles: Mapping[int, str], ids: IntArray, call: str) -> str | None:
    """Return the error message for those ``ids`` whose states cannot be saved, or None."""
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
    """Return a random stream with this state, the ``state`` of a numpy PCG64."""
    generator = np.random.Generator(np.random.PCG64(0))
    try:
        generator.bit_generator.state = state
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ArgumentError(f"set_state(): actions: expected the state of a PCG64, got {state!r:.200}") from error
    return generator


def save_state(path: FilePath, state: Mapping[str, Any]) -> None:
    """Write the state of envs to a file. The write is atomic: the file is complete or unchanged.

        marlvec.save_state("before.npz", envs.get_state([3]))
        envs.set_state(marlvec.load_state("before.npz"))

    ``marlvec record ENV --from before.npz -o after.mp4`` records the steps that follow it.

    Args:
        path: The file, by convention ``.npz``; an old one is replaced.
        state: A state from `VectorEnv.get_state`. For a collector, use `Collector.save`.

    Raises:
        ArgumentError: ``state`` is something else.
        OSError: The file cannot be written; an old file is unchanged.
    """
    if not is_state(state):
        got = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(
            f"save_state(): expected a state from envs.get_state(), got {got!r:.200}; collectors and trainings are "
            f"saved by collector.save(path) and save_checkpoint(folder)"
        )
    write_value(path, "envs", dict(state), "the state")


def load_state(path: FilePath) -> dict[str, Any]:
    """Read a file that `save_state` wrote; no code in it is executed.

    Args:
        path: The file.

    Returns:
        The state, for `VectorEnv.set_state`, which checks that the envs fit.

    Raises:
        CheckpointError: The file does not exist, is damaged, of another version, or holds something else.
    """
    state = read_value(path, "envs", "state of envs")
    read = FORMATS.get(str(state["kind"])) if is_state(state) else FORMATS["env"]
    if not is_state(state) or state["format"] != read:
        what = state.get("format") if isinstance(state, Mapping) else state
        raise CheckpointError(path, f"holds a state of envs of the format {what!r:.50}; this version reads {read}")
    return dict(state)
