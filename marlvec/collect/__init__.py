"""Collectors: envs and policies in, per-policy batches out."""

from marlvec.collect.agent_episodes import MultiAgentEpisode, SingleAgentEpisode
from marlvec.collect.batch import MultiAgentBatch, SampleBatch
from marlvec.collect.collector import Collector
from marlvec.collect.episodes import Episode, PolicyMapping
from marlvec.collect.metrics import EpisodeRecord, Metrics, Stats, Timer

__all__ = [
    "SingleAgentEpisode",
    "Collector",
    "Episode",
    "EpisodeRecord",
    "Metrics",
    "MultiAgentBatch",
    "MultiAgentEpisode",
    "PolicyMapping",
    "SampleBatch",
    "Stats",
    "Timer",
]
