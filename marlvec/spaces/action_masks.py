"""Action masks: one entry per value of each dimension of a Discrete or MultiDiscrete space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from numpy.typing import NDArray

from marlvec.errors import ContractError
from marlvec.spaces.tree import has_arrays

OTHER_WIDTH = (
    "masks are the env's, and action connectors (PadActions, MapActions) give the policy other actions. Give it a mask "
    "of them with an agent connector: rows.replace(action_mask=…), for PadActions with False for each added action"
)
"""Advice for a mask that does not have one entry per choice of the policy."""

_FORMS = "bools, or zeros and ones, one per choice"


def count_choices(action_space: Space[Any]) -> int | None:
    """Return the length of a mask for an action space; None if it is neither Discrete nor MultiDiscrete."""
    if not isinstance(action_space, (Discrete, MultiDiscrete)) or not has_arrays(action_space):
        return None
    return int(np.sum(action_space.n if isinstance(action_space, Discrete) else action_space.nvec))


def why_no_mask(action_space: Space[Any]) -> str | None:
    """Return why a mask for an action space is refused, as the end of an error; None if it can have one, or is a Box.

    A Box has no choices to forbid, so an ``action_mask`` beside it is an entry like others.
    """
    if isinstance(action_space, Box) or count_choices(action_space) is not None:
        return None
    return (
        f"expected none, got one for {action_space}: marlvec takes masks of Discrete and MultiDiscrete actions only, "
        f"and drops none in silence. Give the env a Discrete or MultiDiscrete action; or, if only your policy reads "
        f"the mask, put it under another key, e.g. 'my_mask'"
    )


def mask_refusal(action_space: Space[Any]) -> str:
    """Return the end of an error for a mask that no buffer has a row for."""
    if reason := why_no_mask(action_space):
        return reason
    if isinstance(action_space, Box):
        return f"expected none, since {action_space} has no choices"
    return (
        f"expected none, since {action_space} has more choices than masks that no observation space declares may have; "
        f"declare it: Dict(observation=…, action_mask=MultiBinary({count_choices(action_space)}))"
    )


def choice_sizes(space: Discrete | MultiDiscrete) -> NDArray[np.int64]:
    """Return the number of choices of each dimension, (D,); D = 1 for a Discrete."""
    return np.asarray(space.n if isinstance(space, Discrete) else space.nvec, np.int64).ravel()


def read_mask(value: Any) -> NDArray[np.bool_]:
    """Read an action mask, (k,) bools or numbers 0 and 1; for a MultiDiscrete also one mask per dimension."""
    # Refused: everything else, even a mask that would be added to logits.
    try:
        if isinstance(value, (tuple, list)) and any(map(np.ndim, value)):
            array = np.concatenate([np.asarray(part) for part in value])
        else:
            array = np.asarray(value)
    except (TypeError, ValueError):
        raise ContractError(f"expected {_FORMS}, got {type(value).__name__} {value!r:.60}") from None
    if array.dtype.kind == "b" and array.ndim == 1:
        return array
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        is_object = not array.ndim or array.dtype.kind not in "biuf"
        got = f"{type(value).__name__} {value!r:.60}" if is_object else f"an array of shape {array.shape}"
        raise ContractError(f"expected {_FORMS}, got {got}")
    allowed: NDArray[np.bool_] = array != 0
    if (array != allowed).any():
        wrong = array[array != allowed][0]
        raise ContractError(
            f"expected {_FORMS}, got {wrong} at choice {int(np.argmax(array != allowed))}"
            + ("; for a mask that is added to logits, pass `mask == 0`" if not array.max() > 0 else "")
        )
    return allowed


def find_forbidden(space: Space[Any], actions: NDArray[Any], mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which actions (…, *space.shape) masks (…, k) forbid, (…) bool; False for actions outside the space."""
    assert isinstance(space, (Discrete, MultiDiscrete))
    sizes = choice_sizes(space)
    choices = (actions - space.start).reshape(*mask.shape[:-1], len(sizes)).astype(np.int64)
    are_members = (choices >= 0) & (choices < sizes)
    places = np.where(are_members, choices, 0) + (np.cumsum(sizes) - sizes)
    allowed = np.take_along_axis(mask, places, -1)
    forbidden: NDArray[np.bool_] = np.asarray(are_members.all(-1)) & ~np.asarray(allowed.all(-1))
    return forbidden


def pick_allowed(
    mask: NDArray[np.bool_], pick: Callable[[NDArray[np.int64]], NDArray[np.int64]], where: Callable[[int], str]
) -> NDArray[np.int64]:
    """Pick an allowed choice of one dimension in each row: mask (n, k) to choices (n,).

    `pick` takes the number of allowed choices of each row, (n,), and returns which of them to pick, from 0.
    `where(i)` names row i in messages.
    """
    running = np.cumsum(mask, axis=1, dtype=np.int64)
    count = running[:, -1]
    if not count.all():
        row = int(np.flatnonzero(count == 0)[0])
        raise ContractError(
            f"the action mask of {where(row)} allows nothing; an agent that must act needs at least one action"
        )
    # The k-th allowed choice is the first whose running count exceeds k.
    chosen: NDArray[np.int64] = np.argmax(running > pick(count)[:, None], axis=1)
    return chosen


def own_choices(own: Space[Any], padded: Space[Any], *, stand_ins: bool = True) -> NDArray[np.bool_]:
    """Return which choices of a padded action space belong to an agent's own, (n,) bool; both of one kind and rank.

    `stand_ins`: include the first choice of each dimension that the agent does not have: a mask must allow one choice
    there, which is ignored.
    """
    if isinstance(own, Discrete) and isinstance(padded, Discrete):
        return np.arange(int(padded.n)) < int(own.n)
    assert isinstance(own, MultiDiscrete)
    assert isinstance(padded, MultiDiscrete)
    sizes = np.full(padded.nvec.shape, int(stand_ins))
    sizes[tuple(map(slice, own.nvec.shape))] = own.nvec
    pairs = zip(sizes.ravel().tolist(), padded.nvec.ravel().tolist(), strict=True)
    return np.concatenate([np.arange(whole) < size for size, whole in pairs])


def split_action_mask(
    space: Space[Any], action_space: Space[Any], where: str = "observation space"
) -> tuple[Space[Any], int | None]:
    """Return an observation space without an action mask where PettingZoo's envs have it, and its length or None.

    ``Dict(observation=X, action_mask=M)`` gives ``X``; any other Dict with an ``action_mask`` the Dict without it.
    An entry of that name that has not one value per choice, or is beside a Box, is part of the observation.
    `ContractError`, with `where`, if the action space cannot have a mask.
    """
    if not isinstance(space, Dict) or "action_mask" not in space.spaces:
        return space, None
    if reason := why_no_mask(action_space):
        raise ContractError(f"{where}: 'action_mask': {reason}")
    mask = space.spaces["action_mask"]
    if not isinstance(action_space, (Discrete, MultiDiscrete)) or not isinstance(mask, (Box, MultiBinary)):
        return space, None
    if mask.shape != (count_choices(action_space),):
        return space, None
    rest = {key: sub for key, sub in space.spaces.items() if key != "action_mask"}
    inner = rest["observation"] if rest.keys() == {"observation"} else Dict(rest)
    return inner, int(mask.shape[0])
