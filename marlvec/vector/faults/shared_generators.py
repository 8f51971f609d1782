"""Random generators that are attributes of an env's class: all envs of one process draw from them."""

from __future__ import annotations

import dis
import random
from collections.abc import Collection
from types import FunctionType

import numpy as np

from marlvec.envs.contract_warnings import warn_of_contract

__all__ = ["GENERATORS", "is_drawn_by_all", "warn_of_shared"]

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def warn_of_shared(names: Collection[str], num_envs: int) -> None:
    """Warn, once, that envs disturb each other.

    Args:
        names: The generators.
        num_envs: N.
    """
    if not names:
        return
    first = min(names)
    others = f" (and {', '.join(sorted(names)[1:])})" if len(names) > 1 else ""
    name = first.rpartition(".")[2]
    warn_of_contract(
        f"{first}{others} is a random generator in the class of the envs, expected one for each env: those of one "
        f"process share it, so that what one draws changes what the others get, and seeds bring other episodes than "
        f"they do alone. Set self.{name} = np.random.default_rng(seed) in reset(seed=…). Until then, where "
        f'reset(seed=…) seeds it, give each env a process of its own: make(…, num_envs={num_envs}, backend="async", '
        f"num_workers={num_envs}). marlvec.testing.check_env() says what else is shared"
    )


def is_drawn_by_all(kind: type, name: str) -> bool:
    """Whether a generator of a class serves its instances: it has a state, and no method sets another one on self.

    Args:
        kind: The class.
        name: Its attribute that is a generator.
    """
    if isinstance(getattr(kind, name), random.SystemRandom):
        return False
    functions = [value for base in kind.__mro__ for value in vars(base).values() if isinstance(value, FunctionType)]
    return not any(_sets(function, name) for function in functions if name in function.__code__.co_names)


def _sets(function: FunctionType, name: str) -> bool:
    code = function.__code__
    if not code.co_argcount:
        return False
    owner = code.co_varnames[0]
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and instruction.argval == name and before is not None:
            # Some Pythons load two names at once; the object that is written to is the last.
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if before.opname.startswith("LOAD_FAST") and loaded[-1] == owner:
                return True
        before = instruction
    return False
