"""`EnvBuilder`: builds the envs of one worker, and rebuilds an env after a fault."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from marlvec.envs.autoreset import AutoresetRules
from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.spec import EnvSpec
from marlvec.envs.wrapper_chain import innermost, wrapper_chain
from marlvec.envs.wrappers.base import adapter_in
from marlvec.errors import ArgumentError, ContractError, Failure, RestartQuietly
from marlvec.vector.data.replay_check import check_replay
from marlvec.vector.faults.failures import capture
from marlvec.vector.faults.restarts import NOT_RESTARTABLE, RestartBudget
from marlvec.vector.faults.shared_generators import GENERATORS, is_drawn_by_all
from marlvec.vector.settings import Settings

__all__ = ["EnvBuilder", "ShardFailed", "count_generators", "drawn_by_several", "failures_of"]


def count_generators(envs: Iterable[MultiAgentEnv]) -> Counter[str]:
    """Count the envs that draw from each random generator, e.g. ``"Duel.rng"``, of their class or its bases."""
    kinds: Counter[type] = Counter()
    for env in envs:
        user_env = env.unwrapped
        inner = getattr(user_env, "unwrapped", None)
        kinds.update({type(user_env), type(user_env if inner is None else inner)})
    found: Counter[str] = Counter()
    for kind, count in kinds.items():
        for base in kind.__mro__:
            for name, value in vars(base).items():
                if isinstance(value, GENERATORS) and is_drawn_by_all(kind, name):
                    found[f"{base.__qualname__}.{name}"] += count
    return found


def drawn_by_several(counts: Counter[str]) -> frozenset[str]:
    """Return the generators that more than one env draws from, by the counts from `count_generators`."""
    return frozenset(name for name, count in counts.items() if count > 1)


class ShardFailed(Exception):
    """Some envs could not be built. Carries the failures; internal."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(f"{len(failures)} envs could not be built")
        self.failures = failures


def failures_of(error: BaseException, first_env_id: int) -> list[Failure]:
    """Return why a shard was not built; what no env has raised is its first one's failure."""
    return error.failures if isinstance(error, ShardFailed) else [capture(first_env_id, "__init__", error)]


class EnvBuilder:
    """Builds envs with their adapters, and refuses envs that do not fit the others or the settings.

    With ``env_state="deepcopy"`` the first env of each kind is checked by a replay.
    """

    spec: EnvSpec  # of all envs built so far

    def __init__(self, factories: Sequence[Callable[[], Any]], first_env_id: int, settings: Settings) -> None:
        self._factories = list(factories)
        self._first = first_env_id
        self._settings = settings
        self._autoreset = AutoresetRules.of(settings.autoreset_mode)
        self._replayed: set[tuple[type, ...]] = set()  # kinds of envs that passed the replay check
        self._inner: dict[int, Any] = {}
        self.survived: list[Failure] = []

    def build(self, i: int) -> MultiAgentEnv:
        """Build one env; its factory's exceptions are raised."""
        env = adapt(self._factories[i]())
        inner = innermost(env)
        self._check_unique(inner, i)
        try:
            self._check_spec(env.spec(), self._first + i)
            self._check_fits(env)
            if self._settings.env_state == "deepcopy":
                self._copy_attributes(env)
        except Exception:
            with suppress(Exception):  # the first error is the one to raise
                env.close()
            raise
        self._inner[i] = inner
        return env

    def build_all(self) -> list[MultiAgentEnv]:
        """Build every env, in order. `ShardFailed`: an env could not be built, and the envs before it are closed."""
        envs: list[MultiAgentEnv] = []
        for i in range(len(self._factories)):
            try:
                envs.append(self._build_with_retries(i))
            except Exception as error:
                for env in envs:
                    with suppress(Exception):  # the first failure is the one to raise
                        env.close()
                raise ShardFailed([capture(self._first + i, "__init__", error)]) from None
        return envs

    def _build_with_retries(self, i: int) -> MultiAgentEnv:
        """Build one env; with ``on_fault="restart"``, if its factory raises, again, as often as the limit allows."""
        budget = RestartBudget(self._settings.limit)
        retries = self._settings.on_fault == "restart"
        while True:
            try:
                return self.build(i)
            except Exception as error:
                quiet = isinstance(error, RestartQuietly)
                if not (quiet or (retries and not isinstance(error, NOT_RESTARTABLE))):
                    raise
                failure = capture(self._first + i, "__init__", error)
                pause = budget.try_restart(quiet, failure.summary)
                if pause is None:
                    error.add_note(budget.history(quiet))
                    raise
                if not quiet:
                    self.survived.append(failure)
                    time.sleep(pause)

    def _check_unique(self, inner: Any, i: int) -> None:
        """Raise if an env is in another row already: each row would get the other's steps."""
        for j, other in self._inner.items():
            if other is inner and j != i:
                raise ArgumentError(
                    f"expected a new env from its factory, got the object that is env {self._first + j} already; "
                    f"create an env in each call"
                )

    def _check_fits(self, env: MultiAgentEnv) -> None:
        if self._settings.state and env.state_space is None:
            raise ArgumentError(f"state=True: {env.name} has no global state: it declares no state_space")
        keeps_state = bool(self._settings.state)
        self._autoreset.check_env(env.name, resets_itself=env.resets_itself, keeps_state=keeps_state)

    def _copy_attributes(self, env: MultiAgentEnv) -> None:
        """Use copies of an env's attributes as its state, after a replay check."""
        adapter = adapter_in(env)
        if adapter is not None:
            adapter.copies_attributes = True
        if problem := env.state_obstacle():
            raise ArgumentError(f"env_state='deepcopy': {problem}")
        layers = tuple(type(layer) for layer in wrapper_chain(env.unwrapped))
        if adapter is not None and layers not in self._replayed:
            check_replay(adapter)
            self._replayed.add(layers)

    def _check_spec(self, spec: EnvSpec, env_id: int) -> None:
        if not hasattr(self, "spec"):
            self.spec = spec
        elif differs := self.spec.difference(spec, self._settings.spaces):
            raise ContractError(f"its spaces differ from those of env {self._first}: {differs} (env {env_id})")
        elif self._settings.spaces == "compatible":
            self.spec = self.spec.widened(spec)
