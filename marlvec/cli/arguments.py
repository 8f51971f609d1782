"""Parses command-line texts (policies, mappings, connectors, arguments of envs), and builds envs from them."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import marlvec.connectors as all_connectors
from marlvec.arguments import signature_of
from marlvec.cli.console import did_you_mean, naming
from marlvec.connectors import AgentConnector, AgentPipeline, Pipeline
from marlvec.envs.recipes import load_file
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError
from marlvec.making import make
from marlvec.native.catalog import native_entry
from marlvec.policies import Policy, PolicyLike, RandomPolicy, as_policy
from marlvec.registry import resolve
from marlvec.selfplay import Opponent, read_opponents
from marlvec.selfplay.opponents import INDEX, MakePolicy
from marlvec.serialization.values import outline
from marlvec.vector import VectorEnv

_ID = r"([\w.-]+)="
_SAVED = r"(.*?:[^\W\d][\w.]*|(?:[\w./-]+=)?random)@(.*)"  # files and folders may have an @ in their names
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def policies(texts: Sequence[str]) -> dict[str, Policy]:
    """Return the policies of options ``--policy [ID=]WHAT``, in their order."""
    found: dict[str, Policy] = {}
    for text in texts:
        name, what = policy_id(text)
        if split_saved(what)[1]:
            raise ArgumentError(
                f"--policy {text}: this command takes policies without saved weights; `marlvec record`, `record-data`, "
                f"`play`, `arena` and `serve` take MAKE@FILE and MAKE@FOLDER"
            )
        if name in found:
            raise ArgumentError(f"--policy {text}: there are two policies {name!r}; give one another id: ID={what}")
        found[name] = RandomPolicy() if what == "random" else _policy(text, load(text, what))
    return found


def split_saved(text: str) -> tuple[str, str]:
    """Split ``WHAT@PATH`` behind ``random`` or the attribute that ``WHAT`` ends with; the path is "" where none is."""
    match = re.match(_SAVED, text)
    return (match[1], match[2]) if match else (text, "")


def policy_id(text: str) -> tuple[str, str]:
    """Split ``[ID=]WHAT`` into a policy's id and ``WHAT``; the default id is the last part of ``WHAT``."""
    match = re.match(_ID, text)
    what = text[match.end() :] if match else text
    return match[1] if match else what.rpartition(":")[2], what


def refuse_state_of_random(text: str, what: str) -> None:
    """Raise `ArgumentError` for ``random@PATH``."""
    if what == "random":
        raise ArgumentError(f"--policy {text}: random moves have no state; write {split_saved(text)[0]}, without @")


def load(text: str, what: str) -> Any:
    """Import the object of ``module:attr`` or ``file.py:attr``; errors name the argument ``text``."""
    source, colon, path = what.rpartition(":")
    if not colon or not source or not path or (source.startswith(".") and not source.endswith(".py")):
        raise ArgumentError(f"--policy {text}: expected random, MODULE:ATTR or FILE.py:ATTR, optionally after ID=")
    try:
        found: Any = load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except MarlvecError:  # of the imported code
        raise
    except (ModuleNotFoundError, OSError, SyntaxError) as error:
        raise ArgumentError(f"--policy {text}: cannot import {source} ({error})") from error
    for part in path.split("."):
        if not hasattr(found, part):
            near = did_you_mean(part, (name for name in vars(found) if not name.startswith("_")))
            raise ArgumentError(f"--policy {text}: {source} has no {path!r}{near}")
        found = getattr(found, part)
    return found


def _policy(text: str, found: Any) -> Policy:
    if isinstance(found, type):
        if not callable(getattr(found, "act", None)):
            raise ArgumentError(f"--policy {text}: expected a policy, but {found.__name__} has no method act(rows)")
        if needed := _needed(found):
            raise ArgumentError(
                f"--policy {text}: {found.__name__} needs the arguments {needed}; name an instance instead"
            )
        found = found()
    return as_policy(found, f"--policy {text}: it")


