"""`OpenSkill`: ratings with an uncertainty, from the openskill package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from marlvec.errors import ArgumentError
from marlvec.extras import import_extra
from marlvec.selfplay.ratings.ratings import Ratings

__all__ = ["OpenSkill"]


class OpenSkill(Ratings):
    """Mean and standard deviation of each policy's skill, as in TrueSkill; from a model of openskill.

    Elo needs many games to rate a new policy; this rating changes fast while it is uncertain, and slowly after many
    games. Games may have any number of sides, and sides any number of policies.

    Args:
        model: Class in `openskill.models`, e.g. ``"PlackettLuce"``, ``"BradleyTerryFull"``,
            ``"ThurstoneMostellerFull"``.
        options: Arguments of that class: ``mu``, ``sigma``, ``beta``, ``tau``, …

    Raises:
        MissingExtraError: openskill is not installed (extra ``selfplay``).
        ArgumentError: openskill has no such model.
    """

    def __init__(self, model: str = "PlackettLuce", **options: Any) -> None:
        models = import_extra("openskill.models", "OpenSkill", "pip install 'marlvec[selfplay]'")
        known = {kind.__name__: kind for kind in models.MODELS}
        if model not in known:
            raise ArgumentError(f"model: expected one of openskill's models {sorted(known)}, got {model!r}")
        self._model = known[model](**options)
        self._beliefs: dict[str, tuple[float, float]] = {}

    def _rate(self, teams: Sequence[tuple[str, ...]], scores: Sequence[float]) -> None:
        names = dict.fromkeys(name for team in teams for name in team)
        if len(names) == 1:
            return  # a policy against itself carries no information
        given = [[self._belief(name) for name in team] for team in teams]
        found = self._model.rate(given, scores=list(scores))
        # A policy that plays several sides changes by the sum of their changes; its uncertainty shrinks with each.
        beliefs = {name: self.belief(name) for name in names}
        for team, before, after in zip(teams, given, found, strict=True):
            for name, old, new in zip(team, before, after, strict=True):
                mu, sigma = beliefs[name]
                beliefs[name] = mu + (new.mu - old.mu), sigma * (new.sigma / old.sigma)
        self._beliefs |= beliefs

    def _belief(self, player: str) -> Any:
        mu, sigma = self.belief(player)
        return self._model.rating(mu=mu, sigma=sigma)

    def belief(self, player: str) -> tuple[float, float]:
        """Return mean and standard deviation of a policy's (``player``) skill, on OpenSkill's scale."""
        if player in self._beliefs:
            return self._beliefs[player]
        new = self._model.rating()
        return float(new.mu), float(new.sigma)

    def rating(self, player: str) -> float:
        return self.belief(player)[0]

    def lower_bound(self, player: str, deviations: float = 3.0) -> float:
        """Return a lower bound of a policy's (``player``) skill: the mean minus some standard ``deviations``."""
        mu, sigma = self.belief(player)
        return mu - deviations * sigma

    def expected(self, one: str, other: str) -> float:
        return float(self._model.predict_win([[self._belief(one)], [self._belief(other)]])[0])

    @property
    def players(self) -> tuple[str, ...]:
        return tuple(self._beliefs)

    def copy(self, old: str, new: str) -> None:
        self._beliefs[new] = self.belief(old)

    def forget(self, player: str) -> None:
        self._beliefs.pop(player, None)

    def state_dict(self) -> dict[str, Any]:
        return {"beliefs": {name: [mu, sigma] for name, (mu, sigma) in self._beliefs.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            beliefs = {str(name): (float(mu), float(sigma)) for name, (mu, sigma) in state["beliefs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"expected the state of an OpenSkill: {error!r}") from error
        self._beliefs = beliefs
