"""Checks of an env's return values, and their error messages, for all adapters."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any, NoReturn

import numpy as np

from marlvec.errors import ContractError

__all__ = [
    "AgentId",
    "agent_ids",
    "contract_error",
    "as_flag",
    "five_dicts",
    "five_values",
    "mapping",
    "names_of",
    "as_reward",
    "only_element",
    "refuse_unknown",
    "zero_or_one",
]

AgentId = Hashable
"""An agent's name in the user's env; usually a string, in RLlib-style envs often an int."""

_REAL = (bool, int, float, np.bool_, np.integer, np.floating)
_FLAG = (bool, np.bool_)


def contract_error(env: str, call: str, problem: str) -> NoReturn:
    """Raise a `ContractError` with the env and the call that broke the contract."""
    raise ContractError(f"{env}.{call}: {problem}")


def only_element(value: Any) -> Any:
    """Return the element of an array (numpy's or another library's) of one real number or bool; else None."""
    if not hasattr(value, "__array__"):
        return None
    try:
        array = np.asarray(value)
    except Exception:  # a tensor on a GPU, or with a gradient
        return None
    return array.reshape(())[()] if array.size == 1 and array.dtype.kind in "biuf" else None


def zero_or_one(value: Any) -> bool | None:
    """Convert an int, or an array of one int or bool, to a flag; None if it is not 0 or 1."""
    number = value if isinstance(value, int) else only_element(value)
    return bool(number) if isinstance(number, (int, np.integer, np.bool_)) and number in (0, 1) else None


def as_reward(value: Any, env: str, agent: AgentId, vector_hint: str = "", *, lenient: bool = False) -> float:
    """Convert one agent's reward to a float; NaN and infinities pass, since `ObservationValidator` checks them.

    `vector_hint`: advice for a reward with one number per objective; `lenient`: an array of one number is accepted.
    """
    plain = value
    if isinstance(value, np.ndarray) and value.shape == ():
        plain = value[()]
    if isinstance(plain, _REAL):
        try:
            return float(plain)
        except OverflowError:
            contract_error(env, "step()", f"reward of agent {agent!r}: expected a real number, got an int too large")
    number = only_element(value)
    if number is not None and lenient:
        return float(number)
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    hint = f". {vector_hint}" if vector_hint and isinstance(value, (list, tuple, np.ndarray)) else ""
    if number is not None:
        hint = "; return a float, or make(…, lenient=True), which accepts an array of one number"
    got = f"{type(value).__name__}{shape}: {short_repr(value)}{hint}"
    contract_error(env, "step()", f"reward of agent {agent!r}: expected a real number, got {got}")


def as_flag(value: Any, env: str, agent: AgentId, what: str, several_hint: str = "", *, lenient: bool = False) -> bool:
    """Convert one agent's termination or truncation flag to a bool.

    `several_hint`: advice for a value with several flags; `lenient`: 0, 1 and arrays of one flag are accepted.
    """
    if isinstance(value, _FLAG):
        return bool(value)
    flag = zero_or_one(value)
    if flag is not None and lenient:
        return flag
    hint = f". {several_hint}" if several_hint and isinstance(value, (list, tuple, np.ndarray)) else ""
    if flag is not None:
        hint = "; return a bool, or make(…, lenient=True), which accepts 0 and 1, and arrays of one flag"
    contract_error(
        env,
        "step()",
        f"{what} flag of agent {agent!r}: expected a bool, got {type(value).__name__}: {short_repr(value)}{hint}",
    )


def mapping(value: Any, env: str, call: str, what: str) -> Mapping[Any, Any]:
    """Check that a part of an env's result is a dict keyed by agent."""
    if value.__class__ is dict or isinstance(value, Mapping):  # the first is quicker
        found: Mapping[Any, Any] = value
        return found
    contract_error(
        env, call, f"{what}: expected a dict keyed by agent, got {type(value).__name__}: {short_repr(value)}"
    )


def agent_ids(found: Any, env: str, where: str) -> list[AgentId]:
    """Check that an env's list of agents has entries that can be keys of dicts."""
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes)):
        contract_error(env, where, f"expected a list of agents, got {type(found).__name__}: {short_repr(found)}")
    ids = list(found)
    for agent in ids:
        if not _is_key(agent):
            contract_error(
                env, where, f"expected strings or other keys of dicts, got {type(agent).__name__}: {agent!r}"
            )
    return ids


def _is_key(agent: Any) -> bool:
    """Return whether an agent can be a key: a tuple that contains a list is Hashable by its class, but has no hash."""
    try:
        hash(agent)
    except TypeError:
        return False
    return True


def refuse_unknown(table: Iterable[Any], known: Mapping[Any, int], env: str, call: str, what: str) -> None:
    """Check that a table has no unknown agents."""
    for agent in table:
        try:
            is_known = agent in known
        except TypeError:  # not hashable
            is_known = False
        if not is_known:
            contract_error(env, call, f"{what} name the unknown agent {agent!r}; possible agents are {names_of(known)}")


def names_of(agents: Iterable[Any], limit: int = 12) -> str:
    """List agents for a message, at most ``limit``."""
    shown = [repr(agent) for agent in agents]
    return ", ".join(shown[:limit]) + (f", … ({len(shown)} in all)" if len(shown) > limit else "")


def five_values(result: Any, env: str) -> Sequence[Any]:
    """Return observation, reward, terminated, truncated and info of a step; convert the four values of an old env.

    An old env's done means terminated, unless ``info["TimeLimit.truncated"]`` is True.
    """
    if (result.__class__ is tuple and len(result) == 5) or _step_length(result, env, "values") == 5:
        five: Sequence[Any] = result
        return five
    obs, reward, done, info = result
    flags = (False, done) if _ran_out_of_time(info) else (done, False)
    return obs, reward, *flags, info


def five_dicts(result: Any, env: str, flags: tuple[str, str]) -> list[Mapping[Any, Any]]:
    """As `five_values`, for results that are dicts by agent; `flags` names the two dicts of flags, for messages."""
    if _step_length(result, env, "dicts") == 4:
        obs, rewards, found, infos = result
        dones, infos = mapping(found, env, "step()", "dones"), mapping(infos, env, "step()", "infos")
        late = {agent for agent in dones if _ran_out_of_time(infos.get(agent))}
        ends = {agent: False if agent in late else done for agent, done in dones.items()}
        cuts = {agent: done if agent in late else False for agent, done in dones.items()}
        result = obs, rewards, ends, cuts, infos
    what = ("observations", "rewards", *flags, "infos")
    return [mapping(table, env, "step()", name) for table, name in zip(result, what, strict=True)]


def _ran_out_of_time(info: Any) -> bool:
    return isinstance(info, Mapping) and info.get("TimeLimit.truncated", False) is True


def _step_length(result: Any, env: str, kinds: str) -> int:
    size = len(result) if isinstance(result, (tuple, list)) else -1
    if size in (4, 5):
        return size
    got = f"a tuple of {size}" if size >= 0 else type(result).__name__
    contract_error(
        env,
        "step()",
        f"expected 5 {kinds} (observations, rewards, terminations, truncations, infos) "
        f"or 4 (observations, rewards, dones, infos), got {got}",
    )
