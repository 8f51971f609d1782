"""Random generators that are class attributes of an env: all envs of one process draw from them."""

from __future__ import annotations

import dis
import random
from collections.abc import Collection
from types import FunctionType

import numpy as np

from marlvec.envs.adapters.return_values import warn_of_contract

__all__ = ["GENERATORS", "is_drawn_by_all", "warn_of_shared"]

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def warn_of_shared(names: Collection[str], num_envs: int) -> None:
    """Warn, once, that envs share random generators."""
    if not names:
        return
    first = min(names)
    others = f" (and {', '.join(sorted(names)[1:])})" if len(names) > 1 else ""
    name = first.rpartition(".")[2]
    warn_of_contract(
        f"{first}{others} is a random generator in the class of the envs, expected one for each env: envs of one "
        f"process share it, so that each draw of one env changes the draws of the others, and a seed gives other "
        f"episodes than in a single env. Set self.{name} = np.random.default_rng(seed) in reset(seed=…). Until then, "
        f"if reset(seed=…) seeds it, give each env its own process: make(…, num_envs={num_envs}, "
        f'backend="async", num_workers={num_envs}). marlvec.testing.check_env() lists what else is shared'
    )


def is_drawn_by_all(kind: type, name: str) -> bool:
    """Return whether all instances draw from a class's generator: no method replaces it on self, and it has a state."""
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
