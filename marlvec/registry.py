"""Names of envs: from whatever stands for an env to the factory that builds it, and to many of them at once."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import gymnasium

from marlvec.arguments import whole_number
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.making.catalog import ENVPOOL, catalog, envpool_entry, gymnasium_entry
from marlvec.envs.making.factory import EnvEntry, EnvFactory
from marlvec.envs.making.recipe import EnvKwargs, RenderModes, Wrapper, write_recipes
from marlvec.errors import AlreadyRegisteredError, ArgumentError, EnvArgumentError, RegistryError, UnknownEnvError
from marlvec.vector.async_ import AsyncVectorEnv
from marlvec.vector.engine import SettingsArguments
from marlvec.vector.native import is_exact, make_native
from marlvec.vector.pool import make_pool
from marlvec.vector.restarts import RestartLimit
from marlvec.vector.sync import SyncVectorEnv
from marlvec.vector.thread import ThreadVectorEnv
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.worker import WorkerLink

__all__ = ["EnvEntry", "EnvFactory", "EnvRow", "listing", "make", "register", "resolve", "resolve_all"]

_ID = re.compile(r"[\w.-]+(/[\w.-]+)*")
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_VERSION = re.compile(r"(.+)[_-]v(\d+)")
_GYMNASIUM = "gymnasium/"
# What other libraries call an argument of make() by a name that does not come near.
_SYNONYMS = {"env_num": "num_envs", "asynchronous": "backend", "vectorization_mode": "backend"}

EnvLike = str | Callable[..., Any] | EnvFactory
"""What stands for an env: a registered id, ``"module:attr"``, a class, a factory."""

_entries: dict[str, EnvEntry] = {entry.id: entry for entry in catalog()}


class EnvRow(NamedTuple):
    """One row of `listing`."""

    id: str
    family: str
    extra: str | None
    installed: bool


def make(
    env: EnvLike | Sequence[EnvLike],
    num_envs: int | None = None,
    *,
    backend: str = "async",
    num_workers: int | None = None,
    autoreset_mode: str = "same_step",
    done_on: str = "all",
    copy: bool = True,
    wrappers: Wrapper | Sequence[Wrapper] = (),
    max_episode_steps: int | None = None,
    pad: bool = False,
    grouped: bool = False,
    render_mode: RenderModes = None,
    state: bool = False,
    spaces: str = "equal",
    context: Any = None,
    shared_memory: bool | str = True,
    daemon: bool = True,
    worker: Callable[[WorkerLink], None] | None = None,
    step_timeout: float | None = None,
    on_fault: str = "raise",
    max_restarts: int | RestartLimit = 10,
    validate: str = "sample",
    env_kwargs: EnvKwargs = None,
    **kwargs: Any,
) -> VectorEnv:
    """Build many envs at once.

    Args:
        env: What to build: a registered id (``"simple_spread"``, ``"mpe/simple_spread_v3"``,
            ``"pettingzoo/classic/connect_four_v3"``, ``"CartPole-v1"``, ``"envpool/Pong-v5"``), ``"module:attr"``, an
            env class, a factory, or a list with one of these per env. A factory that declares an argument ``env_index``
            or ``num_envs`` is told.
        num_envs: N; default 1, or the length of the list.
        backend: ``"async"``: worker processes that write into shared memory; ``"thread"``: worker threads, for envs
            that release the interpreter lock; ``"sync"``: all envs in this process; ``"native"``: compiled worlds in
            this process, for envs that have them (docs/native.md); ``"pool"``: one object that holds all envs, e.g.
            ``gymnasium.make_vec``'s (docs/interop.md), and the only one for EnvPool's ids, so leave it out there;
            ``"auto"``: native where that has the same numbers bit for bit, is installed and supports all that is asked
            for, else async.
        num_workers: Worker processes or threads; default: one per core that this process may use, by its affinity and
            the quota of its container, at most one per env.
        autoreset_mode: What happens when an env's episode ends. ``"same_step"``: the next one begins at once, the step
            returns its first observation, and ``infos["final_observation"]`` the last one; ``"next_step"``: the next
            step begins it, ignoring the action, and ``infos["reset_mask"]`` marks that row; ``"disabled"``: nothing,
            ``reset(env_ids=…)`` begins it. Envs that declare that they reset themselves take ``"same_step"`` only.
        done_on: ``"all"``: an episode is over when its last agent has ended, by termination or truncation; ``"any"``:
            when the first has; agents still alive are truncated then.
        copy: Return copies; False for read-only views, valid until the next call that steps.
        wrappers: Applied to every env, first one innermost: classes or functions from env to env. One that declares an
            argument ``env_index`` or ``num_envs`` is told.
        max_episode_steps: Truncate the agents that are still alive after so many steps of their env; in a turn-based
            env a step is one move. Takes the place of the limit that Gymnasium registers with its envs; limits that
            other envs have of their own stay.
        pad: Make one group of agents whose spaces differ in size: observations get zeros at the end of each axis,
            Discrete actions an action mask. Spaces that do not fit one another raise.
        grouped: Give observations and actions as dicts of groups also where all agents are alike.
        render_mode: For the envs' constructors: one mode for all; ``"single_rgb_array"`` (``"single_"`` and any mode)
            for a renderer in env 0 alone; or a list of one mode or None per env.
        state: Bring the envs' global state with every reset and step, as ``infos["state"]`` and
            ``infos["final_state"]``; they must have a ``state_space``.
        spaces: ``"equal"``: all envs have the same spaces; ``"compatible"``: the bounds of their Boxes may differ, and
            the vectorizer's spaces have the widest.
        context: Start method of worker processes: ``"forkserver"`` (default), ``"spawn"``, ``"fork"``, or a
            multiprocessing context.
        shared_memory: False sends rows through pipes; ``"require"`` refuses spaces of which a leaf has no fixed size
            and would have to go through one.
        daemon: Whether worker processes that nobody closed get a second to close their envs at the interpreter's exit
            (True), or the time they need (False).
        worker: A function to run in worker processes in place of their own loop; see `marlvec.vector.worker.serve`.
        step_timeout: Seconds that one env may take for a step or a reset before it counts as hung, and its worker
            process is killed. None: as long as it wants. Noticed while a call waits.
        on_fault: What becomes of an env that raises, hangs or takes its worker along. ``"raise"``: the call raises.
            ``"restart"``: it is built anew (all envs of the worker, if that is gone), and seeded by `restart_seed`; its
            episode is lost, and the row of its next result tells so: ``infos["fault"]``, truncated, without final
            observation. ``"mask"``: its row tells so likewise, and from then on nobody is alive in it.
        max_restarts: How many restarts of one env, or of one worker, are too many: a count within a minute, or a
            `RestartLimit`. Then the call raises.
        validate: How often values are checked: ``"strict"``: in every call; ``"sample"``: in the first ones and now and
            then after that; ``"warn"``: in every call, with a warning where strict raises; ``"off"``: never. Shapes and
            dtypes always are.
        env_kwargs: Keyword arguments for the envs: one dict, or one per env. Goes over ``kwargs``, and takes those
            whose names `make` itself uses.
        kwargs: Keyword arguments for every env. They reach it, or raise.

    Returns:
        A `VectorEnv`; a context manager.

    Raises:
        UnknownEnvError: No such id; lists those that come near.
        ArgumentError: An argument is wrong, and nothing was started; or an env does not support ``render_mode``,
            ``state`` or ``autoreset_mode``, and nothing is left running.
        MissingExtraError: The env needs a package that is not installed; names the extra.
        ContractError: Something is no env; the envs' spaces differ; or their agents' cannot be padded.
        EnvArgumentError: An env refused its arguments.
        EnvRaised: An env's constructor raised; names the env, with its traceback. Nothing is left running.
        ResourceError: The machine has not enough memory, processes or file descriptors. Nothing is left running.
        UnsupportedSpaceError: A leaf cannot be in shared memory, and that was required.
    """
    recipes = write_recipes(
        resolve_all(env, num_envs),
        kwargs=kwargs,
        env_kwargs=env_kwargs,
        wrappers=wrappers,
        render_mode=render_mode,
        max_episode_steps=max_episode_steps,
        pad=pad,
    )
    settings: SettingsArguments = {
        "autoreset_mode": autoreset_mode,
        "done_on": done_on,
        "copy": copy,
        "grouped": grouped,
        "validate": validate,
        "state": state,
        "spaces": spaces,
        "on_fault": on_fault,
        "max_restarts": max_restarts,
    }
    processes = (
        ("context", context, None),
        ("shared_memory", shared_memory, True),
        ("daemon", daemon, True),
        ("worker", worker, None),
        ("step_timeout", step_timeout, None),
    )
    if recipes[0].factory.entry.family == ENVPOOL:
        if backend not in ("async", "auto", "pool"):
            raise ArgumentError(f"backend={backend!r}: EnvPool's envs run in threads of its own; leave it out")
        backend = "pool"
    if backend == "auto":
        asks_for_processes = any(value != default for _, value, default in processes)
        backend = "async" if asks_for_processes or not is_exact(recipes) else "native"
    with _suggesting(kwargs):
        if backend == "async":
            return AsyncVectorEnv(
                recipes,
                num_workers=num_workers,
                context=context,
                shared_memory=shared_memory,
                daemon=daemon,
                worker=worker,
                step_timeout=step_timeout,
                **settings,
            )
        if backend not in ("sync", "thread", "native", "pool"):
            raise ArgumentError(
                f"backend must be 'async', 'thread', 'sync', 'native', 'pool' or 'auto', got {backend!r}"
            )
        for name, value, default in processes:
            if value != default:
                raise ArgumentError(f"{name}={value!r} is for worker processes; backend={backend!r} has none")
        if backend == "native":
            return make_native(recipes, num_workers, settings)
        if backend == "thread":
            return ThreadVectorEnv(recipes, num_workers=num_workers, **settings)
        if num_workers is not None:
            raise ArgumentError(f"num_workers={num_workers!r} is for workers; backend={backend!r} has none")
        return make_pool(recipes, settings) if backend == "pool" else SyncVectorEnv(recipes, **settings)


def register(
    id: str,
    entry_point: str | Callable[..., Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    extra: str | None = None,
    overwrite: bool = False,
) -> EnvEntry:
    """Give an env a name that `make` knows.

    Args:
        id: ``"name"``, ``"name_v1"`` or ``"namespace/name_v1"``. Without version it then stands for the highest one.
        entry_point: What builds the env: a class, a factory, or ``"module:attr"``, imported only where it is built.
        kwargs: Defaults for its keyword arguments; copied now, and again for each env.
        extra: The extra of marlvec that brings what it needs, for the message if that is missing.
        overwrite: Whether it may replace an env of the same id.

    Returns:
        The entry.

    Raises:
        AlreadyRegisteredError: The id is taken.
        ArgumentError: The id or entry point is malformed.
    """
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise ArgumentError(f"expected an env id such as 'name', 'name_v1' or 'namespace/name_v1', got {id!r}")
    if isinstance(entry_point, str):
        if not _ENTRY_POINT.fullmatch(entry_point):
            raise ArgumentError(f"env {id!r}: expected an entry point 'module:attr', got {entry_point!r}")
    elif not callable(entry_point):
        got = type(entry_point).__name__
        raise ArgumentError(f"env {id!r}: expected a class, a factory or 'module:attr' as entry point, got {got}")
    if id in _entries and not overwrite:
        raise AlreadyRegisteredError(f"env {id!r} is registered already; pass overwrite=True to replace it")
    entry = EnvEntry(id, entry_point, deepcopy(dict(kwargs or {})), extra=extra)
    _entries[id] = entry
    return entry


def resolve(env: EnvLike) -> EnvFactory:
    """Find the factory that an id, ``"module:attr"``, class or callable stands for; nothing is imported or built.

    An id may leave out its namespace and its version: ``"simple_spread"`` is the highest version of
    ``"mpe/simple_spread_v3"``. Gymnasium's ids are known with and without ``"gymnasium/"``.

    Raises:
        UnknownEnvError: No such id; lists those that come near.
        RegistryError: More than one env has this name.
        ArgumentError: It stands for no env, e.g. because it is one.
    """
    if isinstance(env, EnvFactory):
        return env
    if isinstance(env, str):
        return EnvFactory(_entry_point(env) if ":" in env and not env.startswith(_GYMNASIUM) else _find(env))
    if isinstance(env, MultiAgentEnv) or (callable(getattr(env, "step", None)) and not isinstance(env, type)):
        name = type(env).__name__
        raise ArgumentError(
            f"got an env of class {name}, expected something that builds envs, e.g. lambda: {name}(): each of the "
            f"num_envs is built where it runs. Pass the class, or a function without arguments that returns a new env"
        )
    if callable(env):
        return EnvFactory(EnvEntry(getattr(env, "__qualname__", type(env).__name__), env))
    raise ArgumentError(f"expected an env id, 'module:attr', a class or a factory, got {type(env).__name__}: {env!r}")


def resolve_all(env: EnvLike | Sequence[EnvLike], num_envs: int | None = None) -> tuple[EnvFactory, ...]:
    """Find one factory per env.

    Args:
        env: One for all, or a list with one for each.
        num_envs: How many; None: 1, or the length of the list.

    Raises:
        ArgumentError: The list is empty, or its length is not ``num_envs``; or as `resolve`.
        UnknownEnvError, RegistryError: As `resolve`.
    """
    count = 1 if num_envs is None else whole_number(num_envs)
    if count is None:
        example = num_envs if isinstance(num_envs, str) and num_envs.isdecimal() else 16
        raise ArgumentError(
            f"num_envs: expected a whole number of at least 1, got {num_envs!r}, a {type(num_envs).__name__}; "
            f"write num_envs={example}"
        )
    if isinstance(env, (list, tuple)):
        if not env:
            raise ArgumentError("expected at least one env, got an empty list")
        if num_envs is not None and count != len(env):
            raise ArgumentError(f"num_envs={num_envs}, but {len(env)} factories were given; leave num_envs out")
        return tuple(resolve(one) for one in env)
    if isinstance(env, Sequence) and not isinstance(env, str):
        raise ArgumentError(f"expected a list of factories, got {type(env).__name__}")
    if count < 1:
        raise ArgumentError(f"num_envs: expected at least 1, got {num_envs!r}")
    return (resolve(env),) * count


@contextmanager
def _suggesting(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Where an env does not take one of these arguments, say which of `make`'s own was meant, if one comes near."""
    try:
        yield
    except EnvArgumentError as error:
        head, *rest = error.args[0].split("\n", 1)
        own = [
            name
            for name, parameter in inspect.signature(make).parameters.items()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        for name in kwargs:
            near = _SYNONYMS.get(name) or next(iter(difflib.get_close_matches(name, own, n=1, cutoff=0.7)), None)
            if near and repr(name) in head:
                head += f". Did you mean make(…, {near}=…)? What make() does not know goes to the env"
        error.args = ("\n".join([head, *rest]),)
        raise


def listing(*, with_gymnasium: bool = False) -> list[EnvRow]:
    """Every env that `make` knows, and whether what it needs is installed. Imports none of it.

    Args:
        with_gymnasium: Whether to list Gymnasium's own envs too.
    """
    entries = list(_entries.values())
    if with_gymnasium:
        entries += map(gymnasium_entry, _gymnasium_ids())
    return [EnvRow(e.id, e.family, e.extra, all(map(_is_installed, _packages(e)))) for e in entries]


def _packages(entry: EnvEntry) -> tuple[str, ...]:
    if entry.packages or not isinstance(entry.entry_point, str):
        return entry.packages
    return (entry.entry_point.partition(":")[0].partition(".")[0],)


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _entry_point(text: str) -> EnvEntry:
    """Entry of a ``"module:attr"``; what can be seen to be wrong without importing it is refused here."""
    if not _ENTRY_POINT.fullmatch(text):
        raise ArgumentError(f"expected 'module:attr' (e.g. 'my_package.envs:MyEnv'), got {text!r}")
    module, _, attribute = text.partition(":")
    if module == "__main__":
        # A worker has another main module, so what it names is fetched here, and travels as it is.
        found = getattr(sys.modules["__main__"], attribute, None)
        if not callable(found):
            raise UnknownEnvError(f"the main module has no class or factory {attribute!r}")
        return EnvEntry(text, found)
    package = module.partition(".")[0]
    if not _is_installed(package):
        raise UnknownEnvError(f"env {text!r}: no module {package!r} to import; is it installed, and on sys.path?")
    return EnvEntry(text, text, packages=(package,))


def _find(name: str) -> EnvEntry:
    """Look up an id, whole or shortened."""
    if name in _entries:
        return _entries[name]
    if name.startswith(f"{ENVPOOL}/"):
        return envpool_entry(name.removeprefix(f"{ENVPOOL}/"))
    wanted, version = _split(name)
    matches: dict[str, list[tuple[int, EnvEntry]]] = {}
    for entry in _entries.values():
        stem, number = _split(entry.id)
        if (stem == wanted or stem.endswith(f"/{wanted}")) and version in (None, number):
            matches.setdefault(stem, []).append((-1 if number is None else number, entry))
    if len(matches) > 1:
        options = ", ".join(sorted(entry.id for found in matches.values() for _, entry in found))
        raise RegistryError(f"env {name!r} may be any of {options}; write the whole id")
    for found in matches.values():
        return max(found, key=lambda pair: pair[0])[1]
    if (entry_id := _gymnasium_id(name)) is not None:
        return gymnasium_entry(entry_id)
    raise UnknownEnvError(_unknown(name))


def _split(env_id: str) -> tuple[str, int | None]:
    """``"mpe/simple_spread_v3"`` to its stem and its version; PettingZoo's ``-v3`` is the same."""
    match = _VERSION.fullmatch(env_id)
    return (match[1], int(match[2])) if match else (env_id, None)


def _gymnasium_ids() -> list[str]:
    return list(gymnasium.envs.registration.registry)


def _gymnasium_id(name: str) -> str | None:
    """Gymnasium's own id for a name with or without ``gymnasium/`` and version, or None."""
    explicit = name.startswith(_GYMNASIUM)
    wanted = name.removeprefix(_GYMNASIUM)
    if explicit and ":" in wanted:
        return wanted  # "gymnasium/module:id": the import that registers it happens where it is built
    known = _gymnasium_ids()
    if wanted in known:
        return wanted
    split = ((*_split(env_id), env_id) for env_id in known)
    versions = [(number, env_id) for stem, number, env_id in split if stem == wanted and number is not None]
    return max(versions)[1] if versions else None


def _unknown(name: str) -> str:
    """Say that an id is unknown, which ones come near, and where all are listed."""
    known: dict[str, str] = {}
    for env_id in (*_entries, *(_GYMNASIUM + env_id for env_id in _gymnasium_ids())):
        stem = _split(env_id)[0]
        for alias in (env_id, stem, env_id.rpartition("/")[2], stem.rpartition("/")[2]):
            known.setdefault(alias.lower(), env_id)
    near = difflib.get_close_matches(name.lower(), known, n=8, cutoff=0.6)
    hits = list(dict.fromkeys(known[alias] for alias in near))[:5]
    hint = f"Did you mean {' or '.join(map(repr, hits))}? " if hits else ""
    return f"unknown env {name!r}. {hint}`marlvec envs` lists all; marlvec.register() adds one"
