"""What commands do: ``rollout`` collects, ``bench`` measures backends, ``check``, lists, and ``serve``."""

from __future__ import annotations

import ast
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from marlvec.cli import arguments
from marlvec.cli.arguments import build_envs
from marlvec.cli.console import Side, did_you_mean, naming, print_json
from marlvec.cli.display import NOTHING, Rollout, fits, print_table, tracks
from marlvec.collect import Collector, SampleBatch
from marlvec.collect.callbacks import Callback
from marlvec.collect.loggers import LiveTable
from marlvec.collect.progress_bar import ProgressBar
from marlvec.connectors import ActionPipeline
from marlvec.connectors.registry import CatalogueRow
from marlvec.errors import ArgumentError, ContractError, EnvArgumentError, MissingExtraError
from marlvec.external import find_token
from marlvec.making import DEFAULT_BACKEND
from marlvec.policies import Policy
from marlvec.registry import EnvRow, resolve
from marlvec.selfplay import Opponent
from marlvec.selfplay.opponents import INDEX
from marlvec.selfplay.results import Column
from marlvec.testing import Finding, check_env
from marlvec.vector import AsyncVectorEnv, VectorEnv

_REFRESH_SECONDS = 0.1
_RECENT = 100  # episodes in the mean return beside the bar


def roll_out(
    collector: Collector, played_by: Mapping[str, str], env_steps: int, console: Console, table: LiveTable | None = None
) -> Rollout:
    """Collect env steps with a new collector whose metrics keep every episode; Ctrl-C ends it early.

    ``table`` is a callback of the collector, shown instead of the bar and closed at the end.
    """
    envs, metrics = collector.envs, collector.metrics
    samples: dict[str, SampleBatch] = {}
    rows = dict.fromkeys(collector.policies, 0)
    done, chunk, interrupted = 0, envs.num_envs, False
    began = last = perf_counter()
    shown: AbstractContextManager[object] = nullcontext() if table is None else table
    hidden = table is not None
    with shown, ProgressBar(envs.spec.name, "env steps", env_steps, console=console, disable=hidden) as bar:
        try:
            while done < env_steps:
                batch = collector.collect(env_steps=min(chunk, env_steps - done))
                done += batch.env_steps
                for name, part in batch.items():
                    rows[name] += len(part)
                    samples.setdefault(name, part)
                now = perf_counter()
                recent = [episode.episode_return for episode in metrics.latest(_RECENT)]
                note = f"team return {np.mean(recent):.4g}" if recent else ""
                speed = (metrics.env_steps - metrics.env_steps_lost) / (now - began)
                bar.show(min(done, env_steps), speed=speed, note=note)
                # As many steps as are done between two updates of the bar, in whole vector steps.
                rate = batch.env_steps / max(now - last, 1e-6)
                chunk = max(1, round(rate * _REFRESH_SECONDS / envs.num_envs)) * envs.num_envs
                last = now
        except KeyboardInterrupt:
            interrupted = True
    return Rollout(
        env=envs.spec.name,
        num_envs=envs.num_envs,
        agents=envs.agents,
        where=_where(envs),
        env_steps=done,
        agent_steps=sum(rows.values()),
        episodes=metrics.episodes_total,
        episodes_faulty=metrics.episodes_faulty,
        episodes_restarted=metrics.episodes_restarted,
        env_steps_lost=metrics.env_steps_lost,
        seconds=perf_counter() - began,
        speed=(metrics.env_steps - metrics.env_steps_lost) / max(last - began, 1e-6),
        samples=samples,
        rows=rows,
        players={name: tuple(agent for agent in envs.agents if played_by[agent] == name) for name in rows},
        tracks=tracks(metrics.episodes, tuple(rows), envs.num_envs),
        timers={name: timer.seconds for name, timer in metrics.timers.items()},
        interrupted=interrupted,
    )


def _where(envs: VectorEnv) -> str:
    if isinstance(envs, AsyncVectorEnv):
        return f"{envs.num_workers} worker process{'es' * (envs.num_workers > 1)}"
    return "in this process"


