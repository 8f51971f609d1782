"""``marlvec rollout``: collect in small steps under a progress bar, and summarize."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import numpy as np
from rich.console import Console

from marlvec.cli.display.rollout_table import Rollout, tracks
from marlvec.collect import Collector, SampleBatch
from marlvec.collect.callbacks import LiveTable
from marlvec.collect.progress_bar import ProgressBar
from marlvec.vector import AsyncVectorEnv, VectorEnv

__all__ = ["roll_out"]

_REFRESH_SECONDS = 0.1
_RECENT = 100  # episodes in the mean return beside the bar


def roll_out(
    collector: Collector, played_by: Mapping[str, str], env_steps: int, console: Console, table: LiveTable | None = None
) -> Rollout:
    """Collect env steps with a new collector whose metrics keep every episode; Ctrl-C ends it early.

    ``table`` is a callback of the collector, shown instead of the bar and closed at the end.
    """
    envs, metrics = collector.envs, collector.metrics
    samples: dict[str, SampleBatch] = {}
    rows = dict.fromkeys(collector.policies, 0)
    done, chunk, interrupted = 0, envs.num_envs, False
    began = last = perf_counter()
    shown: AbstractContextManager[object] = nullcontext() if table is None else table
    hidden = table is not None
    with shown, ProgressBar(envs.spec.name, "env steps", env_steps, console=console, disable=hidden) as bar:
        try:
            while done < env_steps:
                batch = collector.collect(env_steps=min(chunk, env_steps - done))
                done += batch.env_steps
                for name, part in batch.items():
                    rows[name] += len(part)
                    samples.setdefault(name, part)
                now = perf_counter()
                recent = [episode.episode_return for episode in metrics.latest(_RECENT)]
                note = f"team return {np.mean(recent):.4g}" if recent else ""
                speed = (metrics.env_steps - metrics.env_steps_lost) / (now - began)
                bar.show(min(done, env_steps), speed=speed, note=note)
                # As many steps as are done between two updates of the bar, in whole vector steps.
                rate = batch.env_steps / max(now - last, 1e-6)
                chunk = max(1, round(rate * _REFRESH_SECONDS / envs.num_envs)) * envs.num_envs
                last = now
        except KeyboardInterrupt:
            interrupted = True
    return Rollout(
        env=envs.spec.name,
        num_envs=envs.num_envs,
        agents=envs.agents,
        where=_where(envs),
        env_steps=done,
        agent_steps=sum(rows.values()),
        episodes=metrics.episodes_total,
        episodes_faulty=metrics.episodes_faulty,
        episodes_restarted=metrics.episodes_restarted,
        env_steps_lost=metrics.env_steps_lost,
        seconds=perf_counter() - began,
        speed=(metrics.env_steps - metrics.env_steps_lost) / max(last - began, 1e-6),
        samples=samples,
        rows=rows,
        players={name: tuple(agent for agent in envs.agents if played_by[agent] == name) for name in rows},
        tracks=tracks(metrics.episodes, tuple(rows), envs.num_envs),
        timers={name: timer.seconds for name, timer in metrics.timers.items()},
        interrupted=interrupted,
    )


def _where(envs: VectorEnv) -> str:
    if isinstance(envs, AsyncVectorEnv):
        return f"{envs.num_workers} worker process{'es' * (envs.num_workers > 1)}"
    return "in this process"
