"""Checks of calls at the wrong time, and of calls on the envs themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marlvec.errors import BusyError, ClosedError, NothingPendingError, NotResetError, StateError
from marlvec.testing.vector_checks.play import MakeEnvs, VectorPlace, actions_for, compare, record
from marlvec.vector.vector_env import VectorEnv

__all__ = ["check_busy", "check_close", "check_guards", "check_own_answers"]

_MARK = "_marlvec_check_mark"  # private: envs that are not separate objects reject public names


def _refuses(place: VectorPlace, what: str, error: type[StateError], call: Callable[[], Any]) -> None:
    """Report a call that does not raise this error."""
    try:
        call()
    except error:
        return
    except Exception as other:
        place.broken(what, error.__name__, f"{type(other).__name__}: {other}")
    place.broken(what, error.__name__, "no error")


def _mark(env: Any, value: int) -> None:
    setattr(env, _MARK, value)


def _read(env: Any) -> Any:
    return getattr(env, _MARK)


def check_guards(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """Nothing can be stepped before a reset, and nothing fetched that was not sent."""
    with make() as envs:
        actions = envs.action_space.sample()
        _refuses(place, "step() before a reset", NotResetError, lambda: envs.step(actions))
        _refuses(place, "send() before a reset", NotResetError, lambda: envs.send(actions))
        for name in ("reset_fetch", "step_fetch", "call_fetch", "exec_func_fetch", "recv"):
            _refuses(place, f"{name}() with nothing sent", NothingPendingError, getattr(envs, name))
        envs.reset(seed=seed)
        envs.step_send(envs.random_action())
        _refuses(place, "reset_fetch() after step_send()", NothingPendingError, envs.reset_fetch)
        envs.step_fetch()
        _refuses(place, "step_fetch() for the second time", NothingPendingError, envs.step_fetch)


def check_busy(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """While a step is pending every other call is refused; the step can still be fetched."""
    with make() as envs, make() as others:
        envs.reset(seed=seed)
        others.reset(seed=seed)
        actions = actions_for(envs, seed, [0] * envs.num_envs)
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: envs.step(actions),
            "step_send": lambda: envs.step_send(actions),
            "send": lambda: envs.send(actions),
            "reset": envs.reset,
            "reset(env_ids=[0])": lambda: envs.reset(env_ids=[0]),
            "async_reset": envs.async_reset,
            "call": lambda: envs.call("render"),
            "get_attr": lambda: envs.get_attr("metadata"),
            "set_attr": lambda: envs.set_attr("metadata", {}),
            "exec_func": lambda: envs.exec_func(_mark, None, 0),
            "env_is_wrapped": lambda: envs.env_is_wrapped(VectorEnv),
            "render": envs.render,
            "agents_at": lambda: envs.agents_at(0),
            "random_action": envs.random_action,
        }
        if envs.state_space is not None:
            calls["state"] = envs.state
        envs.step_send(actions)
        for name, call in calls.items():
            _refuses(place, f"{name} while step_send() is pending", BusyError, call)
        compare(place, "step_fetch() after refused calls", record(others.step(actions)), record(envs.step_fetch()))


def check_own_answers(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """``exec_func`` and ``get_attr`` call the chosen envs, and return results in their order."""
    with make() as envs:
        n = envs.num_envs
        envs.reset(seed=seed)
        for i in range(n):
            envs.exec_func(_mark, [i], 10 + i)
        for ids in (list(range(n)), list(range(n))[::-1], [n - 1]):
            expected = tuple(10 + i for i in ids)
            compare(place, f"exec_func(indices={ids})", expected, envs.exec_func(_read, ids))
            compare(place, f"get_attr(indices={ids})", expected, envs.get_attr(_MARK, ids))
        compare(place, "get_attr() of all", tuple(10 + i for i in range(n)), envs.get_attr(_MARK))
        envs.set_attr(_MARK, 7, [n - 1])
        compare(place, f"get_attr() after set_attr(indices=[{n - 1}])", (*range(10, 9 + n), 7), envs.get_attr(_MARK))
        envs.step(envs.random_action())


def check_close(place: VectorPlace, make: MakeEnvs, seed: int) -> None:
    """``close`` may be called again, and with a step pending; after it every other call is refused."""
    with make() as envs:
        envs.reset(seed=seed)
        actions = envs.random_action()
        envs.step_send(actions)
        envs.close()
        if not envs.closed:
            place.broken("closed after close()", "True", "False")
        try:
            envs.close()
        except Exception as error:
            place.broken("a second close()", "no error", f"{type(error).__name__}: {error}")
        calls: dict[str, Callable[[], Any]] = {
            "reset": envs.reset,
            "step": lambda: envs.step(actions),
            "step_fetch": envs.step_fetch,
            "send": lambda: envs.send(actions),
            "recv": envs.recv,
            "get_attr": lambda: envs.get_attr("metadata"),
        }
        for name, call in calls.items():
            _refuses(place, f"{name}() after close()", ClosedError, call)
