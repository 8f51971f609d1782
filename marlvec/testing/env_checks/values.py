"""What single values must be: members of their space to the dtype, finite rewards, bools, masks.

Nothing is cast before it is looked at: what a vectorizer would put right in silence is found here.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray

from marlvec.spaces.action_masks import as_mask, count_choices
from marlvec.testing.env_checks.report import Place, leaf, short

__all__ = [
    "check_agents",
    "check_flag",
    "check_keys",
    "check_mask",
    "check_member",
    "check_reward",
    "check_table",
    "check_tuple",
]


def check_member(space: Space[Any], value: Any, place: Place, subject: str, path: str = "") -> None:
    """Refuse a value that is not in its space, leaf by leaf, with exactly the space's dtype and shape.

    Raises:
        ContractError: Names the leaf.
    """
    where = leaf(subject, path)
    if isinstance(space, Dict):
        if not isinstance(value, Mapping):
            place.broken(where, f"a dict with keys {sorted(map(str, space.spaces))}", type(value).__name__)
        check_keys(value, space.spaces, place, where)
        for key, sub in space.spaces.items():
            check_member(sub, value[key], place, subject, f"{path}/{key}" if path else str(key))
        return
    if isinstance(space, Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            got = f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
            place.broken(where, f"a tuple of {len(space.spaces)}", got)
        for i, (sub, part) in enumerate(zip(space.spaces, value, strict=True)):
            check_member(sub, part, place, subject, f"{path}/{i}" if path else str(i))
        return
    if isinstance(space, (Box, MultiBinary, MultiDiscrete)):
        _check_array(space, value, place, where)
    elif isinstance(space, Discrete):
        _check_choice(space, value, place, where)
    doubt = ""
    try:
        # Gymnasium warns of a numpy scalar where it would make an array of shape () of it.
        if space.contains(np.asarray(value) if isinstance(space, Box) else value):
            return
    except Exception as error:  # gymnasium's own raise on some values of other types
        doubt = f" (contains() raised {type(error).__name__}: {error})"
    place.broken(where, f"a member of {space}", f"{short(value)}{doubt}")


def _check_array(space: Space[Any], value: Any, place: Place, where: str) -> None:
    scalar = isinstance(value, np.generic) and space.shape == ()
    if not isinstance(value, np.ndarray) and not scalar:
        place.broken(where, f"a numpy array of dtype {space.dtype}", f"{type(value).__name__} {short(value)}")
    if value.dtype != space.dtype:
        place.broken(where, f"dtype {space.dtype}", f"{value.dtype}")
    if value.shape != space.shape:
        place.broken(where, f"shape {space.shape}", f"{value.shape}")
    if value.dtype.kind == "f" and np.isnan(value).any():
        place.broken(where, "numbers", f"NaN at index {tuple(np.argwhere(np.isnan(value))[0].tolist())}")
    if isinstance(space, Box):
        outside = np.argwhere(~((value >= space.low) & (value <= space.high)))
        if len(outside):
            at = tuple(outside[0].tolist())
            bounds = f"a number from {space.low[at]} to {space.high[at]} at index {at}"
            place.broken(where, bounds, str(np.asarray(value)[at]))


def _check_choice(space: Discrete, value: Any, place: Place, where: str) -> None:
    plain = isinstance(value, (np.ndarray, np.generic)) and value.shape == ()
    if not plain and (not isinstance(value, int) or isinstance(value, bool)):
        place.broken(where, "an int", f"{type(value).__name__} {short(value)}")
    if plain and value.dtype != space.dtype:
        place.broken(where, f"dtype {space.dtype}", f"{value.dtype}")


def check_reward(value: Any, place: Place, agent: Any) -> None:
    """Refuse a reward that is not one finite real number."""
    subject = f"reward of agent {agent!r}"
    if not isinstance(value, (numbers.Real, np.floating, np.integer)):
        shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
        place.broken(subject, "a real number", f"{type(value).__name__}{shape} {short(value)}")
    if not math.isfinite(value):
        place.broken(subject, "a finite number", str(value))


def check_flag(value: Any, place: Place, agent: Any, what: str) -> bool:
    """Refuse a flag that is no bool; return it."""
    if not isinstance(value, (bool, np.bool_)):
        place.broken(f"{what} of agent {agent!r}", "a bool", f"{type(value).__name__} {short(value)}")
    return bool(value)


def check_mask(action_space: Space[Any], value: Any, place: Place, agent: Any) -> NDArray[np.bool_] | None:
    """Refuse a mask of zeros and ones that does not fit the action space, or leaves an agent nothing to do.

    Returns:
        (n,) bool, one entry per choice; None where the value is no mask, or the actions are no choices.
    """
    size, subject = count_choices(action_space), f"action mask of agent {agent!r}"
    mask = as_mask(value)
    if size is None or mask is None:
        return None
    if mask.shape != (size,):
        place.broken(subject, f"shape ({size},), one entry per choice of {action_space}", str(mask.shape))
    if not np.isin(mask, (0, 1)).all():
        place.broken(subject, "zeros and ones", short(mask.tolist()))
    ends = [0, *np.cumsum(action_space.nvec).tolist()] if isinstance(action_space, MultiDiscrete) else [0, size]
    if not all(mask[low:high].any() for low, high in pairwise(ends)):
        place.broken(subject, "at least one allowed action of an agent that must act", short(mask.tolist()))
    return mask.astype(np.bool_)


def check_table(value: Any, place: Place, what: str) -> Mapping[Any, Any]:
    """Refuse what is no dict; return it."""
    if not isinstance(value, Mapping):
        place.broken(what, "a dict", f"{type(value).__name__} {short(value)}")
    return value


def check_keys(got: Iterable[Any], expected: Iterable[Any], place: Place, what: str) -> None:
    """Refuse keys other than these, in any order."""
    own, wanted = set(got), set(expected)
    if own != wanted:
        place.broken(what, f"keys {sorted(map(str, wanted))}", f"{sorted(map(str, own))}")


def check_agents(got: Any, possible: Iterable[Any], place: Place, what: str) -> list[Any]:
    """Refuse a list of agents that names an unknown one, or one twice; return it."""
    if not isinstance(got, (list, tuple)):
        place.broken(what, "a list of agents", type(got).__name__)
    known = list(possible)
    for agent in got:
        if agent not in known:
            place.broken(what, f"agents of {short(known)}", f"the unknown agent {agent!r}")
    if len(set(got)) != len(got):
        place.broken(what, "every agent once", short(list(got)))
    return list(got)


def check_tuple(result: Any, place: Place, *sizes: int) -> tuple[Any, ...]:
    """Refuse a result that is no tuple of one of these lengths; return it."""
    if not isinstance(result, tuple) or len(result) not in sizes:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"{type(result).__name__} {short(result)}"
        place.broken("the result", f"a tuple of {' or '.join(map(str, sizes))}", got)
    return result
