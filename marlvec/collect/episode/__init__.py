"""Episodes as values: per-agent tracks on a map of env time, made of a batch's rows."""

from marlvec.collect.episode.agent_track import AgentTrack
from marlvec.collect.episode.multi_agent_episode import MultiAgentEpisode

__all__ = ["AgentTrack", "MultiAgentEpisode"]