def _needed(function: Any) -> list[str]:
    """List the arguments without which a function or class cannot be called."""
    return [
        name
        for name, parameter in signature_of(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _takes_any(function: Any) -> bool:
    """Return whether a function takes any number of arguments, as torch modules do: it may be a function of rows."""
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature_of(function).parameters.values())


def _builder(text: str, name: str, found: Any) -> MakePolicy:
    """Return a function that builds the policy, without its weights, of ``FILE.py:WHAT@FILE``.

    ``WHAT`` is a policy, copied at each call, or its class; a function that builds it, which needs no arguments; a dict
    of such functions, with the player's id; or a function of rows.
    """
    if isinstance(found, Mapping):
        if name not in found and len(found) != 1:
            raise ArgumentError(f"{text}: choose which policy of {list(found)} the file is of: write ID=… before it")
        found = found[name] if name in found else next(iter(found.values()))
    if isinstance(found, type):
        return partial(_policy, text, found)
    if callable(getattr(found, "act", None)):
        return partial(_copied, text, found)
    try:
        builds = callable(found) and not _needed(found) and not _takes_any(found)
    except (ValueError, TypeError):  # a function written in C
        builds = False
    return found if builds else partial(as_policy, found, f"{text}: it", also=", or a function that builds one")


def _copied(text: str, policy: PolicyLike) -> PolicyLike:
    """Copy a policy, since other players may use the same object with other weights."""
    try:
        return copy.deepcopy(policy)
    except Exception as error:  # user code may raise anything
        raise ArgumentError(
            f"{text}: {policy!r:.200} cannot be copied ({error!r:.200}); name its class, or a function that builds it"
        ) from error


def assign_policies(
    named: Mapping[str, Policy], texts: Sequence[str], agents: Sequence[str], groups: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Policy], dict[str, str]]:
    """Return all policies, and who plays which agent, from options ``--mapping PREFIX=ID``.

    Without policies agents act at random, with one policy per group.
    """
    if not named:
        if texts:
            raise ArgumentError(f"--mapping {texts[0]}: expected a --policy to assign, got none")
        if len(groups) == 1:
            return {"random": RandomPolicy()}, dict.fromkeys(agents, "random")
        return (
            {group: RandomPolicy() for group in groups},
            {agents[a]: group for group, members in groups.items() for a in members},
        )
    chosen: dict[str, str] = {}
    for text in texts:
        prefix, equals, policy_id = text.rpartition("=")
        if not equals or not prefix:
            raise ArgumentError(f"--mapping {text}: expected PREFIX=ID, e.g. agent_2={next(iter(named))}")
        if policy_id not in named:
            raise ArgumentError(f"--mapping {text}: no policy {policy_id!r}; the policies are {list(named)}")
        if not any(agent.startswith(prefix) for agent in agents):
            raise ArgumentError(
                f"--mapping {text}: no agent's name begins with {prefix!r}; the agents are {list(agents)}"
            )
        if chosen.setdefault(prefix, policy_id) != policy_id:
            raise ArgumentError(f"--mapping: {prefix}= is given twice, for {chosen[prefix]!r} and {policy_id!r}")
    first = next(iter(named))
    played_by = {}
    for agent in agents:
        prefix = max((prefix for prefix in chosen if agent.startswith(prefix)), key=len, default="")
        played_by[agent] = chosen.get(prefix, first)
    idle = [name for name in named if name not in played_by.values()]
    if idle:
        raise ArgumentError(
            f"policy {idle[0]!r} plays no agent; give it some with --mapping PREFIX={idle[0]}; "
            f"the agents are {list(agents)}"
        )
    return dict(named), played_by


