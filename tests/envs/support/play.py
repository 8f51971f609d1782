"""Whole episodes with random actions, and everything that came back."""

from __future__ import annotations

from typing import Any

from marlvec import VectorEnv

__all__ = ["play"]


def play(envs: VectorEnv, steps: int, seed: int = 0) -> list[Any]:
    """What a reset and so many steps return; envs whose episode is over are reset where nobody else does it."""
    results: list[Any] = [envs.reset(seed=seed)]
    envs.random_action(seed=seed)
    for _ in range(steps):
        obs, rewards, terminated, truncated, infos = envs.step(envs.random_action())
        results.append((obs, rewards, terminated, truncated, infos))
        if envs.autoreset_mode == "disabled" and not (alive := infos["alive"].any(axis=1)).all():
            results.append(envs.reset(env_ids=~alive))
    return results
