"""`EnvBuilder`: builds the envs of one worker, and builds one of them again after a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from marlvec.envs.adapters.detect import adapt
from marlvec.envs.autoreset import AutoresetRules
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.spec import EnvSpec
from marlvec.envs.wrapper_chain import innermost
from marlvec.errors import ArgumentError, ContractError, Failure, RestartQuietly
from marlvec.vector.faults.failures import capture
from marlvec.vector.faults.restarts import NOT_RESTARTABLE, RestartBudget, RestartLimit

__all__ = ["EnvBuilder", "ShardFailed"]


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
    ) -> None:
        self._factories = list(factories)
        self._first = first_env_id
        self._autoreset = autoreset
        self._keep_state = keep_state
        self._spaces = spaces
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
        self._check_unique(env, i)
        try:
            self._check_spec(env.spec(), self._first + i)
            self._check_fits(env)
        except Exception:
            with suppress(Exception):  # what it has against being closed matters less
                env.close()
            raise
        self._inner[i] = innermost(env)
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
                    with suppress(Exception):  # the first failure is the one to tell
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

    def _check_unique(self, env: MultiAgentEnv, i: int) -> None:
        """Refuse an env that is in another row already: each would be answered with the other's steps."""
        inner = innermost(env)
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

    def _check_spec(self, spec: EnvSpec, env_id: int) -> None:
        if not hasattr(self, "spec"):
            self.spec = spec
        elif differs := self.spec.difference(spec, self._spaces):
            raise ContractError(f"its spaces differ from those of env {self._first}: {differs} (env {env_id})")
        elif self._spaces == "compatible":
            self.spec = self.spec.widened(spec)
