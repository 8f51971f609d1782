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
    """Spaces, players and calls of a pool, or of an EnvPool spec before its pool is built."""

    name: str
    num_envs: int  # spares included
    batch_size: int  # rows per reply
    num_players: int  # most players of one env
    observation_space: Any  # one player's
    action_space: Any  # one player's
    mask_size: int | None = None  # of the declared action masks
    max_episode_steps: int | None = None
    autoreset: AutoresetMode = AutoresetMode.NEXT_STEP
    metadata: Mapping[str, Any]


def form_of(pool: Any, *, name: str | None = None) -> PoolForm:
    """Read the form of a pool, or of an EnvPool spec; ``name`` defaults to that of its class.

    Its ``config``, a mapping or a named tuple, has ``num_envs`` and, optionally, ``batch_size``, ``max_num_players``
    and ``max_episode_steps``, or these are attributes.
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
