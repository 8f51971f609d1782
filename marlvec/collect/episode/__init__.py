"""One episode as a value: what each agent did, and all of them by env step, made of a batch's rows."""

from marlvec.collect.episode.multi_agent_episode import MultiAgentEpisode
from marlvec.collect.episode.single_agent_episode import SingleAgentEpisode

__all__ = ["SingleAgentEpisode", "MultiAgentEpisode"]
