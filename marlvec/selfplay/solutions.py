"""`exploitability`: how much a best response wins, exactly, on the game tree; Alpha-Rank, also with cycles."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import ArrayLike, NDArray

from marlvec.connectors import AgentPipeline, Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.extras import import_extra
from marlvec.policies import Policy
from marlvec.selfplay.opponents import Opponent
from marlvec.selfplay.results import MatchTable

Probabilities = Callable[[Rows], Any]
"""Function of n rows to (n, k) probabilities of the k actions."""

Player = Policy | Opponent | Probabilities

FloatArray = NDArray[np.float64]


@runtime_checkable
class HasProbabilities(Protocol):
    """A policy with action probabilities, such as `TorchPolicy` and `RandomPolicy`."""

    def probabilities(self, rows: Rows) -> Any:
        """Return (n, k) probabilities of the k actions of a Discrete space, for n rows; masked actions have 0."""


def exploitability(
    policies: Player | Sequence[Player],
    game: str = "kuhn_poker",
    *,
    weights: Sequence[float] | None = None,
    agent_connectors: AgentPipeline | None = None,
) -> float:
    """Compute NashConv / number of players: what a best response wins on average; 0 in an equilibrium.

    Each policy is called once with all information states of the game, for all players: rows with OpenSpiel's
    information-state tensor as ``obs`` (n, …) float32, ``agent_index`` the player, ``action_mask`` (n, k) bool. Every
    row is the first one of another env, so policies and connectors with memory are not supported.

    Args:
        policies: A policy with a method ``probabilities(rows)``, or such a function, or an opponent of a pool, which
            has its own connectors. Several policies: the exploitability of their average, that is of drawing one policy
            before each game, as in fictitious play: ``list(pool.values())``.
        game: An OpenSpiel game: ``"kuhn_poker"``, ``"leduc_poker"``.
        weights: Probability, up to a factor, with which each of several policies is drawn; None: all equal.
        agent_connectors: Connectors of policies that are not opponents, copied; None: none.

    Returns:
        What a perfect opponent wins per game on average; 0 if the policy cannot be exploited.

    Raises:
        MissingExtraError: OpenSpiel is not installed (extra ``openspiel``).
        ArgumentError: A policy has no probabilities, or weights do not fit.
        ContractError: Probabilities have the wrong shape, are negative, do not sum to 1 or are positive for masked
            actions.
    """
    spiel = import_extra("pyspiel", "exploitability()", "pip install 'marlvec[openspiel]'")
    tables = import_extra("open_spiel.python.policy", "exploitability()", "pip install 'marlvec[openspiel]'")
    nash = import_extra(
        "open_spiel.python.algorithms.exploitability", "exploitability()", "pip install 'marlvec[openspiel]'"
    )
    loaded = spiel.load_game(game)
    table = tables.TabularPolicy(loaded)
    plain = _rows(table)
    rows = _connected(plain, agent_connectors)
    several = list(policies) if isinstance(policies, Sequence) else [policies]
    shares = np.full(len(several), 1.0) if weights is None else np.array(weights, np.float64)
    if not several or shares.shape != (len(several),) or (shares < 0).any() or not 0 < shares.sum() < np.inf:
        raise ArgumentError(f"weights: expected one for each of {len(several)} policies, not all 0, got {weights!r}")
    found = np.stack([_probabilities(policy, rows, plain, table) for policy in several])
    table.action_probability_array[:] = _average(loaded, table, found, shares / shares.sum())
    return float(nash.nash_conv(loaded, table)) / int(loaded.num_players())


def _rows(table: Any) -> Rows:
    """Return all information states as rows."""
    players = np.array([state.current_player() for state in table.states])
    n, none = len(players), np.zeros(len(players), np.bool_)
    obs = np.array([s.information_state_tensor(p) for s, p in zip(table.states, players, strict=True)], np.float32)
    return Rows(
        {
            "obs": obs,
            "rewards": np.zeros(n),
            "terminated": none,
            "truncated": none,
            "first": ~none,
            "last": none,
            "env_id": np.arange(n),
            "agent_index": players,
            "eps_id": np.arange(n),
            "t": np.zeros(n, np.int64),
            "action_mask": table.legal_actions_mask.astype(np.bool_),
        }
    )


def _connected(rows: Rows, agent_connectors: AgentPipeline | None) -> Rows:
    """Return rows after the agent connectors."""
    if agent_connectors is None:
        return rows
    pipeline = copy.deepcopy(agent_connectors).eval()
    pipeline.reset()
    if not pipeline.bound:
        names = [f"player_{p}" for p in range(int(rows["agent_index"].max()) + 1)]
        pipeline.bind(_space(rows["obs"]), names, Discrete(rows["action_mask"].shape[1]))
    return pipeline(rows)


def _space(obs: NDArray[Any]) -> Box:
    return Box(-np.inf, np.inf, obs.shape[1:], np.float32)


def _probabilities(policy: Any, rows: Rows, plain: Rows, table: Any) -> FloatArray:
    mask = table.legal_actions_mask.astype(np.bool_)
    if isinstance(policy, Opponent):
        policy, rows = policy.policy(), _connected(plain, policy.agent_connectors())
    if isinstance(policy, HasProbabilities):
        if isinstance(policy, Policy) and policy.action_space is None:
            policy.setup(_space(rows["obs"]), Discrete(mask.shape[1]), seed=0)
        output = policy.probabilities(rows)
    elif callable(policy):
        output = policy(rows)
    else:
        raise ArgumentError(f"{policy!r}: expected probabilities; give it a method probabilities(rows) -> (n, k)")
    found = np.array(output, np.float64)
    if found.shape != mask.shape:
        raise ContractError(f"probabilities of {policy!r}: expected shape {mask.shape}, got {found.shape}")
    bad = ~np.isclose(found.sum(axis=1), 1, atol=1e-4) | (found < 0).any(axis=1) | ((found > 1e-6) & ~mask).any(axis=1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise ContractError(
            f"probabilities of {policy!r} in the information state {table.states[i]!s}: expected a sum of 1 over the "
            f"allowed actions {mask[i]}, got {found[i]}"
        )
    found /= found.sum(axis=1, keepdims=True)
    return found


def _average(game: Any, table: Any, found: FloatArray, shares: FloatArray) -> FloatArray:
    """Return the policy of a player who draws one of the policies and keeps it for the whole game: (n, k).

    ``found``: (P, n, k) probabilities; ``shares``: (P,). Each policy weighs in each information state of the ``table``
    as its own actions make the state likely.
    """
    if len(found) == 1:
        only: FloatArray = found[0]
        return only
    reach = np.zeros(found.shape[:2])

    def walk(state: Any, own: FloatArray) -> None:
        """Args: own: (players, P), the probability of the actions so far under each policy, for each player."""
        if state.is_terminal():
            return
        if state.is_chance_node():
            for action, _ in state.chance_outcomes():
                walk(state.child(action), own)
            return
        player = state.current_player()
        i = table.state_lookup[state.information_state_string(player)]
        reach[:, i] = own[player]  # with perfect recall a player reaches a state in one way only
        for action in state.legal_actions():
            after = own.copy()
            after[player] *= found[:, i, action]
            walk(state.child(action), after)

    walk(game.new_initial_state(), np.ones((game.num_players(), len(found))))
    weights = shares[:, None] * reach
    weights[:, weights.sum(axis=0) == 0] = shares[:, None]  # any weights will do in unreachable states
    average: FloatArray = (weights[..., None] * found).sum(axis=0) / weights.sum(axis=0)[:, None]
    return average


def alpha_rank(table: MatchTable | ArrayLike, *, alpha: float = 100.0, population: int = 50) -> dict[str, float]:
    """Rank policies by their long-run share of a population in which policies imitate those that beat them.

    Ratings put policies in a line, and cannot describe rock, paper and scissors; here each of the three gets a third.
    This is OpenSpiel's alpha-rank of one population.

    Args:
        table: A table of matches, in which pairs that never met count as even; or win rates (P, P), row against
            column.
        alpha: How strongly better policies are preferred.
        population: Number of individuals.

    Returns:
        Policy id, or the row's number as a text, to share; the shares sum to 1.

    Raises:
        MissingExtraError: OpenSpiel is not installed (extra ``openspiel``).
        ArgumentError: No players, or not a square matrix of finite win rates.
    """
    rates = table.payoffs(unknown=0.5) if isinstance(table, MatchTable) else np.array(table, np.float64)
    if rates.ndim != 2 or not len(rates) or rates.shape[0] != rates.shape[1] or not np.isfinite(rates).all():
        raise ArgumentError(f"table: expected (P, P) finite win rates of all against all, got shape {rates.shape}")
    names = table.players if isinstance(table, MatchTable) else tuple(map(str, range(len(rates))))
    ranking = import_extra("open_spiel.python.egt.alpharank", "alpha_rank()", "pip install 'marlvec[openspiel]'")
    with np.errstate(over="ignore"):  # a win rate near 1 makes an exponential infinite, and its inverse 0
        _, _, shares, _, _ = ranking.compute([rates], m=population, alpha=alpha)
    return dict(zip(names, map(float, shares), strict=True))