def connectors(
    texts: Sequence[str], policy_ids: Sequence[str]
) -> list[AgentConnector] | dict[str, list[AgentConnector]]:
    """Return the chains of options ``--connectors [ID=]CHAIN``: one for all policies, or policy id to chain."""
    found: dict[str, list[AgentConnector]] = {}
    for text in texts:
        match = re.match(_ID, text)
        name = match[1] if match else ""
        if match and name not in policy_ids:
            raise ArgumentError(f"--connectors {text}: no policy {name!r}; the policies are {list(policy_ids)}")
        if name in found or (found and "" in (name, *found)):
            raise ArgumentError(f"--connectors {text}: give one chain for all policies, or one per policy as ID=CHAIN")
        found[name] = _chain(text, text[match.end() :] if match else text)
    return found.get("", found)


def given_connectors(
    texts: Sequence[str], named: Mapping[str, Policy | Opponent], *, skip_saved: bool = False
) -> dict[str, list[AgentConnector]]:
    """Return the chains of options ``--connectors`` by player, for players that were saved without connectors.

    A chain for a player that has its own must be equal to it; ``skip_saved``: a chain for all players may differ.
    """
    given, chains = connectors(texts, tuple(named)), dict[str, list[AgentConnector]]()
    for name, player in named.items():
        chain = given.get(name) if isinstance(given, dict) else copy.deepcopy(given)
        if not chain:
            continue
        if not isinstance(player, Opponent) or player.files[1] is None:
            chains[name] = chain
        elif isinstance(given, dict) or not skip_saved:
            own = player.agent_connectors()
            if outline(own.to_config()["pieces"]) != outline(AgentPipeline(chain).to_config()["pieces"]):
                raise ArgumentError(
                    f"--connectors: {name} was saved with its own connectors, {own!r:.300}; leave the option out, or "
                    f"use ID=CHAIN for others"
                )
    return chains


def _chain(text: str, chain: str) -> list[AgentConnector]:
    problem = f"--connectors {text}: expected names or calls such as FlattenObs, FrameStack(4)"
    try:
        items = ast.parse(f"[{chain}]", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        raise ArgumentError(problem) from None
    assert isinstance(items, ast.List)  # `[…]` parses to a list or a comprehension; the latter has no names
    return [_connector(text, item, problem) for item in items.elts]


def _connector(text: str, item: ast.expr, problem: str) -> AgentConnector:
    call = item if isinstance(item, ast.Call) else ast.Call(item, [], [])
    if not isinstance(call.func, ast.Name):
        raise ArgumentError(problem)
    name = call.func.id
    known = [key for key in all_connectors.__all__ if _is_connector(getattr(all_connectors, key))]
    if name not in known:
        raise ArgumentError(
            f"--connectors {text}: no agent connector {name!r}{did_you_mean(name, known)}; "
            "`marlvec connectors --side agent` lists them"
        )
    try:
        positional = [_value(argument) for argument in call.args]
        keyword = {argument.arg or "": _value(argument.value) for argument in call.keywords}
        made: AgentConnector = getattr(all_connectors, name)(*positional, **keyword)
    except RecursionError:
        raise ArgumentError(problem) from None
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"--connectors {text}: {ast.unparse(item)}: {error}") from error
    return made


