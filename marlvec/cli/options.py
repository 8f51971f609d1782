"""Options that several commands share."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_BACKEND",
    "AsJson",
    "Backend",
    "Connectors",
    "Env",
    "PolicyMapping",
    "MaxEpisodeSteps",
    "NumWorkers",
    "Policies",
    "Seed",
    "Settings",
    "Side",
    "Traceback",
    "TrainedPolicies",
]


Backend = StrEnum("Backend", "ASYNC THREAD SYNC NATIVE POOL AUTO")  # values are the names in lower case
DEFAULT_BACKEND = Backend.ASYNC if hasattr(os, "fork") else Backend.SYNC  # as in `marlvec.making`, without importing it
Side = StrEnum("Side", "AGENT ACTION LEARNER")

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