_ROUNDS = 7  # backends take turns, so that other load on the machine affects all of them
_CLOSE = 1.1  # factor by which a backend must be faster to be recommended over a simpler one
_SIMPLEST = ("sync", "native", "thread", "async", "pool")


@dataclass(frozen=True)
class Figures:
    """Measurements of one backend."""

    backend: str
    env_steps_per_second: float  # median over the rounds; of all envs together
    agent_steps_per_second: float
    slowest: float  # env steps a second in this round
    fastest: float
    workers: int  # processes or threads; 0 if envs run in this process


def bench(
    env: str,
    num_envs: int,
    num_workers: int | None,
    env_kwargs: Mapping[str, Any] | None,
    seconds: float,
    console: Console,
) -> tuple[list[Figures], dict[str, str]]:
    """Step an env with random actions on each backend, in turns; return figures, fastest first, and why others refuse.

    Drawing actions, starting, and the first steps with their compilation are not counted.
    """
    running: dict[str, VectorEnv] = {}
    refused: dict[str, str] = {}
    rounds = 0
    total = len(_SIMPLEST) * (_ROUNDS + 1)
    bar = ProgressBar(f"{env} × {num_envs}", "rounds", total, speed_unit="env steps", console=console)
    with ExitStack() as stack, bar:
        for backend in _SIMPLEST:
            workers = num_workers if backend in ("async", "thread") else None
            try:
                envs = build_envs(
                    env,
                    num_envs,
                    backend=backend,
                    console=console,
                    num_workers=workers,
                    copy=False,
                    env_kwargs=dict(env_kwargs or {}),
                )
            except (ArgumentError, ContractError, MissingExtraError) as error:
                refused[backend] = str(error).splitlines()[0]
                rounds += _ROUNDS + 1
                bar.show(rounds, speed=0.0)
                continue
            running[backend] = stack.enter_context(envs)
            envs.reset(seed=0)
            _stepping(envs, seconds / (2 * _ROUNDS))
            rounds += 1
            bar.show(rounds, speed=0.0)
        if not running:
            raise ArgumentError(
                f"no backend runs {env}: " + "; ".join(f"{name}: {why}" for name, why in refused.items())
            )
        rates: dict[str, list[float]] = {backend: [] for backend in running}
        for _ in range(_ROUNDS):
            for backend, envs in running.items():
                rates[backend].append(_stepping(envs, seconds / _ROUNDS))
                rounds += 1
                bar.show(rounds, speed=rates[backend][-1], note=backend)
        figures = [
            Figures(
                backend,
                median(rates[backend]),
                median(rates[backend]) * envs.agent_num,
                min(rates[backend]),
                max(rates[backend]),
                getattr(envs, "num_workers", 0),
            )
            for backend, envs in running.items()
        ]
    return sorted(figures, key=lambda one: -one.env_steps_per_second), refused


def _stepping(envs: VectorEnv, seconds: float) -> float:
    """Measure env steps a second, over at least so many seconds within `step` and two steps."""
    spent, steps = 0.0, 0
    while spent < seconds or steps < 2:
        actions = envs.random_action()
        began = perf_counter()
        envs.step(actions)
        spent += perf_counter() - began
        steps += 1
    return steps * envs.num_envs / spent


def recommended(figures: list[Figures]) -> Figures:
    """Return the simplest backend within a tenth of the fastest."""
    good = [one for one in figures if one.env_steps_per_second * _CLOSE >= figures[0].env_steps_per_second]
    return min(good, key=lambda one: _SIMPLEST.index(one.backend))