_MOST = 1_000_000  # numbers in an argument
_ARRAYS = {
    "array": ("object", "dtype"),
    "full": ("shape", "fill_value", "dtype"),
    "ones": ("shape", "dtype"),
    "zeros": ("shape", "dtype"),
}


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, ``[0.0] * 32``, or ``np.zeros(32)`` and the like; executes nothing else.

    Raises:
        ValueError: Another expression, or more than a million numbers.
    """
    match node:
        case ast.List(elts=items):
            return _bounded([_value(item) for item in items])
        case ast.Tuple(elts=items):
            return _bounded(tuple(_value(item) for item in items))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return _bounded({ast.literal_eval(key): _value(item) for key, item in pairs if key is not None})
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            if isinstance(value := _value(inner), (int, float, complex, np.ndarray)):
                return -value
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            items, times = _value(left), _value(right)
            if type(items) is int:
                items, times = times, items
            if isinstance(items, (list, tuple)) and type(times) is int and times >= 0:
                if _size(items) * times > _MOST:
                    raise ValueError(f"{ast.unparse(node)} has more than {_MOST:,} numbers")
                return items * times
        case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="inf" | "nan" | "pi" as name):
            return getattr(np, name)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=name)) if name in _ARRAYS:
            return _array(node, name)
        case ast.Constant() | ast.Set() | ast.BinOp() | ast.UnaryOp():
            with suppress(ValueError):
                return ast.literal_eval(node)
        case _:
            pass
    raise ValueError(
        f"expected a Python literal, [0.0] * 32, np.zeros(…), np.ones(…), np.full(…) or np.array(…), "
        f"got {ast.unparse(node)}"
    )


def _array(call: ast.Call, name: str) -> NDArray[Any]:
    """Return the array of ``np.zeros(…)``, ``np.ones(…)``, ``np.full(…)`` or ``np.array(…)``."""
    parameters, what = _ARRAYS[name], ast.unparse(call)
    options = [(option.arg, option.value) for option in call.keywords]
    nodes = [*zip(parameters, call.args, strict=False), *options]
    given = dict(nodes)
    if len(call.args) > len(parameters) or len(given) < len(nodes) or not given.keys() <= set(parameters):
        raise ValueError(f"{what}: expected np.{name}({', '.join(parameters)})")
    values = {key: _dtype(node) if key == "dtype" else _value(node) for key, node in given.items() if key is not None}
    shape = values.get("shape", ())
    lengths = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(length) is int and length >= 0 for length in lengths):
        raise ValueError(f"{what}: expected a length, or a tuple of lengths, as shape, got {shape!r:.200}")
    if math.prod(lengths) > _MOST:
        raise ValueError(f"{what} has more than {_MOST:,} numbers")
    array: NDArray[Any] = getattr(np, name)(**values)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what}: expected an array of numbers, got dtype {array.dtype}")
    return _bounded(array)


def _dtype(node: ast.expr) -> np.dtype[Any]:
    """Return the dtype of ``np.float32``, ``"float32"`` or ``float``."""
    match node:
        case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr=name) | ast.Name(id=name) | ast.Constant(value=name):
            with suppress(TypeError, ValueError, SyntaxError):
                if isinstance(name, str) and (dtype := np.dtype(name)).kind in "biuf":
                    return dtype
        case _:
            pass
    raise ValueError(f"expected a dtype of numbers such as np.float32, got {ast.unparse(node)}")


def _size(value: Any) -> int:
    """Count the numbers, texts and so on in a value."""
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return int(value.size) if isinstance(value, np.ndarray) else 1


V = TypeVar("V")


def _bounded(value: V) -> V:
    if _size(value) > _MOST:
        raise ValueError(f"an argument has more than {_MOST:,} numbers")
    return value


def _is_connector(value: Any) -> bool:
    return (
        inspect.isclass(value)
        and issubclass(value, AgentConnector)
        and not issubclass(value, Pipeline)
        and not inspect.isabstract(value)
        and not value.__name__.startswith("Function")
    )


def env_kwargs(texts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of options ``--set KEY=VALUE``: values are Python literals, or plain text."""
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ArgumentError(f"--set {text}: expected KEY=VALUE, e.g. max_cycles=50")
        if key in found:
            raise ArgumentError(f"--set {text}: {key} is given twice")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = _WORDS.get(value.lower(), value)
    return found


_PLAYER_ID = r"([\w./-]+)="


def players(texts: Sequence[str]) -> dict[str, Policy | Opponent]:
    """Return the players of arguments ``[ID=]WHAT``, in their order; ``WHAT`` ending in ``/*`` is several players.

    A player with saved weights and without ID is called ``FOLDER/NAME`` (of a pool) or ``FILE/NAME`` if another player
    has its name.
    """
    named = [(text, name, player) for text in texts for name, player in _players(text).items()]
    times = Counter(name for _, name, _ in named)
    found: dict[str, Policy | Opponent] = {}
    for text, name, player in named:
        what, path = split_saved(text)
        if times[name] > 1 and isinstance(player, Opponent) and re.match(_PLAYER_ID, what) is None:
            name = f"{Path(path).stem if Path(path).is_file() else _pool_folder(Path(path))}/{name}"
        if name in found:
            raise ArgumentError(f"{text}: there are two players {name!r}; give one another id: ID={text}")
        found[name] = player
    return found


