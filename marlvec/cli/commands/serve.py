"""``marlvec serve``: trained policies answer simulators that connect over a socket."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marlvec.cli import arguments
from marlvec.cli.console import naming
from marlvec.collect import Collector
from marlvec.collect.callbacks import Callback
from marlvec.connectors import ActionPipeline
from marlvec.errors import ArgumentError
from marlvec.external import find_token
from marlvec.policies import Policy
from marlvec.selfplay import Opponent
from marlvec.selfplay.opponents.opponent_pool import INDEX
from marlvec.vector.vector_env import VectorEnv

__all__ = ["answer", "collector_of", "parts_of", "takes_logs", "token_of", "who_may_come"]

_AT_A_TIME = 64  # env steps of one collect(), between which Ctrl-C is handled


def collector_of(
    envs: VectorEnv,
    texts: Sequence[str],
    mapping: Sequence[str],
    connectors: Sequence[str],
    *,
    explore: bool,
    seed: int | None,
    callbacks: Sequence[Callback] = (),
) -> Collector:
    """Return a collector with the policies of options ``--policy [ID=]WHAT[@PATH]``; it trains none of them.

    ``PATH`` is a file of `save_policy`, or an opponent of a pool; both bring their connectors. With callbacks, batches
    have the rows of all policies.
    """
    with naming("--policy"):
        players = _players(texts)
    chains: Any = arguments.given_connectors(connectors, players) if players else arguments.connectors(connectors, ())
    policies, seeing, acting = parts_of(players, chains)
    named, played_by = arguments.assign_policies(policies, mapping, envs.agents, envs.groups)
    return Collector(
        envs,
        named,
        played_by,
        agent_connectors=seeing or None,
        action_connectors=acting or None,
        policies_to_train=None if callbacks else (),
        explore=explore,
        seed=seed,
        callbacks=callbacks,
    )


def parts_of(
    players: Mapping[str, Policy | Opponent], chains: Any
) -> tuple[dict[str, Policy], Any, dict[str, ActionPipeline]]:
    """Return policies, agent connectors and action connectors for a `Collector`.

    ``chains``: agent connectors of the players that were saved without.
    """
    opponents = {name: one for name, one in players.items() if isinstance(one, Opponent)}
    policies = {name: one.policy() if isinstance(one, Opponent) else one for name, one in players.items()}
    if opponents:
        chains = {**{name: one.agent_connectors() for name, one in opponents.items()}, **chains}
    return policies, chains, {name: one.action_connectors() for name, one in opponents.items()}


def _players(texts: Sequence[str]) -> dict[str, Policy | Opponent]:
    """Return the players of options ``--policy [ID=]WHAT[@PATH]``, in their order."""
    players: dict[str, Policy | Opponent] = {}
    for text in texts:
        what, at, path = text.rpartition("@")
        if at:
            arguments.refuse_state_of_random(text, arguments.policy_id(what)[1])
            if not (Path(path).exists() or Path(path).parent.joinpath(INDEX).exists()):
                raise ArgumentError(
                    f"--policy {text}: expected a file of save_policy() or a pool, found none at {path}"
                )
        name, player = arguments.one_player(text)
        if name in players:
            raise ArgumentError(f"--policy {text}: there are two policies {name!r}; give one another id: ID=…")
        players[name] = player
    return players


def takes_logs(collector: Collector) -> bool:
    """Return whether clients may send their own actions, as the web page does for the person who plays there.

    False if a policy's action space differs from its env's: its actions cannot be computed from the env's.
    """
    chains = collector.action_connectors.values()
    return all(chain.policy_space_ == chain.env_space for chain in chains)


def token_of(file: Path | None, *, no_token: bool) -> str | None:
    """Return the token that clients must know, from the options or the environment; None: no token."""
    if no_token and file is not None:
        raise ArgumentError("--no-token and --token-file: expected only one of them")
    return None if no_token else find_token(file)


def who_may_come(host: str) -> str:
    """Describe in one line who may connect without a token."""
    if ipaddress.ip_address(host).is_loopback:
        who = "any program on this machine may connect; set MARLVEC_TOKEN or --token-file to require one"
    else:
        who = f"any client that can reach {host} may connect"
    return f"no token: {who}"


def answer(collector: Collector) -> None:
    """Answer until Ctrl-C."""
    collector.eval()
    try:
        while True:
            collector.collect(env_steps=_AT_A_TIME)
    except KeyboardInterrupt:
        pass