def print_bench(
    console: Console, env: str, num_envs: int, figures: list[Figures], refused: Mapping[str, str], *, as_json: bool
) -> None:
    """Print the measurements and the recommendation: a table, or one JSON object."""
    best = recommended(figures)
    if as_json:
        result = {
            "env": env,
            "num_envs": num_envs,
            "backends": [asdict(one) for one in figures],
            "refused": dict(refused),
            "recommended": best.backend,
        }
        print_json(result)
        return
    columns: list[Column] = [("backend", "left")]
    columns += [(name, "right") for name in ("env steps/s", "agent steps/s", "slowest to fastest round")]
    rows: list[list[str | Text]] = []
    for one in figures:
        name = f"{one.backend} ({one.workers} worker{'s' * (one.workers != 1)})" if one.workers else one.backend
        rows.append(
            [
                Text(name, "bold" if one is best else ""),
                f"{one.env_steps_per_second:,.0f}",
                f"{one.agent_steps_per_second:,.0f}",
                f"{one.slowest:,.0f} – {one.fastest:,.0f}",
            ]
        )
    print_table(console, Text(f"{env} × {num_envs}, step() with random actions"), columns, rows)
    for name, why in refused.items():
        console.print(f"without {name}: {why}", style="dim", markup=False, highlight=False)
    others = [one for one in figures if one is not best]
    ahead = ", ".join(f"{_times(best, one)} × {one.backend}" for one in others)
    chosen = f'make("{env}", num_envs={num_envs}, backend="{best.backend}")'
    default = "the default" if best.backend == DEFAULT_BACKEND else chosen
    console.print(
        f"Take {best.backend}: {default}" + (f"; {ahead}" if ahead else ""),
        style="green",
        markup=False,
        highlight=False,
    )


def _times(one: Figures, other: Figures) -> str:
    ratio = one.env_steps_per_second / other.env_steps_per_second
    return f"{ratio:,.1f}" if ratio < 10 else f"{ratio:,.0f}"


_COLUMNS: tuple[Column, ...] = (
    ("check", "left"),
    ("where", "left"),
    ("what", "left"),
    ("expected", "left"),
    ("got", "left"),
    ("to change", "left"),
    ("seen", "left"),
)


def check(env: str, kwargs: Mapping[str, Any], *, skip: Sequence[str], progress: bool, **options: int) -> list[Finding]:
    """Check an env; a fault of its constructor's arguments is one of the command line."""
    findings = check_env(resolve(env).with_kwargs(**kwargs), skip=skip, raise_first=False, progress=progress, **options)
    for one in findings:
        if kwargs and one.where.endswith(".__init__()") and one.got.startswith("TypeError: "):
            raise EnvArgumentError(f"--set {', '.join(kwargs)}: {env} does not accept it: {one.got}")
    return findings