def one_player(text: str) -> tuple[str, Policy | Opponent]:
    """Return the id and the player of ``[ID=]WHAT``."""
    found = players([text])
    if len(found) != 1:
        raise ArgumentError(f"{text}: expected one player, got {len(found)}: {list(found)}")
    return next(iter(found.items()))


def _players(text: str) -> dict[str, Policy | Opponent]:
    what, path = split_saved(text)
    if not path:
        return dict(policies([text]))
    match = re.match(_PLAYER_ID, what)
    what = what[match.end() :] if match else what
    refuse_state_of_random(text, what)
    with naming(f"pool or file {path}"):
        is_file = Path(path).is_file()
    if is_file:
        name = match[1] if match else policy_id(what)[0]
        return {name: Opponent.from_file(path, _builder(text, name, load(text, what)), opponent_id=name)}
    opponents = _opponents(text, what, Path(path))
    if match is None:
        return dict(opponents)
    if path.endswith("*"):
        return {f"{match[1]}/{name}": one for name, one in opponents.items()}
    (only,) = opponents.values()
    return {match[1]: only}


def _pool_folder(path: Path) -> Path:
    """Return the pool's folder in a path, which may end with an opponent's id or ``*``."""
    with naming(f"pool {path}"):
        return path if (path / INDEX).exists() else path.parent


def _opponents(text: str, what: str, path: Path) -> dict[str, Opponent]:
    """Return the newest opponent of a pool's folder, or the one, or all, that the path names."""
    folder = _pool_folder(path)
    wanted = None if folder == path else path.name
    if not (folder / INDEX).exists():
        raise ArgumentError(
            f"{text}: expected a pool of opponents, found none in {path} or {path.parent}, or a file of save_policy()"
        )
    make = load(text, what)
    if not callable(make) and not isinstance(make, Mapping):
        raise ArgumentError(f"{text}: expected a function that builds the policy, or a dict, before @, got {make!r}")
    try:
        opponents = read_opponents(folder, make)
    except CheckpointError as error:
        error.add_note(f"while {text} was looked up")
        raise
    if not opponents:
        raise ArgumentError(f"{text}: expected an opponent, but the pool is empty")
    if wanted == "*":
        return opponents
    name = next(reversed(opponents)) if wanted is None else wanted
    if name not in opponents:
        raise ArgumentError(f"{text}: no opponent {name!r} in {folder}; the opponents are {', '.join(opponents)}")
    return {name: opponents[name]}


def build_envs(env: str, num_envs: int, *, backend: str, console: Console | None = None, **options: Any) -> VectorEnv:
    """Build envs as `make` does; print a line, to stderr by default, if they are compiled: it takes seconds, once."""
    compiled = backend in ("auto", "native") and native_entry(resolve(env).entry.id) is not None
    with _announcing_compilation(env, console) if compiled else nullcontext():
        return make(env, num_envs, backend=backend, **options)


@contextmanager
def _announcing_compilation(env: str, console: Console | None) -> Iterator[None]:
    try:
        from numba.core import event
    except ImportError:  # make() raises, or takes another backend
        yield
        return
    console = Console(stderr=True, emoji=False) if console is None else console
    began: list[float] = []

    def on_start(self: object, what: object) -> None:
        if not began:
            began.append(perf_counter())
            console.print(f"compiling {env} for this machine, once; this time is not counted …", highlight=False)

    # numba reports compilation, not loading from disk.
    listener = type("Listener", (event.Listener,), {"on_start": on_start, "on_end": lambda self, what: None})()
    with event.install_listener("numba:compile", listener):
        yield
    if began:
        console.print(f"compiled in {perf_counter() - began[0]:.0f} s, and cached on disk", highlight=False)
