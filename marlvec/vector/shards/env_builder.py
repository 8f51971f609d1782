"""`EnvBuilder`: builds the envs of one worker, and builds one of them again after a fault."""

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
from marlvec.vector.faults.restarts import NOT_RESTARTABLE, RestartBudget, RestartLimit
from marlvec.vector.faults.shared_generators import GENERATORS, is_drawn_by_all

__all__ = ["EnvBuilder", "ShardFailed", "count_generators", "drawn_by_several"]


def count_generators(envs: Iterable[MultiAgentEnv]) -> Counter[str]:
    """How many envs draw from each generator that is an attribute of their class, or of one that it derives from.

    Args:
        envs: The envs of one shard.

    Returns:
        The generator, e.g. ``"Duel.rng"``, to that number.
    """
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


def drawn_by_several(processes: Iterable[Counter[str]]) -> frozenset[str]:
    """The generators that more than one env of a process draws from.

    Args:
        processes: For each process, what `count_generators` says.
    """
    found: set[str] = set()
    for counts in processes:
        for name, count in counts.items():
            if count > 1:
                found.add(name)
    return frozenset(found)


class ShardFailed(Exception):
    """Some envs could not be built. Carries the failures; never reaches users."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(f"{len(failures)} envs could not be built")
        self.failures = failures


class EnvBuilder:
    """Builds envs behind their adapters, and refuses those that do not fit in.

    Args:
        factories: One zero-argument callable per env.
        first_env_id: Global index of the first one.
        autoreset: What happens when an episode ends.
        keep_state: Whether global states are wanted.
        spaces: ``"equal"``, or ``"compatible"``: bounds of Boxes may differ.
        env_state: ``"deepcopy"``: attributes stand for the state of an env that says nothing of it, and the first of
            each kind is tried.

    Attributes:
        spec: What all envs built so far have in common.
        survived: What went wrong in building them before it went well.
    """

    spec: EnvSpec

    def __init__(
        self,
        factories: Sequence[Callable[[], Any]],
        first_env_id: int,
        autoreset: AutoresetRules,
        *,
        keep_state: bool,
        spaces: str,
        env_state: str | None = None,
    ) -> None:
        self._factories = list(factories)
        self._first = first_env_id
        self._autoreset = autoreset
        self._keep_state = keep_state
        self._spaces = spaces
        self._copies_attributes = env_state == "deepcopy"
        self._replayed: set[tuple[type, ...]] = set()  # kinds of envs that were tried
        self._inner: dict[int, Any] = {}
        self.survived: list[Failure] = []

    def build(self, i: int) -> MultiAgentEnv:
        """Build one env.

        Raises:
            ContractError: It is no env, or its spaces differ from its neighbours'.
            ArgumentError: It cannot serve the settings, or is in another row already.
            Exception: What its factory raises.
        """
        env = adapt(self._factories[i]())
        inner = innermost(env)
        self._check_unique(inner, i)
        try:
            self._check_spec(env.spec(), self._first + i)
            self._check_fits(env)
            if self._copies_attributes:
                self._copy_attributes(env)
        except Exception:
            with suppress(Exception):  # what it has against being closed matters less
                env.close()
            raise
        self._inner[i] = inner
        return env

    def build_all(self, limit: RestartLimit, *, retry: bool) -> list[MultiAgentEnv]:
        """Build every env, in order; arguments as in `build_with_retries`.

        Raises:
            ShardFailed: One could not be built. Those before it are closed.
        """
        envs: list[MultiAgentEnv] = []
        for i in range(len(self._factories)):
            try:
                envs.append(self.build_with_retries(i, limit, retry=retry))
            except Exception as error:
                for env in envs:
                    with suppress(Exception):  # the first failure is the one to raise
                        env.close()
                raise ShardFailed([capture(self._first + i, "__init__", error)]) from None
        return envs

    def build_with_retries(self, i: int, limit: RestartLimit, *, retry: bool) -> MultiAgentEnv:
        """Build one env; where its factory raises, again after a pause, as long as the limit allows.

        Args:
            i: Which, by its place here.
            limit: How often.
            retry: Whether at all, if it raises anything but `RestartQuietly`.
        """
        budget: RestartBudget | None = None
        while True:
            try:
                return self.build(i)
            except Exception as error:
                quiet = isinstance(error, RestartQuietly)
                if not (quiet or (retry and not isinstance(error, NOT_RESTARTABLE))):
                    raise
                failure = capture(self._first + i, "__init__", error)
                budget = budget or RestartBudget(limit)
                pause = budget.try_restart(quiet, failure.summary)
                if pause is None:
                    error.add_note(budget.history(quiet))
                    raise
                if not quiet:
                    self.survived.append(failure)
                    time.sleep(pause)

    def _check_unique(self, inner: Any, i: int) -> None:
        """Refuse an env that is in another row already: each would be answered with the other's steps."""
        for j, other in self._inner.items():
            if other is inner and j != i:
                raise ArgumentError(
                    f"its factory returned the very env that is env {self._first + j} already; expected one of its own"
                )

    def _check_fits(self, env: MultiAgentEnv) -> None:
        """Refuse settings that this env cannot serve."""
        if self._keep_state and env.state_space is None:
            raise ArgumentError(f"state=True, and {env.name} has no global state: it declares no state_space")
        self._autoreset.check_env(env.name, resets_itself=env.resets_itself, keeps_state=self._keep_state)

    def _copy_attributes(self, env: MultiAgentEnv) -> None:
        """Let the attributes of an env stand for its state, if it goes on from them as before."""
        adapter = adapter_in(env)
        if adapter is not None:
            adapter.copy_attributes()
        if problem := env.state_obstacle():
            raise ArgumentError(f"env_state='deepcopy': {problem}")
        layers = tuple(type(layer) for layer in wrapper_chain(env.unwrapped))
        if adapter is not None and layers not in self._replayed:
            check_replay(adapter)
            self._replayed.add(layers)

    def _check_spec(self, spec: EnvSpec, env_id: int) -> None:
        if not hasattr(self, "spec"):
            self.spec = spec
        elif differs := self.spec.difference(spec, self._spaces):
            raise ContractError(f"its spaces differ from those of env {self._first}: {differs} (env {env_id})")
        elif self._spaces == "compatible":
            self.spec = self.spec.widened(spec)
