"""`PoolForm`: spaces, players and calls of an EnvPool-like pool, read from its config."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marlvec.envs.autoreset import AutoresetMode
from marlvec.errors import ContractError

__all__ = ["PoolForm", "form_of"]


@dataclass(frozen=True, kw_only=True)
class PoolForm:
    """Spaces, players and calls of a pool, or of an EnvPool spec before its pool is built.

    Attributes:
        name: Name of the pool's envs.
        num_envs: Number of all envs, spares included.
        batch_size: Rows per reply.
        num_players: Most players of one env.
        observation_space: One player's observation space.
        action_space: One player's action space.
        mask_size: Length of the declared action masks, or None.
        max_episode_steps: Time limit in steps, or None if the pool does not declare it.
        autoreset: See `Pool`.
        metadata: Its metadata.
    """

    name: str
    num_envs: int
    batch_size: int
    num_players: int
    observation_space: Any
    action_space: Any
    mask_size: int | None = None
    max_episode_steps: int | None = None
    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP
    metadata: Mapping[str, Any]


def form_of(pool: Any, *, name: str | None = None) -> PoolForm:
    """Read the form of a pool, or of an EnvPool spec.

    Args:
        pool: The pool. It has ``config``, a mapping or a named tuple with ``num_envs`` and, optionally,
            ``batch_size``, ``max_num_players`` and ``max_episode_steps``, or these as attributes; and one env's
            ``observation_space`` and ``action_space``.
        name: The form's name; default: the name of the pool's class.

    Raises:
        ContractError: The pool does not declare its number of envs, or its spaces.
    """
    name = name or type(pool).__name__
    config = getattr(pool, "config", {})
    config = config if isinstance(config, Mapping) else config._asdict()

    def said(key: str, default: Any) -> Any:
        value = config.get(key, None)
        return getattr(pool, key, default) if value is None else value

    num_envs = said("num_envs", None)
    if num_envs is None:
        raise ContractError(f"{name}: expected a pool that says its num_envs, in config or as an attribute")
    observation_space, action_space = spaces_of(pool, name)
    states = getattr(getattr(pool, "spec", pool), "state_array_spec", {})
    legal = states.get("info:legal_action_mask")
    limit = said("max_episode_steps", None)
    metadata = dict(getattr(pool, "metadata", {}))
    autoreset = AutoresetMode.declared_by(metadata, name) or AutoresetMode.NEXT_STEP
    metadata.pop("autoreset_mode", None)
    return PoolForm(
        name=name,
        num_envs=int(num_envs),
        batch_size=int(said("batch_size", 0)) or int(num_envs),
        num_players=int(said("max_num_players", 1)),
        observation_space=observation_space,
        action_space=action_space,
        mask_size=int(legal.shape[-1]) if legal is not None and len(legal.shape) == 1 else None,
        max_episode_steps=None if limit is None else int(limit),
        autoreset=autoreset,
        metadata=metadata,
    )


def spaces_of(pool: Any, name: str) -> tuple[Any, Any]:
    """Return one env's observation and action space. EnvPool builds them on first access, and casts their bounds."""
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)
        for kind in ("observation_space", "action_space"):
            space = getattr(pool, f"single_{kind}", None)
            found.append(getattr(pool, kind, None) if space is None else space)
            if found[-1] is None:
                raise ContractError(f"{name}: expected a pool with an {kind}")
    observation_space, action_space = found
    return observation_space, action_space
