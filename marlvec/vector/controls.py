"""Asking envs for something besides resets and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import EnvIds, check_env_ids
from marlvec.errors import ArgumentError
from marlvec.vector.calls import alone, whole
from marlvec.vector.control import Call, Command, Execute, GetAttribute, IsWrapped, Render, spread_attribute
from marlvec.vector.engine import Engine
from marlvec.vector.faults import raise_failures
from marlvec.vector.random_action import random_actions
from marlvec.vector.seeding import check_seed

__all__ = ["Controls"]


class Controls(Engine):
    """Control calls: they run where the envs live, one after the other, and cost no episode.

    All of them take ``indices``, the envs to ask (None: all), and answer with one entry per chosen env, in their order.
    All raise `BusyError` while another call is pending (that one can still be fetched), and `EnvRaised` if something
    went wrong in an env: it lists all that failed, ``.result`` has the answers of the others by env index, and every
    env goes on as before. Envs that are masked (``on_fault="mask"``) are not asked; their answer is None.
    """

    @whole
    def call(self, name: str, /, *args: Any, indices: EnvIds | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of the envs, on the outermost wrapper that has it.

        Args:
            name: The method's. ``reset``, ``step``, ``seed`` and ``close`` are refused.
            args: Its positional arguments; every env gets a copy.
            indices: The envs to ask.
            kwargs: Its keyword arguments.
        """
        self.call_send(name, *args, indices=indices, **kwargs)
        return self.call_fetch()

    @alone
    def call_send(self, name: str, /, *args: Any, indices: EnvIds | None = None, **kwargs: Any) -> None:
        """Ask for what `call` does; `call_fetch` brings the answers."""
        self._ask("call", Call(name, args, kwargs), indices)

    @alone
    def call_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the answers to `call_send`.

        Raises:
            FetchTimeout: Not all envs answered within ``timeout`` seconds; fetch again for the same answers.
        """
        return self._answers("call", timeout)

    @whole
    def exec_func(
        self, fn: Callable[..., Any], /, indices: EnvIds | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run ``fn(env, *args, **kwargs)`` where each env lives; ``env`` is the user's, outermost wrapper and all.

        Args:
            fn: Any callable; lambdas and closures travel by value.
            indices: The envs to ask, in this place or by name.
            args: More positional arguments; every env gets a copy.
            kwargs: Keyword arguments; one that is called ``indices`` can only go by position.
        """
        self.exec_func_send(fn, indices, *args, **kwargs)
        return self.exec_func_fetch()

    @alone
    def exec_func_send(
        self, fn: Callable[..., Any], /, indices: EnvIds | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Ask for what `exec_func` does; `exec_func_fetch` brings the answers."""
        if not callable(fn):
            raise ArgumentError(f"exec_func(): expected a function of an env, got {type(fn).__name__}: {fn!r}")
        self._ask("exec_func", Execute(fn, args, kwargs), indices)

    @alone
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Wait for the answers to `exec_func_send`.

        Raises:
            FetchTimeout: Not all envs answered within ``timeout`` seconds; fetch again for the same answers.
        """
        return self._answers("exec_func", timeout)

    @whole
    @alone
    def get_attr(self, name: str, indices: EnvIds | None = None) -> tuple[Any, ...]:
        """Read an attribute of the envs, from the outermost wrapper that has it; a method is returned, not called."""
        self._ask("get_attr", GetAttribute(name), indices)
        return self._answers("get_attr", None)

    @whole
    @alone
    def set_attr(self, name: str, value: Any, indices: EnvIds | None = None) -> None:
        """Set an attribute of the envs, on the outermost wrapper that has it.

        Args:
            name: The attribute's. One that no layer has yet is made, on the env itself beneath all wrappers.
            value: For every env, as it is, a list too; or a `PerEnv` with one value per chosen env.
            indices: The envs to ask.
        """
        ids = self._chosen("set_attr", indices)
        self._ask_each("set_attr", spread_attribute(name, value, len(ids)), ids)
        self._answers("set_attr", None)

    @whole
    @alone
    def env_is_wrapped(self, cls: type, indices: EnvIds | None = None) -> tuple[bool, ...]:
        """Whether each env is wrapped, at any depth, in an instance of ``cls``."""
        self._ask("env_is_wrapped", IsWrapped(cls), indices)
        return self._answers("env_is_wrapped", None)

    @whole
    @alone
    def render(self, indices: EnvIds | None = None) -> tuple[Any, ...]:
        """Let envs render themselves.

        Args:
            indices: The envs to ask.

        Returns:
            What each env's own ``render()`` returned: an (H, W, 3) uint8 frame for ``render_mode="rgb_array"``, text
            for ``"ansi"``, None for ``"human"``. `marlvec.tile_frames` makes one picture of them.
        """
        self._ask("render", Render(), indices)
        return self._answers("render", None)

    @whole
    @alone
    def state(self) -> NDArray[Any]:
        """Global state of every env, (N, *state_space.shape).

        With ``make(..., state=True)`` each reset and step brings it as ``infos["state"]``, and the state in which an
        episode ended as ``infos["final_state"]``.

        Raises:
            ArgumentError: The envs have no ``state_space``.
        """
        if self.spec.state_space is None:
            raise ArgumentError(f"{self.spec.name} has no global state: it declares no state_space")
        self._calls.check_idle("state")
        self._calls.check_episodes(self._everyone, "state")
        self._begin("state", "state", self._everyone)
        self._answers("state", None)
        assert self._buffers.state is not None
        return self._buffers.state.copy()

    # --- answered from what the last step left behind ---

    @alone
    def agents_at(self, env_id: int) -> tuple[str, ...]:
        """Names of the agents that are alive in one env now, in order of the agent axis."""
        ids = check_env_ids([env_id], self.num_envs)
        self._calls.check_free(ids, "agents_at")
        return tuple(
            name for name, alive in zip(self.agents, self._buffers.alive[ids[0]].tolist(), strict=True) if alive
        )

    @alone
    def random_action(self, seed: int | None = None, env_ids: EnvIds | None = None) -> Any:
        """Draw a random action for every agent, in the form that `step` and `send` take.

        Args:
            seed: Seed of this draw alone. None: the vectorizer's own stream goes on, which ``reset(seed=…)`` of all
                envs starts anew.
            env_ids: Whose actions; None for all. First axis of the result, in their order.

        Returns:
            (n, A, …), a tree of such arrays, or a dict of groups; uniform over what the masks allow.

        Raises:
            ContractError: The mask of an agent that must act allows nothing.
            UnsupportedSpaceError: The action space is of a class that has no ``sample``.
        """
        ids = self._everyone if env_ids is None else check_env_ids(env_ids, self.num_envs)
        self._calls.check_free(ids, "random_action")
        self._calls.check_episodes(ids, "random_action")
        rng = self._rng if seed is None else np.random.default_rng(check_seed(seed))
        rows, buffers = self._rows(ids), self._buffers
        return random_actions(
            self.spec,
            rng,
            acting=buffers.acting[rows],
            masks=[None if mask is None else mask[rows] for mask in buffers.masks_given(rows)],
            env_ids=ids,
            grouped=self.grouped,
        )

    # --- how a control call goes ---

    def _chosen(self, call: str, indices: EnvIds | None) -> NDArray[np.int64]:
        self._calls.check_idle(call)
        return self._everyone if indices is None else check_env_ids(indices, self.num_envs)

    def _ask(self, call: str, command: Command, indices: EnvIds | None) -> None:
        ids = self._chosen(call, indices)
        self._ask_each(call, [command] * len(ids), ids)

    def _ask_each(self, call: str, commands: Sequence[Command], ids: NDArray[np.int64]) -> None:
        self._asked = ids
        self._begin(call, "control", ids, (commands,))

    def _answers(self, call: str, timeout: float | None) -> tuple[Any, ...]:
        self._calls.check_pending(call)
        self._wait_for(self._calls.outstanding, timeout, f"{call}_fetch")
        _, report = self._take_arrived()
        raise_failures(report.failures, self._place, report.answers)
        if call == "state":
            return ()  # it is in the buffers
        masked = self._recovery.masked
        return tuple(None if masked[i] else report.answers[i] for i in self._asked.tolist())
