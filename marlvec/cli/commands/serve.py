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
from marlvec.errors import ArgumentError
from marlvec.external import find_token
from marlvec.policies import Policy, load_policy
from marlvec.selfplay import Opponent
from marlvec.selfplay.opponents.opponent_pool import INDEX
from marlvec.vector.vector_env import VectorEnv

__all__ = ["answer", "collector_of", "takes_logs", "token_of", "who_may_come"]

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

    ``PATH`` is a file of `save_policy`, or an opponent of a pool. With callbacks, batches have the rows of all
    policies.
    """
    with naming("--policy"):
        order, whats, files, opponents = _apart(texts)
    found: dict[str, Policy] = {**arguments.policies(whats), **{name: one.policy() for name, one in opponents.items()}}
    named = {name: found[name] for name in order}
    chains = arguments.connectors(connectors, tuple(named))
    acting = {name: one.action_connectors() for name, one in opponents.items()}
    seeing: Any = chains
    if opponents:
        if not isinstance(chains, dict) or chains.keys() & opponents.keys():
            raise ArgumentError(
                f"--connectors: opponents {', '.join(opponents)} have their own connectors; use ID=CHAIN for others"
            )
        seeing = {**chains, **{name: one.agent_connectors() for name, one in opponents.items()}}
    named, played_by = arguments.assign_policies(named, mapping, envs.agents, envs.groups)
    collector = Collector(
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
    _restore(collector, named, files)
    return collector


def _apart(texts: Sequence[str]) -> tuple[list[str], list[str], dict[str, Path], dict[str, Opponent]]:
    """Split options into policy ids, texts for `marlvec.cli.arguments.policies`, files by id, and opponents by id."""
    order: list[str] = []
    whats: list[str] = []
    files: dict[str, Path] = {}
    opponents: dict[str, Opponent] = {}
    for text in texts:
        what, at, path = text.rpartition("@")
        if at:
            arguments.refuse_state_of_random(text, arguments.policy_id(what)[1])
        if not at:
            name = arguments.policy_id(text)[0]
            whats.append(text)
        elif Path(path).is_file():
            name = arguments.policy_id(what)[0]
            whats.append(what)
            files[name] = Path(path)
        elif Path(path).is_dir() or Path(path).parent.joinpath(INDEX).exists():
            name, player = arguments.one_player(text)
            assert isinstance(player, Opponent)  # pools hold opponents
            opponents[name] = player
        else:
            raise ArgumentError(f"--policy {text}: expected a file of save_policy() or a pool, found none at {path}")
        if name in order:
            raise ArgumentError(f"--policy {text}: there are two policies {name!r}; give one another id: ID=…")
        order.append(name)
    return order, whats, files, opponents


def _restore(collector: Collector, policies: Mapping[str, Policy], files: Mapping[str, Path]) -> None:
    for policy_id, file in files.items():
        found = load_policy(file)
        chains: list[tuple[Any, Any]] = [
            (collector.agent_connectors[policy_id], found.agent_connectors),
            (collector.action_connectors[policy_id], found.action_connectors),
        ]
        try:
            policies[policy_id].load_state_dict(found.state)
            policies[policy_id].version = found.version
            for chain, state in chains:
                if state is not None:
                    chain.load_state_dict(state)
                    chain.eval().reset()  # drop memory of other episodes
        except (ArgumentError, ValueError, KeyError) as error:
            raise ArgumentError(f"{file} does not fit policy {policy_id!r} or its connectors: {error}") from error


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
