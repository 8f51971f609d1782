"""`EnvBuilder`: builds the envs of one worker, and rebuilds an env after a fault.

`check_replay` checks that an env restored from a copy of its attributes replays exactly (``env_state="deepcopy"``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import numpy as np

from marlvec.envs.detect import adapt
from marlvec.envs.env import MultiAgentEnv
from marlvec.envs.spec import AutoresetRules, EnvSpec
from marlvec.envs.user_env import innermost, wrapper_chain
from marlvec.envs.wrappers import adapter_in
from marlvec.errors import ArgumentError, ContractError, Failure, MarlvecError, RestartQuietly
from marlvec.spaces.equality import difference
from marlvec.vector.buffers import Buffers
from marlvec.vector.failures import capture
from marlvec.vector.recovery import GENERATORS, is_drawn_by_all
from marlvec.vector.settings import NOT_RESTARTABLE, RestartBudget, Settings, random_actions


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


_STEPS = 40  # steps that are taken twice; then a reset without a seed, and _AFTER more steps
_AFTER = 10
_SECONDS = 1.0  # after this time, fewer steps are taken
_ONLY = np.zeros(1, np.int64)
Call = tuple[str, dict[str, Any], Any]
"""(name of the call, row after it, infos)."""


def check_replay(env: MultiAgentEnv) -> None:
    """Take the same steps twice from one saved state of a new env; raise if they differ. The env stays unchanged."""
    before = env.get_state()
    player = _Player(env, env.spec())
    player.begin()
    for _ in range(3):
        player.step()
    saved = player.save()
    first = list(player.play(time.monotonic() + _SECONDS))
    try:
        player.restore(saved)
        again = list(player.play(None, len(first)))
        env.set_state(before)
    except Exception as error:
        reason = f"{error}" if isinstance(error, MarlvecError) else f"{type(error).__name__}: {error}"
        raise ArgumentError(
            f"env_state='deepcopy': {env.name} cannot be restored from a copy of its attributes: {reason}. "
            f"Give it get_state() and set_state(state)"
        ) from error
    for k, (one, other) in enumerate(zip(first, again, strict=True)):
        if differs := _difference(one, other):
            raise ArgumentError(
                f"env_state='deepcopy': {env.name}, restored from a copy of its attributes, does not replay: {differs} "
                f"differ after {k + 1} calls ({one[0]}). State outside its attributes (in a simulator written in C, in "
                f"Python's or numpy's global random stream) is not in the copy: give it get_state() and "
                f"set_state(state)"
            )


class _Player:
    """Plays one env with random actions, in the place of a shard."""

    def __init__(self, env: MultiAgentEnv, spec: EnvSpec) -> None:
        self._env, self._spec = env, spec
        self._buffers = Buffers(spec, 1)
        self._slot = self._buffers.slot(0)
        self._calls = 0
        self._ended: list[int] = []

    def begin(self) -> Any:
        """Reset with a seed, if the env takes one."""
        try:
            return self._reset(0)
        except ContractError:
            return self._reset(None)

    def save(self) -> Any:
        return self._env.get_state(), self._buffers.get_rows(_ONLY), self._calls, self._slot.done, list(self._ended)

    def restore(self, saved: Any) -> None:
        state, rows, self._calls, self._slot.done, ended = saved
        self._ended = list(ended)
        self._env.set_state(state)
        self._buffers.set_rows(_ONLY, rows, _ONLY)

    def play(self, until: float | None, calls: int = _STEPS + 1 + _AFTER) -> Iterator[Call]:
        """Step, and reset after each episode's end; then reset a running episode, and step on."""
        short = False
        for k in range(calls):
            short = short or (until is not None and time.monotonic() > until)
            is_reset = self._slot.done or k == _STEPS
            info = self._reset(None) if is_reset else self.step()
            yield "a reset" if is_reset else "a step", self._buffers.get_rows(_ONLY), deepcopy(info)
            if short and k >= _AFTER:
                return

    def _reset(self, seed: int | None) -> Any:
        self._buffers.clear_row(0)
        self._slot.done = self._slot.begun = False
        self._ended = []
        return self._env.reset(self._slot, seed=seed)

    def step(self) -> Any:
        buffers, slot = self._buffers, self._slot
        self._calls += 1
        rng = np.random.default_rng(self._calls)
        masks = buffers.masks_given(_ONLY)
        actions = random_actions(self._spec, rng, acting=buffers.acting, masks=masks, env_ids=_ONLY, grouped=True)
        for group, leaves in zip(self._spec.groups, buffers.actions, strict=True):
            for leaf, drawn in zip(leaves, group.action_tree.flatten(actions[group.name]), strict=True):
                leaf[...] = drawn
        buffers.reward[0] = 0
        buffers.events[0] = False
        for a in self._ended:
            slot.zero_obs(a)
            slot.clear_mask(a)
        info = self._env.step(slot)
        over = (buffers.terminated | buffers.truncated)[0]
        self._ended = np.flatnonzero(over).tolist()
        if slot.begun:
            slot.done = slot.begun = False
        return info


def _difference(one: Call, other: Call) -> str | None:
    """Return which results of two calls differ, or None."""
    if one[0] != other[0]:
        return "the ends of episodes"
    words = {"reward": "rewards", "flags": "flags", "obs": "observations", "final": "final observations"}
    for name, row in one[1].items():
        if difference(row, other[1].get(name), opaque=True):
            return words.get(name.partition("/")[0], f"the rows {name!r}")
    return "infos" if difference(one[2], other[2], opaque=True) else None
