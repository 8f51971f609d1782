"""``marlvec play``: a person against a policy; ``arena``: a tournament; ``serve``: policies answer simulators."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marlvec.cli import arguments
from marlvec.cli.arguments import (
    AsJson,
    Backend,
    Connectors,
    Env,
    MaxEpisodeSteps,
    NumWorkers,
    Seed,
    Settings,
    Traceback,
)
from marlvec.cli.console import naming, plain_errors, print_json, settle_in, stdout, torch_within_cores
from marlvec.collect import Collector
from marlvec.collect.callbacks import Callback
from marlvec.connectors import ActionPipeline
from marlvec.errors import ArgumentError
from marlvec.external import find_token
from marlvec.policies import Policy
from marlvec.selfplay import Opponent
from marlvec.selfplay.opponents import INDEX
from marlvec.vector.vector_env import VectorEnv

if TYPE_CHECKING:
    from marlvec.cli.game import PlayCallback
    from marlvec.vector import VectorEnv


_YOU = "you"


def play(
    env: Env,
    policy: Annotated[
        str,
        typer.Option(
            metavar="[ID=]WHAT",
            help="Who plays against you: MODULE:MAKE@FOLDER or FILE.py:MAKE@FOLDER, the newest opponent of the pool in "
            "FOLDER (FOLDER/ID: that one), built by MAKE; FILE.py:MAKE@FILE, a policy from a file of save_policy(); or "
            "[b]random[/], MODULE:ATTR, FILE.py:ATTR as for rollout.",
        ),
    ] = "random",
    agent: Annotated[
        str | None,
        typer.Option(metavar="AGENT", help="Which agent you play.", show_default="the first, then the next, and so on"),
    ] = None,
    games: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many games.", show_default="until you quit")
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Let it draw random moves, as in training, not its best ones.")
    ] = False,
    browser: Annotated[
        bool,
        typer.Option(
            "--browser", help="Play connect four in a web page, on this machine only. Needs marlvec\\[external]."
        ),
    ] = False,
    connectors: Connectors = None,
    settings: Settings = None,
    seed: Seed = None,
    traceback: Traceback = False,
) -> None:
    r"""Play against a policy: type your moves; q, Ctrl-D or Ctrl-C ends it. With --browser, click them.

    Your own game is shown by the text that its render() returns, else by the observation.

    Against the newest opponent in a training's pool:

      marlvec play connect_four \
        --policy examples/selfplay_connect_four.py:LEAGUE@runs/connect_four/pool
    """
    from marlvec.cli import arguments
    from marlvec.cli.arguments import one_player
    from marlvec.cli.game import AnnouncingPolicy, HumanPolicy, PlayCallback, Quit, RenderedText
    from marlvec.cli.playing import parts_of
    from marlvec.collect import Collector
    from marlvec.errors import ArgumentError

    settle_in()
    console, interrupted = stdout(), False
    with plain_errors(traceback):
        name, player = one_player(policy)
        if name == _YOU:
            raise ArgumentError(f"--policy {policy}: the id {_YOU!r} is yours; give it another id: ID={policy}")
        chains = arguments.given_connectors(connectors or [], {name: player})
        opponent = what_plays(name, policy, player)
        policies, before, behind = parts_of({name: player}, chains)
        if browser:
            if agent is not None:
                raise ArgumentError(f"--agent {agent}: not with --browser, where you and the opponent begin in turns")
            options: dict[str, Any] = {"agent_connectors": before, "action_connectors": behind, "explore": explore}
            return _serve_page(env, settings, name, policies[name], opponent, games, {**options, "seed": seed})
        with _envs_with_text(env, arguments.env_kwargs(settings or [])) as envs:
            agents = envs.agents
            if agent is not None and agent not in agents:
                raise ArgumentError(f"--agent {agent}: no such agent; the agents are {', '.join(agents)}")
            if len(agents) < 2:
                raise ArgumentError(f"{env}: expected at least two agents, got one, {agents[0]}")
            you, other = (
                HumanPolicy(envs.spec.name, console, RenderedText(envs)),
                AnnouncingPolicy(name, policies[name]),
            )

            def agent_of(number: int) -> str:
                return agent or agents[number % len(agents)]

            table = PlayCallback(console, you, other, name, agents)
            collector = Collector(
                envs,
                {_YOU: you, name: other},
                lambda agent, episode: _YOU if agent == agent_of(episode.number) else name,
                agent_connectors=before,
                action_connectors=behind,
                callbacks=[table],
                explore=explore,
                seed=seed,
                batch_mode="complete",
            ).eval()
            try:
                _play_games(table, collector, games)
            except Quit:
                pass
            except KeyboardInterrupt:
                console.print()
                interrupted = True
        table.print_results()
    if interrupted:
        raise typer.Exit(130)


def _envs_with_text(env: str, kwargs: dict[str, Any]) -> VectorEnv:
    """Build one env that ends at its last position, and renders it as text if it can."""
    from marlvec.cli.arguments import build_envs
    from marlvec.registry import resolve

    def build(**mode: Any) -> VectorEnv:
        return build_envs(env, 1, backend="sync", autoreset_mode="disabled", env_kwargs=kwargs, **mode)

    envs = build()
    modes = envs.metadata.get("render_modes") or ()
    # OpenSpiel's text shows all players' cards.
    if "ansi" not in modes or "render_mode" in kwargs or resolve(env).entry.family == "openspiel":
        return envs
    envs.close()
    return build(render_mode="ansi")


def what_plays(name: str, text: str, player: Policy | Opponent) -> str:
    """Describe the opponent of option ``--policy``."""
    from marlvec.policies import RandomPolicy
    from marlvec.selfplay import Opponent

    if isinstance(player, Opponent):
        if Path(file := text.rpartition("@")[2]).is_file():
            return f"{name}, with the weights in {file}"
        if player.anchor:
            return f"{name}, a fixed opponent of its pool"
        return f"{name}, a snapshot of {player.of!r} from step {player.step:,}"
    if isinstance(player, RandomPolicy):
        return "random moves"
    return f"{name} ({text.partition('=')[2] or text})"


def _serve_page(
    env: str,
    settings: list[str] | None,
    name: str,
    player: Policy,
    opponent: str,
    games: int | None,
    options: dict[str, Any],
) -> None:
    """Serve the policy and the page, open it, and answer until Ctrl-C, or until `games` games have ended."""
    import webbrowser
    from itertools import count

    from marlvec import external
    from marlvec.cli import arguments
    from marlvec.cli.game import PageServer
    from marlvec.collect import Collector
    from marlvec.errors import ArgumentError

    with external.make(env, 8, **arguments.env_kwargs(settings or [])) as envs:
        if not envs.spec.name.startswith("connect_four"):
            raise ArgumentError(f"--browser: expected connect_four, the only env with a page, got {env}")
        collector = Collector(envs, {name: player}, name, policies_to_train=(), **options).eval()
        with external.Server(envs, "127.0.0.1", 0) as server, PageServer(opponent, server.url) as page:
            stdout().print(
                f"connect four against {opponent}: {page.url}; Ctrl-C ends it",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            webbrowser.open(page.url)
            try:
                for played in count():
                    if played == games:
                        break
                    collector.collect(episodes=1)
            except KeyboardInterrupt:
                pass


def _play_games(table: PlayCallback, collector: Collector, games: int | None) -> None:
    from marlvec.trees import map_tree

    played = 0
    while games is None or played < games:
        table.begin_game()
        batch = collector.collect(episodes=1)
        played += 1
        own = batch.get(_YOU)
        table.end_game(None if own is None or not len(own) else map_tree(itemgetter(-1), own["next_obs"]))


class Rating(StrEnum):
    """Ratings that `marlvec arena` can print."""

    BRADLEY_TERRY = "bradley-terry"
    ELO = "elo"
    SKILL = "skill"
    ALPHA_RANK = "alpha-rank"


def arena(
    env: Env,
    players: Annotated[
        list[str],
        typer.Argument(
            metavar="[ID=]WHAT…",
            help="Who plays, two or more: [b]random[/], MODULE:ATTR or FILE.py:ATTR, a marlvec Policy or a function "
            "from rows to actions; or MODULE:MAKE@FOLDER, FILE.py:MAKE@FOLDER, the newest opponent of the pool in "
            "FOLDER, built by MAKE; FOLDER/ID: that one; FOLDER/*: all of them; or FILE.py:MAKE@FILE, a policy from a "
            "file of save_policy().",
            show_default=False,
        ),
    ],
    games: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many games of each line-up: which players, on which sides.")
    ] = 100,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many envs at once.")] = 16,
    backend: Annotated[
        Backend,
        typer.Option(
            metavar="NAME",
            help="Where envs run: auto, async, thread, sync, native or pool; the results do not depend on it.",
        ),
    ] = Backend.AUTO,
    num_workers: NumWorkers = None,
    best: Annotated[bool, typer.Option("--best", help="Let players take their best actions, not random ones.")] = False,
    rating: Annotated[
        Rating,
        typer.Option(
            metavar="KIND",
            help="bradley-terry: from all games at once, with intervals; elo: game by game. skill needs "
            "marlvec\\[selfplay], alpha-rank marlvec\\[openspiel].",
        ),
    ] = Rating.BRADLEY_TERRY,
    confidence: Annotated[float, typer.Option(metavar="P", help="Level of the intervals.")] = 0.95,
    connectors: Connectors = None,
    settings: Settings = None,
    max_episode_steps: MaxEpisodeSteps = None,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Seed of envs, policies, and the order of line-ups.")
    ] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the win rates into this file (.png, .svg, …). Needs marlvec\\[plot]."),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    r"""Let all players play each other, on all sides equally often; show win rates, with intervals, and ratings.

    All opponents in a training's pool:

      marlvec arena connect_four --plot arena.png \
        "examples/selfplay_connect_four.py:LEAGUE@runs/connect_four/pool/*"
    """
    from marlvec.cli import arguments
    from marlvec.cli.arguments import build_envs
    from marlvec.cli.arguments import players as players_of
    from marlvec.cli.display import print_standings, rated, standings_json
    from marlvec.errors import ArgumentError
    from marlvec.selfplay import evaluate_match
    from marlvec.selfplay.evaluate import line_ups

    settle_in()
    with plain_errors(traceback), torch_within_cores():
        if plot is not None:
            from marlvec.cli.display import check_file

            check_file(plot)
        if not 0 < confidence < 1:
            raise ArgumentError(f"--confidence {confidence}: expected a number between 0 and 1")
        named = players_of(players)
        chains = arguments.given_connectors(connectors or [], named, skip_saved=True)
        with build_envs(
            env,
            num_envs,
            backend=backend.value,
            num_workers=num_workers,
            max_episode_steps=max_episode_steps,
            env_kwargs=arguments.env_kwargs(settings or []),
        ) as envs:
            result = evaluate_match(
                named,
                envs,
                games * len(line_ups(tuple(named), envs.agents)),
                seed=seed,
                agent_connectors=chains or None,
                explore=not best,
                confidence=confidence,
            )
        ratings = rated(result, rating.value)
        console = stdout()
        if as_json:
            print_json(standings_json(envs.spec.name, result, rating.value, ratings))
        else:
            print_standings(console, envs.spec.name, result, rating.value, ratings)
        if plot is not None:
            from marlvec.cli.display import heat_map

            with naming(f"--plot {plot}"):
                heat_map(envs.spec.name, result, rating.value, ratings).savefig(plot)
            if not as_json:
                console.print(f"Plot: {plot}", markup=False, highlight=False, soft_wrap=True)


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
