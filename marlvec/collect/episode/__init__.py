"""Episodes as values, made of a batch's rows: indexed by agent and by env step."""

from marlvec.collect.episode.multi_agent_episode import MultiAgentEpisode
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode

__all__ = ["SingleAgentEpisode", "MultiAgentEpisode"]
