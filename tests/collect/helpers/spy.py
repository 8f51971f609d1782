"""A callback that keeps all it is told, and holds it against metrics and reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from marlvec.collect import Collector
from marlvec.collect.callbacks import HOOKS, Callback, EpisodeStep, LossReason, RunningEpisode
from marlvec.collect.metrics import EpisodeRecord
from tests.collect.helpers.reference import Reference

__all__ = ["Life", "Spy"]


class Life:
    """One episode, as it was told."""

    def __init__(self, episode: RunningEpisode) -> None:
        self.episode = episode
        self.stage = "created"
        self.rewards: list[list[float]] = []
        self.ended: set[int] = set()
        self.record: EpisodeRecord | None = None
        self.why: LossReason | None = None

    def come_to(self, stage: str, *before: str) -> None:
        assert self.stage in before, f"{self.episode} came from {self.stage} to {stage}"
        self.stage = stage


class Spy(Callback):
    """Keeps all it is told, and objects to what comes out of turn.

    Attributes:
        lives: eps_id → what was told of the episode.
        running: env id → the episode it is in.
        calls: How often each hook was called.
    """

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}
        self.running: dict[int, Life] = {}
        self.calls = dict.fromkeys(HOOKS, 0)

    def on_episode_created(self, episode: RunningEpisode) -> None:
        self.calls["on_episode_created"] += 1
        assert episode.eps_id not in self.lives
        assert episode.env_id not in self.running
        self.lives[episode.eps_id] = self.running[episode.env_id] = Life(episode)

    def on_episode_start(self, episode: RunningEpisode) -> None:
        self.calls["on_episode_start"] += 1
        self._life(episode).come_to("started", "created")

    def on_episode_step(self, step: EpisodeStep) -> None:
        self.calls["on_episode_step"] += 1
        assert len(step) > 0
        assert (np.diff(step.env_ids) > 0).all()
        assert [episode.env_id for episode in step.episodes] == step.env_ids.tolist()
        for k, episode in enumerate(step.episodes):
            life = self._life(episode)
            life.come_to("last step" if step.done[k] else "stepped", "started", "stepped")
            life.rewards.append(step.rewards[k].tolist())
            ended = set(np.flatnonzero(step.terminated[k] | step.truncated[k]).tolist())
            assert not ended & life.ended
            life.ended |= ended

    def on_episode_end(self, episode: RunningEpisode, record: EpisodeRecord) -> None:
        self.calls["on_episode_end"] += 1
        life = self._life(episode)
        life.come_to("ended", "last step")
        life.record = record
        del self.running[episode.env_id]

    def on_episode_lost(self, episode: RunningEpisode, why: LossReason) -> None:
        self.calls["on_episode_lost"] += 1
        life = self._life(episode)
        life.come_to("lost", "created", "started", "stepped")
        life.why = why
        del self.running[episode.env_id]

    def on_sample_end(self, batch: Any, metrics: Any) -> None:
        self.calls["on_sample_end"] += 1

    def _life(self, episode: RunningEpisode) -> Life:
        life = self.running[episode.env_id]
        assert life.episode is episode
        return life

    def check(self, collector: Collector) -> None:
        """Check that what was told adds up to what the metrics say."""
        metrics = collector.metrics
        ended = [life for life in self.lives.values() if life.record is not None]
        reasons = [life.why for life in self.lives.values()]
        assert metrics.episodes_total == len(ended)
        assert metrics.episodes_faulty == reasons.count("fault")
        assert metrics.episodes_restarted == reasons.count("restart")
        assert len(self.lives) == len(ended) + len(self.running) + sum(why is not None for why in reasons)
        failed = metrics.episodes_faulty + metrics.episodes_restarted  # the step in which it was lost is one, too
        assert metrics.env_steps == sum(len(life.rewards) for life in self.lives.values()) + failed
        known = {record.eps_id: record for record in metrics.episodes}
        for life in ended:
            record, episode = life.record, life.episode
            assert record is not None
            assert (record.eps_id, record.env_id, record.number) == (episode.eps_id, episode.env_id, episode.number)
            assert record.policies == episode.policies
            assert record.length == len(life.rewards)
            assert record.returns_A.tolist() == np.sum(life.rewards, axis=0).tolist()
            assert set(np.flatnonzero(record.present_A).tolist()) == life.ended
            assert known.get(record.eps_id, record) is record

    def check_against(self, reference: Reference) -> None:
        """Check that what was told is what the reference did."""
        assert {eps_id: life.rewards for eps_id, life in self.lives.items()} == reference.paid
        assert {eps_id: life.why for eps_id, life in self.lives.items() if life.why} == reference.lost
        for world in reference.worlds:
            life = self.running[world.env]
            assert life.stage in ("started", "stepped")
            assert (life.episode.eps_id, life.episode.number) == (world.eps_id, world.number)
            assert life.episode.policies == world.policies
        assert len(self.running) == len(reference.worlds)

    def story(self) -> list[Any]:
        """Return all that was told, to be compared with another's; times are left out."""
        return [
            (str(life.episode), life.episode.policies, life.stage, life.why, sorted(life.ended), life.rewards)
            for life in self.lives.values()
        ]