def print_findings(console: Console, env: str, findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print the findings: a table, or one JSON object."""
    serious = sum(one.severity == "serious" for one in findings)
    if as_json:
        print_json({"env": env, "serious": serious, "findings": [asdict(one) for one in findings]})
        return
    if not findings:
        console.print(f"{env}: nothing found", style="green", markup=False, highlight=False, soft_wrap=True)
        return
    rows: list[list[str | Text]] = [
        [
            Text(f"{one.check}: {one.severity}", "bold red" if one.severity == "serious" else "bold yellow"),
            one.where,
            one.subject,
            one.expected,
            one.got,
            one.change,
            "once" if one.times == 1 else f"{one.times:,} times",
        ]
        for one in findings
    ]
    count = f"{len(findings)} finding{'s' * (len(findings) != 1)}, {serious} serious"
    print_table(console, Text(f"{env}: {count}"), _COLUMNS, rows)


_WHERE = {
    Side.AGENT: "Agent side: between the envs and a policy",
    Side.ACTION: "Action side: between a policy and the envs",
    Side.LEARNER: "Learner side: on a finished batch",
}


def print_connectors(console: Console, rows: Sequence[CatalogueRow]) -> None:
    """Print the connectors of each side, and what each does."""
    width = max(len(row.name) for row in rows)
    for side, where in _WHERE.items():
        if mine := [row for row in rows if row.side == side]:
            table = Table(title=where, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
            table.add_column("connector", min_width=width, no_wrap=True)
            table.add_column("what it does")
            for row in mine:
                table.add_row(Text(row.name), Text(row.line.replace("``", "`")))
            console.print(table)
    count = f"{len(rows)} connectors, all" if len(rows) > 1 else "1 connector,"
    console.print(
        f"{count} in marlvec.connectors; `help(marlvec.connectors.{rows[0].name})` says more.",
        style="dim",
        markup=False,
        highlight=False,
    )


def connectors_json(rows: Sequence[CatalogueRow]) -> list[dict[str, str]]:
    """Return the connectors as JSON."""
    return [{"name": row.name, "side": str(row.side), "line": row.line} for row in rows]


def _in_order(rows: Sequence[EnvRow]) -> list[EnvRow]:
    return sorted(rows, key=lambda row: (not row.installed, row.family, row.id))


def _state(row: EnvRow) -> Text:
    if row.installed:
        return Text("yes", "green")
    return Text("no" if row.extra else "no: its package", "yellow")


def envs_json(rows: Sequence[EnvRow]) -> list[dict[str, Any]]:
    """Return the ids as JSON."""
    return [
        {"id": row.id, "family": row.family, "extra": row.extra or None, "installed": row.installed}
        for row in _in_order(rows)
    ]


def print_envs(console: Console, rows: Sequence[EnvRow], *, with_gymnasium: bool) -> None:
    """Print ids by family, their extras, and what to install for ids that lack something."""
    columns: list[Column] = [(name, "left") for name in ("env", "family", "extra", "installed")]
    cells: list[list[str | Text]] = [
        [Text(row.id), Text(row.family), Text(row.extra or NOTHING), _state(row)] for row in _in_order(rows)
    ]
    if not fits(console, columns, cells):  # drop the family, which most ids begin with
        columns, cells = [columns[0], *columns[2:]], [[row[0], *row[2:]] for row in cells]
    print_table(console, Text(), columns, cells)
    there = sum(row.installed for row in rows)
    console.print(f"{len(rows)} envs, {there} of them ready to use.", highlight=False)
    if missing := sorted({row.extra for row in rows if row.extra and not row.installed}):
        console.print(f'For the others: pip install "marlvec[{",".join(missing)}]"', style="yellow", markup=False)
    if not with_gymnasium:
        console.print(
            "Prefix and version of an id are optional: simple_spread is mpe/simple_spread_v3.\n"
            "Gymnasium's ids work too, e.g. CartPole-v1; `marlvec envs gymnasium` lists them.",
            style="dim",
            highlight=False,
        )


_PACKAGE = Path(__file__).resolve().parents[1]


def example_files(name: str | None = None) -> list[Path]:
    """Return the example scripts, or the one with this name, with or without ``.py``."""
    # They are inside the package in a wheel, beside it in a checkout.
    folder = next(folder for folder in (_PACKAGE / "examples", _PACKAGE.parent / "examples") if folder.is_dir())
    found = sorted(folder.glob("*.py"))
    if name is None:
        return found
    wanted = Path(name).name.removesuffix(".py")
    chosen = [file for file in found if file.stem == wanted]
    if not chosen:
        near = did_you_mean(wanted, (file.stem for file in found))
        raise ArgumentError(f"no example {name!r}{near}; `marlvec examples` lists all")
    return chosen


def print_examples(console: Console, files: Sequence[Path]) -> None:
    """Print the names of examples, and their subjects."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("example", no_wrap=True)
    table.add_column("what it shows")
    for file in files:
        about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        table.add_row(Text(file.stem), Text(" ".join(about.partition("\n\n")[0].split())))
    console.print(table)
    console.print(
        "`marlvec examples NAME` prints an example; --copy copies it, or all, into the folder examples.",
        style="dim",
        markup=False,
        highlight=False,
    )


def copy_examples(files: Iterable[Path], folder: Path) -> list[Path]:
    """Copy example scripts into a folder, created if missing; if one exists there, nothing is copied."""
    copies = {file: folder / file.name for file in files}
    with naming(f"--to {folder}"):
        for copy in copies.values():
            if copy.exists():
                raise ArgumentError(
                    f"--copy: {copy} exists already; move it, or copy to another folder with --to FOLDER"
                )
        folder.mkdir(parents=True, exist_ok=True)
        for file, copy in copies.items():
            copy.write_bytes(file.read_bytes())
    return list(copies.values())


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
        what, path = arguments.split_saved(text)
        if path:
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
