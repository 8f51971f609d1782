"""`make()`: many envs at once, from an id, class or factory, on any backend."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from marlvec.envs.builtin_ids import ENVPOOL, JAX, JAXMARL, JUMANJI, PGX, VMAS
from marlvec.envs.recipes import EnvKwargs, EnvRecipe, RenderModes, Wrapper, write_recipes
from marlvec.errors import ArgumentError, EnvArgumentError
from marlvec.registry import EnvLike, resolve_all
from marlvec.vector.async_env import AsyncVectorEnv, choose_backend
from marlvec.vector.cores import HAS_WORKER_PROCESSES, MANY_ENVS, check_num_envs, refuse_worker_processes
from marlvec.vector.in_process import SyncVectorEnv, ThreadVectorEnv, is_exact, make_native
from marlvec.vector.pool_env import make_pool
from marlvec.vector.recovery import warn_of_shared
from marlvec.vector.settings import RestartLimit, SettingsArguments
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.workers.worker import WorkerLink


@dataclass(frozen=True)
class Backend:
    """A backend of `make`; ``build`` takes recipes, the settings, and the options that the flags name."""

    build: Callable[..., VectorEnv]
    takes_num_workers: bool = False
    takes_process_options: bool = False


BACKENDS: Mapping[str, Backend] = {
    "async": Backend(AsyncVectorEnv, takes_num_workers=True, takes_process_options=True),
    "thread": Backend(ThreadVectorEnv, takes_num_workers=True),
    "sync": Backend(SyncVectorEnv),
    "native": Backend(make_native, takes_num_workers=True),
    "pool": Backend(make_pool),
}
_POOLS = {
    ENVPOOL: "EnvPool's envs run in threads of its own",
    VMAS: "VMAS's envs are one simulator, which steps them all at once",
    JAX: "worlds of JAX are stepped all at once, in one compiled call",
    JAXMARL: "JaxMARL's envs are stepped all at once, in one compiled call",
    JUMANJI: "Jumanji's envs are stepped all at once, in one compiled call",
    PGX: "Pgx's games are stepped all at once, in one compiled call",
}
"""Families whose only backend is a pool → why."""
DEFAULT_BACKEND = "async" if HAS_WORKER_PROCESSES else "sync"
_NO_PROCESSES = "this system has no worker processes"
_PROCESS_DEFAULTS = {"context": None, "shared_memory": True, "daemon": True, "worker": None, "step_timeout": None}

# Other libraries' names for arguments of make(), if they are not similar.
_SYNONYMS = {
    "env_num": "num_envs",
    "asynchronous": "backend",
    "vectorization_mode": "backend",
    "observation_mode": "spaces",
}


def make(
    env: EnvLike | Sequence[EnvLike],
    num_envs: int | None = None,
    *,
    backend: str = DEFAULT_BACKEND,
    num_workers: int | None = None,
    autoreset_mode: str = "same_step",
    done_on: str = "all",
    copy: bool = True,
    wrappers: Wrapper | Sequence[Wrapper] = (),
    max_episode_steps: int | None = None,
    pad: bool = False,
    agents: str = "auto",
    lenient: bool = False,
    grouped: bool = False,
    render_mode: RenderModes = None,
    state: bool = False,
    spaces: str = "equal",
    env_state: str | None = None,
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
        env: The env to build: a registered id (``"simple_spread"``, ``"mpe/simple_spread_v3"``,
            ``"pettingzoo/classic/connect_four_v3"``, ``"CartPole-v1"``, ``"envpool/Pong-v5"``), ``"module:attr"``,
            ``"FILE.py:attr"``, an env class, a factory, a `JaxWorld`, or a list with one of these per env. A factory
            that declares an argument ``env_index`` or ``num_envs`` receives it.
        num_envs: N; default 1, or the length of the list.
        backend: ``"async"``, the default: worker processes that write into shared memory (not on Windows, where
            ``"sync"`` is the default); ``"thread"``: worker threads, for envs that release the interpreter lock;
            ``"sync"``: all envs in this process; ``"native"``: compiled envs in this process, for envs that have them
            (docs/native.md); ``"pool"``: one object with all envs, e.g. ``gymnasium.make_vec``'s (docs/libraries/);
            ids of EnvPool, VMAS, JaxMARL, Jumanji and Pgx, and a `JaxWorld`, always use it: leave ``backend`` out.
            ``"auto"``: native if the results are equal bit for bit, it is installed and it supports all arguments; else
            sync if worker processes would cost more time than they save, which is measured by stepping two of the envs
            in a process of their own; else async. Arguments for worker processes always choose async. ``repr(envs)``
            has the choice and the reason; results do not depend on it.
        num_workers: Worker processes or threads; default: one per core that this process may use, by its affinity and
            the quota of its container, at most one per env.
        autoreset_mode: What happens when an env's episode ends. ``"same_step"``: the next one begins at once, the step
            returns its first observation, and ``infos["final_observation"]`` the last one; ``"next_step"``: the next
            step begins it, ignoring the action, and ``infos["reset_mask"]`` marks that row; ``"disabled"``: only
            ``reset(env_ids=…)`` begins it. Envs that declare that they reset themselves support ``"same_step"`` only.
        done_on: ``"all"``: an episode is over when its last agent has ended, by termination or truncation; ``"any"``:
            when the first has; agents still alive are truncated then.
        copy: Return copies; False for read-only views, valid until the next call that steps.
        wrappers: Applied to every env, first one innermost: classes or functions from env to env. A wrapper that
            declares an argument ``env_index`` or ``num_envs`` receives it.
        max_episode_steps: Truncate agents that are still alive after this many steps of their env; in a turn-based env
            a step is one move. Replaces the limit that Gymnasium registers with its envs, and the 400 answers of
            textarena's games; other envs keep their own limits.
        pad: Make one group of agents whose spaces differ in size: observations get zeros at the end of each axis,
            Discrete actions an action mask. Spaces that cannot be padded raise.
        agents: Whether a Gymnasium env has several agents. ``"auto"``: it has, if its observation and action spaces are
            Tuples of equal length, or Dicts with equal keys, and its ``n_agents`` or ``num_agents`` is that number
            (lbforaging, rware, SMAClite), or the keys are ints (multigrid); else one agent. ``"tuple"``, ``"dict"``:
            several agents, by the spaces alone; ``"single"``: one agent.
        lenient: Accept forms that raise otherwise: rewards that are arrays of one number, and flags that are 0 or 1, or
            arrays of one flag; in dict envs one reward or flag for all live agents; spaces or ``possible_agents`` that
            exist only after a reset, which is called once, without a seed, when the env is built; and an omission of
            PettingZoo Parallel envs: an agent that leaves ``env.agents`` without a flag is truncated in that step,
            without a final observation if the env returns none.
        grouped: Use dicts of groups for observations and actions even if all agents are alike.
        render_mode: For the envs' constructors: one mode for all; ``"single_rgb_array"`` (``"single_"`` and any mode)
            for env 0 alone; or a list of one mode or None per env.
        state: Return the envs' global state with every reset and step, as ``infos["state"]`` and
            ``infos["final_state"]``; they must have a ``state_space``.
        spaces: ``"equal"``: all envs have the same spaces; ``"compatible"``: the bounds of their Boxes may differ, and
            the vectorizer's spaces have the widest bounds.
        env_state: ``"deepcopy"``: the state of an env without ``get_state()`` and ``set_state(state)`` is a copy of its
            attributes. When the first env of its kind is built, the same steps are taken twice, and a difference
            raises. None: only an env's own methods are used. Native envs need neither.
        context: Start method of worker processes: ``"forkserver"`` (default), ``"spawn"``, ``"fork"``, or a
            multiprocessing context.
        shared_memory: False puts the rows of worker processes into a temporary file that all processes map;
            ``"require"`` refuses spaces with a leaf of no fixed size, which would be sent through a pipe.
        daemon: Time for worker processes to close their envs at the interpreter's exit, without `VectorEnv.close`:
            True: one second; False: as long as they need.
        worker: A function to run in worker processes instead of their own loop; see
            `marlvec.vector.workers.worker.serve`.
        step_timeout: Seconds that one env may take for a step or a reset before it counts as hung, and its worker
            process is killed. None: no limit. Checked while a call waits.
        on_fault: What to do if an env raises, hangs or ends its worker. ``"raise"``: the call raises. ``"restart"``: it
            is built again (all envs of the worker, if that died), and seeded by `restart_seed`; its episode is lost,
            and the next row has ``infos["fault"]`` and is truncated, without final observation. ``"mask"``: its next
            row has the same marks, and from then on no agent is alive in it.
        max_restarts: Limit of restarts of one env, or of one worker: a count within a minute, or a `RestartLimit`.
            Beyond it the call raises.
        validate: How often values are checked: ``"strict"``: in every call; ``"sample"``: in the first 16 calls and
            every 16th after that; ``"warn"``: in every call, with warnings instead of errors (actions outside their
            space still raise); ``"off"``: never. With ``"sample"``, wrong observations and rewards, and actions that a
            mask forbids, give a warning, too. Shapes and dtypes are always checked.
        env_kwargs: Keyword arguments for the envs: one dict, or one per env. Overrides ``kwargs``, and may have names
            that `make` itself uses.
        kwargs: Keyword arguments for every env; an unknown one raises.

    Returns:
        A `VectorEnv`; a context manager.

    Raises:
        UnknownEnvError: No such id; lists similar ids.
        ArgumentError: An argument is wrong, and no process was started; or an env does not support ``render_mode``,
            ``state`` or ``autoreset_mode``, and all processes were ended.
        MissingExtraError: The env needs a package that is not installed; names the extra.
        ContractError: An object is not an env; the envs' spaces differ; or their agents' spaces cannot be padded.
        EnvArgumentError: An env refused its arguments.
        EnvRaised: An env's constructor raised; names the env, with its traceback. All processes were ended.
        ResourceError: The machine lacks memory, processes or file descriptors. All processes were ended.
        UnsupportedSpaceError: A leaf cannot be in shared memory, and ``"require"`` was given.

    Warns:
        ContractWarning: More than one env of a process draws from a random generator that is an attribute of their
            class; the text has the remedy.
    """
    if isinstance(num_envs, Integral) and num_envs > MANY_ENVS:
        check_num_envs(int(num_envs))
    recipes = write_recipes(
        resolve_all(env, num_envs),
        kwargs=kwargs,
        env_kwargs=env_kwargs,
        wrappers=wrappers,
        render_mode=render_mode,
        max_episode_steps=max_episode_steps,
        pad=pad,
        agents=agents,
        lenient=lenient,
    )
    settings: SettingsArguments = {
        "autoreset_mode": autoreset_mode,
        "done_on": done_on,
        "copy": copy,
        "grouped": grouped,
        "validate": validate,
        "state": state,
        "spaces": spaces,
        "env_state": env_state,
        "on_fault": on_fault,
        "max_restarts": max_restarts,
    }
    process_options = {
        "context": context,
        "shared_memory": shared_memory,
        "daemon": daemon,
        "worker": worker,
        "step_timeout": step_timeout,
    }
    if (where := _POOLS.get(recipes[0].factory.entry.family)) is not None:
        if backend not in (DEFAULT_BACKEND, "auto", "pool"):
            raise ArgumentError(f"backend={backend!r}: {where}; leave it out")
        backend = "pool"
    reason = "" if HAS_WORKER_PROCESSES or backend != DEFAULT_BACKEND else _NO_PROCESSES
    try:
        if backend == "auto":
            backend, reason = _choose(recipes, num_workers, settings, process_options)
        options = _options_of(backend, num_workers, process_options)
        envs = BACKENDS[backend].build(recipes, **options, **settings)
    except EnvArgumentError as error:
        _suggest(error, kwargs)
        raise
    envs.backend_reason = reason
    if envs.shared_generators:
        warn_of_shared(envs.shared_generators, envs.num_envs)
    return envs


