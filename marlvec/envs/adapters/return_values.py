"""Checks of an env's return values, the copies of its infos, and the errors and warnings of broken contracts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from reprlib import repr as short_repr
from typing import Any, NoReturn

import numpy as np

from marlvec.envs.spec import COMMON, Info
from marlvec.errors import ContractError, ContractWarning

__all__ = [
    "AgentId",
    "agent_ids",
    "contract_error",
    "as_flag",
    "five_dicts",
    "five_values",
    "mapping",
    "missing_hint",
    "names_of",
    "as_reward",
    "only_element",
    "refuse_unknown",
    "zero_or_one",
    "MAX_DEPTH",
    "infos_by_agent",
    "common_info",
    "warn_of_contract",
]

AgentId = Hashable
"""An agent's name in the user's env; usually a string, in RLlib-style envs often an int."""

_REAL = (bool, int, float, np.bool_, np.integer, np.floating)
_FLAG = (bool, np.bool_)


def contract_error(env: str, call: str, problem: str) -> NoReturn:
    """Raise a `ContractError` with the env and the call that broke the contract."""
    raise ContractError(f"{env}.{call}: {problem}")


def missing_hint(declaration: str) -> str:
    """Return what to do about an attribute that an env does not have, for the end of an error message."""
    return (
        f". Set self.{declaration} in __init__(); or, if the env has it only after reset(), pass a factory that resets "
        f"once: def build(): env = MyEnv(…); env.reset(); return env"
    )


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


MAX_DEPTH = 32
"""Maximum nesting of dicts in an info; guards against a dict that contains itself."""

# Values that an env may change later are copied; all others are passed on unchanged.
_MUTABLE = (np.ndarray, dict, list, tuple, set, bytearray)


def _snapshot(info: Mapping[Any, Any], env: str) -> dict[str, Any]:
    """Copy one info dict so that the env may reuse it and the arrays in it.

    `ContractError`, with the key: a value cannot be copied or contains itself, or two keys are equal as text.
    """
    out: dict[str, Any] = {}
    for key, value in info.items():
        name = key if key.__class__ is str else str(key)
        if name in out:
            contract_error(env, "info", f"expected keys that differ as text, got {name!r} twice (as {key!r}, too)")
        if isinstance(value, dict) and _has_no_end(value):
            contract_error(
                env, "info", f"the value of {key!r} is a dict that contains itself, or more than {MAX_DEPTH} in a row"
            )
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = value.copy()
        elif isinstance(value, _MUTABLE):
            try:
                value = deepcopy(value)
            except Exception as error:
                contract_error(env, "info", f"the value of {key!r} cannot be copied ({type(error).__name__}: {error})")
        out[name] = value
    return out


def _has_no_end(table: dict[Any, Any]) -> bool:
    """Return whether dicts are nested deeper than `MAX_DEPTH`. A dict that occurs twice on a level is visited once."""
    level = {id(table): table}
    for _ in range(MAX_DEPTH):
        level = {id(value): value for inner in level.values() for value in inner.values() if isinstance(value, dict)}
        if not level:
            return False
    return True


def common_info(info: Any, env: str) -> Info | None:
    """Convert the info dict of an env that has one for all agents; its entries go under `COMMON`."""
    if isinstance(info, Mapping):
        return {COMMON: _snapshot(info, env)} if info else None
    if info is None:
        return None
    contract_error(env, "info", f"expected a dict, got {type(info).__name__}")


def infos_by_agent(infos: Mapping[Any, Any], index: Mapping[Any, int], names: Sequence[str], env: str) -> Info | None:
    """Copy the infos of an env that has one info dict per agent; None if all are empty.

    `index`: agent to index; `names` in that order. Keys that are not agents (``"common"``, …) go under `COMMON`.
    """
    out: Info = {}
    for key, info in infos.items():
        is_dict = isinstance(info, Mapping)
        if info is None or (is_dict and not info):
            continue
        a = index.get(key)
        if a is None:
            entries = info if key == COMMON and is_dict else {key: info}
            out.setdefault(COMMON, {}).update(_snapshot(entries, env))
        elif is_dict:
            out[names[a]] = _snapshot(info, env)
        else:
            contract_error(env, "info", f"info of agent {key!r}: expected a dict, got {type(info).__name__}")
    return out or None


def warn_of_contract(message: str) -> None:
    """Emit a `ContractWarning` at the innermost frame outside of marlvec."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "marlvec":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, ContractWarning, stacklevel=level + 1)
