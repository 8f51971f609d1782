"""``marlvec arena``, ``play``, ``record-data``, ``data``, and options that commands share; imports no heavy module.

What a command needs is imported when it runs, so that ``marlvec --help`` is fast.
"""

from __future__ import annotations

import os
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from marlvec.cli.console import naming, plain_errors, print_json, settle_in, stdout, torch_within_cores

if TYPE_CHECKING:
    from marlvec.cli.game import PlayCallback
    from marlvec.collect import Collector
    from marlvec.policies import Policy
    from marlvec.recording import RecordedDataset, RecordedRows
    from marlvec.recording.recorder import Recorder
    from marlvec.selfplay import Opponent
    from marlvec.vector import VectorEnv


Backend = StrEnum("Backend", "ASYNC THREAD SYNC NATIVE POOL AUTO")  # values are the names in lower case
DEFAULT_BACKEND = Backend.ASYNC if hasattr(os, "fork") else Backend.SYNC  # as in `marlvec.making`, without importing it

Env = Annotated[
    str,
    typer.Argument(
        metavar="ENV", help="An id such as simple_spread ([b]marlvec envs[/] lists them), MODULE:ATTR or FILE.py:ATTR."
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ID=]WHAT",
        help="Who acts; may be given several times. WHAT is [b]random[/], MODULE:ATTR or FILE.py:ATTR: a marlvec "
        "Policy, or an object or class with a method act(rows), or a function from rows to actions. ID is its name in "
        "the table, by default ATTR. Without this option all agents act at random.",
    ),
]
TrainedPolicies = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ID=]WHAT[@PATH]",
        help="Who acts, as in [b]marlvec rollout[/]; PATH is its trained state: a pool of opponents (its newest), "
        "POOL/ID, or a file of save_policy(), each with the connectors in it. WHAT then also is a function that builds "
        "the policy.",
    ),
]
PolicyMapping = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PREFIX=ID",
        help="Agents whose names begin with PREFIX are played by policy ID; the longest PREFIX decides. All others "
        "are played by the first --policy.",
    ),
]
Connectors = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[ID=]CHAIN",
        help="Connectors between the envs and policy ID, or every policy: agent connectors of marlvec.connectors, "
        'e.g. "NormalizeObs(clip=5), FrameStack(4)", "RnnState(np.zeros(32))". Arguments are Python literals, '
        "[0.0] * 32, or arrays by np.zeros, np.ones, np.full and np.array. Policies from files keep the connectors "
        "that they were saved with.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An argument for the env, e.g. max_cycles=50; may be given several times."
    ),
]
NumWorkers = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Worker processes.", show_default="one per usable core")
]
MaxEpisodeSteps = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Truncate episodes after so many steps.", show_default="the env's own"),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Makes the run repeatable: envs and policies.", show_default="none"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show errors with their traceback.")]


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
    from marlvec.cli.running import parts_of
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
    from marlvec.cli.arguments import split_saved
    from marlvec.policies import RandomPolicy
    from marlvec.selfplay import Opponent

    if isinstance(player, Opponent):
        if Path(file := split_saved(text)[1]).is_file():
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


_AT_A_TIME = 4096  # env steps of a batch at most
_BATCHES = 50  # at least, for the bar


class Format(StrEnum):
    """File formats of `marlvec record-data`."""

    PARQUET = "parquet"
    ARROW = "arrow"


def record_data(
    env: Env,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FOLDER", help="The recording: a new folder. Needs marlvec\\[parquet]."),
    ],
    env_steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many steps, over all envs together.")
    ] = 100_000,
    num_envs: Annotated[int, typer.Option(min=1, metavar="N", help="How many copies of it.")] = 64,
    policy: TrainedPolicies = None,
    mapping: PolicyMapping = None,
    connectors: Connectors = None,
    settings: Settings = None,
    best: Annotated[
        bool, typer.Option("--best", help="Have policies take the best they know, and not draw their actions.")
    ] = False,
    format: Annotated[
        Format, typer.Option(metavar="NAME", help="parquet: small files; arrow: faster to write, twice the size.")
    ] = Format.PARQUET,
    append: Annotated[bool, typer.Option("--append", help="Go on with a recording of the same env.")] = False,
    backend: Annotated[
        Backend,
        typer.Option(
            metavar="NAME",
            help="Where envs run: auto, async (worker processes), thread, sync (in this process), native or pool.",
        ),
    ] = Backend.AUTO,
    num_workers: NumWorkers = None,
    seed: Seed = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    r"""Play an env, and record all policies' rows for marlvec.load_dataset().

    Ctrl-C ends the recording early, with the batches that were collected until then. [b]marlvec data[/] shows what it
    holds.

      marlvec record-data simple_spread --out runs/seek --env-steps 50000 \
        --policy examples/policies.py:seek
    """
    from marlvec.cli import arguments
    from marlvec.cli.arguments import build_envs
    from marlvec.cli.running import collector_of

    settle_in()
    with plain_errors(traceback):
        kwargs = arguments.env_kwargs(settings or [])
        notes = {"env": env, "env_kwargs": kwargs, "seed": seed, "policies": policy or ["random"]}
        with (
            build_envs(
                env, num_envs, backend=backend.value, num_workers=num_workers, copy=False, env_kwargs=kwargs
            ) as envs,
            _recorder(out, format.value, append=append, notes=notes) as recorder,
        ):
            collector = collector_of(
                envs, policy or [], mapping or [], connectors or [], explore=not best, seed=seed, callbacks=[recorder]
            )
            interrupted = _collect(collector, env_steps)
        show(out, as_json=as_json)
    if interrupted:
        raise typer.Exit(130)


