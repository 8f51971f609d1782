"""The table that ``marlvec rollout`` prints: returns, shapes and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from marlvec.cli.display.table import NOTHING, print_table
from marlvec.collect import EpisodeRecord, SampleBatch
from marlvec.selfplay.results.whole_table import Column
from marlvec.trees import tree_leaves

__all__ = ["Track", "tracks", "Rollout", "print_rollout", "rollout_json"]


@dataclass(frozen=True, slots=True)
class Track:
    """One entry per agent and episode, in order of time."""

    env_steps: NDArray[np.int64]  # of all envs together at the episode's end: its env's times N
    returns: NDArray[np.float64]  # sum of the agent's rewards in the episode
    lengths: NDArray[np.int64]  # number of the agent's decisions
    agents: NDArray[np.int64]  # agent index

    def __len__(self) -> int:
        return len(self.returns)

    def of_agent(self, index: int) -> Track:
        mine = self.agents == index
        return Track(self.env_steps[mine], self.returns[mine], self.lengths[mine], self.agents[mine])

    @property
    def agents_differ(self) -> bool:
        """Whether mean returns of two agents differ by more than three standard errors."""
        own = [self.returns[self.agents == a] for a in np.unique(self.agents)]
        if len(own) < 2:
            return False
        means = np.array([part.mean() for part in own])
        low, high = own[int(means.argmin())], own[int(means.argmax())]
        error = np.sqrt(low.var() / len(low) + high.var() / len(high))
        return bool(np.ptp(means) > 3 * error)


def tracks(episodes: Sequence[EpisodeRecord], policy_ids: Sequence[str], num_envs: int) -> Mapping[str, Track]:
    """Sort the results of all episodes since the first reset by policy; an agent that was never in one has no entry."""
    made = np.zeros(num_envs, np.int64)
    entries: dict[str, list[tuple[Any, ...]]] = {name: [] for name in policy_ids}
    for episode in episodes:
        made[episode.env_id] += episode.length
        at = int(made[episode.env_id]) * num_envs
        for a in np.flatnonzero(episode.present_A).tolist():
            entries[episode.policies[a]].append((at, episode.returns_A[a], episode.lengths_A[a], a))
    return {name: _track(found) for name, found in entries.items()}


def _track(entries: list[tuple[Any, ...]]) -> Track:
    at, returns, lengths, agents = zip(*entries, strict=True) if entries else ((), (), (), ())
    steps = np.array(at, np.int64)
    order = np.argsort(steps, kind="stable")
    return Track(
        steps[order],
        np.array(returns, np.float64)[order],
        np.array(lengths, np.int64)[order],
        np.array(agents, np.int64)[order],
    )


@dataclass(frozen=True, slots=True)
class Rollout:
    """Results of a run; keys are policy ids."""

    env: str
    num_envs: int
    agents: tuple[str, ...]
    where: str  # backend and number of workers
    env_steps: int  # of all batches, as agent_steps
    agent_steps: int
    episodes: int  # finished ones
    episodes_faulty: int  # lost, see `Metrics`
    episodes_restarted: int
    env_steps_lost: int
    seconds: float  # including the first reset
    speed: float  # env steps a second; unfinished episodes count, lost ones do not
    samples: Mapping[str, SampleBatch]  # first batches, to read their columns
    rows: Mapping[str, int]  # in all batches
    players: Mapping[str, tuple[str, ...]]  # agents' names
    tracks: Mapping[str, Track]
    timers: Mapping[str, float]  # seconds by activity
    interrupted: bool  # by Ctrl-C


_TIMES = {
    "env_wait": "envs",
    "inference": "policies",
    "agent_connectors": "agent connectors",
    "action_connectors": "action connectors",
    "ingest": "book-keeping",
    "batch": "batches",
    "callbacks": "callbacks",
}


_COLUMNS: tuple[Column, ...] = (
    ("policy", "left"),
    ("plays", "left"),
    ("rows", "right"),
    ("obs", "left"),
    ("actions", "left"),
    ("return per agent", "right"),
    ("min … max", "right"),
    ("length", "right"),
)


def print_rollout(console: Console, result: Rollout) -> None:
    """Print the table of policies, and the totals."""
    agents = f"{len(result.agents)} agent{'s' * (len(result.agents) != 1)}"
    title = Text.assemble((result.env, "bold"), f" · {result.num_envs} envs × {agents}, {result.where}")
    rows: list[list[str | Text]] = []
    for name, track in result.tracks.items():
        batch = result.samples.get(name)
        rows.append(
            [
                Text(name, "bold cyan"),
                Text(_several(result.players[name])),
                f"{result.rows[name]:,}",
                Text(_form(batch, "obs")),
                Text(_form(batch, "actions")),
                *_returns(track),
                _lengths(track),
            ]
        )
        if track.agents_differ:
            for agent in result.players[name]:
                own = track.of_agent(result.agents.index(agent))
                cells = ("", agent, "", "", "", *_returns(own), _lengths(own))
                rows.append([Text(cell, "dim") for cell in cells])
    print_table(console, title, _COLUMNS, rows)
    stopped = "stopped after " if result.interrupted else ""
    console.print(
        f"{stopped}{result.env_steps:,} env steps, {result.agent_steps:,} agent steps, {result.episodes:,} episodes "
        f"in {result.seconds:.1f} s: [bold green]{result.speed:,.0f} env steps/s[/]",
        highlight=False,
    )
    if causes := _losses(result):
        console.print(f"[yellow]also lost: {causes}, {result.env_steps_lost:,} env steps together[/]", highlight=False)
    if total := sum(result.timers.values()):
        parts = {key: result.timers[key] for key in _TIMES if key != "callbacks" or result.timers[key]}
        shares = ", ".join(f"{_TIMES[key]} {seconds / total:.0%}" for key, seconds in parts.items())
        console.print(f"[dim]time went to: {shares}[/]", highlight=False)
    if not result.episodes:
        console.print("[yellow]no episode ended, so there are no returns yet; give more --env-steps[/]")


def rollout_json(result: Rollout) -> dict[str, Any]:
    """Return the results as a JSON object; unknown values are null."""
    names = (
        *("env", "num_envs", "agents", "where", "env_steps", "agent_steps", "episodes", "episodes_faulty"),
        *("episodes_restarted", "env_steps_lost", "seconds", "interrupted"),
    )
    return {
        **{name: getattr(result, name) for name in names},
        "env_steps_per_second": result.speed,
        "seconds_by_part": dict(result.timers),
        "policies": {name: _policy_json(result, name) for name in result.tracks},
    }


def _policy_json(result: Rollout, name: str) -> dict[str, Any]:
    batch, track = result.samples.get(name), result.tracks[name]
    agents = {agent: track.of_agent(result.agents.index(agent)) for agent in result.players[name]}
    return {
        "rows": result.rows[name],
        "obs": None if batch is None else _form(batch, "obs").splitlines(),
        "actions": None if batch is None else _form(batch, "actions").splitlines(),
        **_figures(track),
        "agents": {agent: _figures(own) for agent, own in agents.items()},
    }


def _figures(track: Track) -> dict[str, Any]:
    parts = {"return": track.returns, "length": track.lengths}
    if not len(track):
        return {"agent_episodes": 0, **dict.fromkeys(parts)}
    return {
        "agent_episodes": len(track),
        **{
            key: {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
            for key, values in parts.items()
        },
    }


def _losses(result: Rollout) -> str:
    counts = ((result.episodes_faulty, "to faults"), (result.episodes_restarted, "to restarts requested by envs"))
    return " and ".join(f"{n:,} episode{'s' * (n != 1)} {why}" for n, why in counts if n)


def _several(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)})"


def _form(batch: SampleBatch | None, column: str) -> str:
    """Describe shape and dtype of a column, n for the rows; one line per leaf."""
    if batch is None:
        return NOTHING
    lines = []
    for path, leaf in tree_leaves(batch[column]):
        shape = ", ".join(map(str, ("n", *leaf.shape[1:]))) + ("," if leaf.ndim == 1 else "")
        lines.append(f"{path + ' ' if path else ''}({shape}) {leaf.dtype}")
    return "\n".join(lines)


def _returns(track: Track) -> tuple[str, str]:
    if not len(track):
        return NOTHING, NOTHING
    values = track.returns
    return f"{values.mean():.2f} ± {values.std():.2f}", f"{values.min():.2f} … {values.max():.2f}"


def _lengths(track: Track) -> str:
    if not len(track):
        return NOTHING
    low, high = int(track.lengths.min()), int(track.lengths.max())
    return str(low) if low == high else f"{np.mean(track.lengths):.1f} ({low} … {high})"
