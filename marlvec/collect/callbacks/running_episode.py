"""The episode an env is in, as callbacks see it."""

from __future__ import annotations

from marlvec.collect.episodes import Episode

__all__ = ["RunningEpisode"]


class RunningEpisode(Episode):
    """One episode, the same object from its creation to its end.

    Args:
        eps_id, env_id, number, entropy: As `Episode`'s.
        policies: Each agent's policy id.

    Attributes:
        policies: As given: who played whom when it was created.
        custom: Numbers by name, for callbacks to fill; they end up in `EpisodeRecord.custom` and `Metrics.custom`.
    """

    __slots__ = ("custom", "policies")

    def __init__(self, eps_id: int, env_id: int, number: int, entropy: int, policies: tuple[str, ...]) -> None:
        super().__init__(eps_id, env_id, number, entropy)
        self.policies = policies
        self.custom: dict[str, float] = {}