def _recorder(out: Path, *arguments: Any, **options: Any) -> Recorder:
    from marlvec.recording.recorder import Recorder

    with naming(f"--out {out}"):
        return Recorder(out, *arguments, **options)


def _collect(collector: Collector, env_steps: int) -> bool:
    """Collect so many env steps under a progress bar; return whether Ctrl-C has ended it."""
    from marlvec.collect.progress_bar import ProgressBar

    collector.eval()
    at_a_time = max(1, min(_AT_A_TIME, env_steps // _BATCHES))
    console = Console(stderr=True, emoji=False)
    done = 0
    with ProgressBar(collector.envs.spec.name, "env steps", env_steps, console=console) as bar:
        try:
            while done < env_steps:
                done += collector.collect(env_steps=min(at_a_time, env_steps - done)).env_steps
                bar.show(done)
        except KeyboardInterrupt:
            return True
    return False


def data(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A recording, of marlvec record-data or Recorder.")],
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show what is in a recording: rows, episodes, returns, columns, size.

    The files are checked against the manifest as far as they are read: ids and rewards of all rows.
    """
    with plain_errors(traceback):
        show(folder, as_json=as_json)


def show(folder: Path, *, as_json: bool) -> None:
    """Print a recording's content."""
    from marlvec.recording.dataset import load_dataset

    with load_dataset(folder) as dataset:
        content = _content(dataset)
    if as_json:
        print_json(content)
    else:
        _print(stdout(), content)


def _content(dataset: RecordedDataset) -> dict[str, Any]:
    policies = [
        {"policy": name, "rows": len(rows), "files": len(rows.files), "bytes": rows.size_bytes, "columns": _forms(rows)}
        for name, rows in dataset.items()
    ]
    return {
        "folder": str(dataset.folder),
        "env": dataset.env_name,
        "agents": dataset.agents,
        "env_steps": dataset.env_steps,
        "sessions": [{"closed": session.closed, **session.about} for session in dataset.sessions],
        "closed": dataset.is_closed,
        "bytes": dataset.size_bytes,
        "episodes": _episodes(dataset),
        "policies": policies,
        "notes": dataset.notes,
    }


def _episodes(dataset: RecordedDataset) -> dict[str, Any] | None:
    """Return statistics of whole episodes; None where rows are no episodes."""
    from marlvec.errors import ArgumentError

    try:
        table = dataset.episode_table()
    except ArgumentError:
        return None
    returns, lengths = table.returns[table.whole], table.length[table.whole]
    found: dict[str, Any] = {"whole": len(returns), "parts": len(table.whole) - len(returns)}
    if len(returns):
        found |= {
            "return_mean": returns.mean(),
            "return_std": returns.std(),
            "return_min": returns.min(),
            "return_max": returns.max(),
            "length_mean": lengths.mean(),
        }
    return found


def _forms(rows: RecordedRows) -> dict[str, Any]:
    """Return each column's dtype and shape of a row, or those of a tree's leaves."""
    from marlvec.trees import tree_leaves

    found = {}
    names = rows.keys()
    for name in names:
        leaves = {path: f"{leaf.dtype} {leaf.shape[1:]}" for path, leaf in tree_leaves(rows.column(name))}
        found[name] = leaves.get("", leaves)
    return found


def _print(console: Console, content: dict[str, Any]) -> None:
    from rich.text import Text

    from marlvec.cli.display import NOTHING, print_table
    from marlvec.selfplay.results import Column

    env = f" of {content['env']}" if content["env"] else ""
    state = "" if content["closed"] else "; not closed: its recorder was killed, or still records"
    title = f"{content['folder']}{env}: {content['env_steps']:,} env steps, {_readable(content['bytes'])}{state}"
    columns: list[Column] = [("policy", "left"), ("rows", "right"), ("files", "right"), ("size", "right")]
    columns.append(("columns", "left"))
    cells: list[list[str | Text]] = [
        [
            Text(one["policy"]),
            f"{one['rows']:,}",
            f"{one['files']:,}",
            _readable(one["bytes"]),
            Text(", ".join(one["columns"])),
        ]
        for one in content["policies"]
    ]
    print_table(console, Text(title), columns, cells or [[Text(NOTHING), "0", "0", "0 B", Text(NOTHING)]])
    if (episodes := content["episodes"]) is not None:
        line = f"{episodes['whole']:,} whole episodes, parts of {episodes['parts']:,}"
        if "return_mean" in episodes:
            line += (
                f"; return {episodes['return_mean']:.4g} ± {episodes['return_std']:.3g} "
                f"({episodes['return_min']:.4g} to {episodes['return_max']:.4g}), "
                f"length {episodes['length_mean']:.4g}"
            )
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
