"""``marlvec play``: a person against a policy."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from marlvec.cli.console import plain_errors, settle_in, stdout
from marlvec.cli.options import Connectors, Env, Seed, Settings, Traceback

if TYPE_CHECKING:
    from marlvec.cli.game.human_policy import PlayCallback
    from marlvec.collect import Collector
    from marlvec.policies import Policy
    from marlvec.selfplay import Opponent
    from marlvec.vector import VectorEnv

__all__ = ["play", "what_plays"]

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
    from marlvec.cli.commands.serve import parts_of
    from marlvec.cli.game.game_ui import RenderedText
    from marlvec.cli.game.human_policy import AnnouncingPolicy, HumanPolicy, PlayCallback, Quit
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
    from marlvec.cli.building import build_envs
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
    from marlvec.cli.game.page_server import PageServer
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
