"""Episodes as values: per-agent agent episodes on a map of env time, made of a batch's rows."""

from marlvec.collect.episode.multi_agent_episode import MultiAgentEpisode
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode

__all__ = ["SingleAgentEpisode", "MultiAgentEpisode"]