def _choose(
    recipes: list[EnvRecipe], num_workers: int | None, settings: SettingsArguments, process_options: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the backend that ``"auto"`` chooses for these envs, and the reason."""
    if process_options != _PROCESS_DEFAULTS:
        if not HAS_WORKER_PROCESSES:
            given = [name for name, value in process_options.items() if value != _PROCESS_DEFAULTS[name]]
            refuse_worker_processes(", ".join(given))
        return "async", "an argument needs worker processes"
    if is_exact(recipes):
        return "native", "its compiled form has equal results"
    if not HAS_WORKER_PROCESSES:
        return (
            ("sync", _NO_PROCESSES) if num_workers is None else ("thread", f"num_workers is given, and {_NO_PROCESSES}")
        )
    if num_workers is not None:
        return "async", "num_workers is given"
    return choose_backend(recipes, settings)


def _options_of(backend: str, num_workers: int | None, process_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a backend takes; raise if another one is given."""
    if backend not in BACKENDS:
        raise ArgumentError(f"backend must be {', '.join(map(repr, BACKENDS))} or 'auto', got {backend!r}")
    found = BACKENDS[backend]
    options = dict(process_options) if found.takes_process_options else {}
    if not found.takes_process_options:
        for name, value in process_options.items():
            if value != _PROCESS_DEFAULTS[name]:
                raise ArgumentError(f"{name}={value!r} is for worker processes; backend={backend!r} has none")
    if found.takes_num_workers:
        options["num_workers"] = num_workers
    elif num_workers is not None:
        raise ArgumentError(f"num_workers={num_workers!r} is for workers; backend={backend!r} has none")
    return options


def _suggest(error: EnvArgumentError, kwargs: Mapping[str, Any]) -> None:
    """Add to the error for an unknown argument of an env a similar argument of `make`, if there is one."""
    head, *rest = error.args[0].split("\n", 1)
    own = [
        name
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name in kwargs:
        near = _SYNONYMS.get(name) or next(iter(difflib.get_close_matches(name, own, n=1, cutoff=0.7)), None)
        if near and repr(name) in head:
            head += f". Did you mean make(…, {near}=…)? Other arguments are passed to the env"
    error.args = ("\n".join([head, *rest]),)
