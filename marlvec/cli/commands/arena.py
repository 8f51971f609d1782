"""``marlvec arena``: a tournament of all players against each other."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from marlvec.cli.console import naming, plain_errors, print_json, settle_in, stdout, torch_within_cores
from marlvec.cli.options import AsJson, Backend, Connectors, Env, MaxEpisodeSteps, NumWorkers, Settings, Traceback

__all__ = ["arena"]


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
    from marlvec.cli.arguments import players as players_of
    from marlvec.cli.building import build_envs
    from marlvec.cli.display.standings import print_standings, rated, standings_json
    from marlvec.errors import ArgumentError
    from marlvec.selfplay import evaluate_match
    from marlvec.selfplay.evaluate import line_ups

    settle_in()
    with plain_errors(traceback), torch_within_cores():
        if plot is not None:
            from marlvec.cli.display.plots import check_file

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
            from marlvec.cli.display.plots import heat_map

            with naming(f"--plot {plot}"):
                heat_map(envs.spec.name, result, rating.value, ratings).savefig(plot)
            if not as_json:
                console.print(f"Plot: {plot}", markup=False, highlight=False, soft_wrap=True)
