"""All that a vectorizer returns, byte by byte, and random actions that are allowed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium.spaces import Discrete
from numpy.typing import NDArray

from marlvec import VectorEnv

# --- All that a vectorizer returns, byte by byte: a hash for whole runs, and for two that differ, where they do


class Trace:
    """SHA-256 of everything that was added, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, result: Any) -> bytes:
        """Take in what a reset or step returned; gives the hash of it alone."""
        own = hashlib.sha256()
        for path, kind, data in _parts(result):
            own.update(f"{path}\0{kind}\0".encode())
            own.update(data)
        self._hash.update(own.digest())
        return own.digest()

    def __str__(self) -> str:
        return self._hash.hexdigest()


def difference(got: Any, expected: Any) -> str:
    """Say where two results differ first, with both arrays; empty if they do not."""
    mine, theirs = ({path: (kind, data) for path, kind, data in _parts(result)} for result in (got, expected))
    if mine.keys() != theirs.keys():
        return f"only one of them has {sorted(mine.keys() ^ theirs.keys())}"
    for path, (kind, data) in mine.items():
        if kind != theirs[path][0]:
            return f"{path}: {kind}, expected {theirs[path][0]}"
        if bytes(data) != bytes(theirs[path][1]):
            return f"{path}:\n{_at(got, path)!r}\nexpected\n{_at(expected, path)!r}"
    return ""


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, type and bytes of every leaf, keys sorted: dicts that differ in nothing but their order are the same."""
    if isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _parts(value[key], f"{path}/{key}")
    elif isinstance(value, (tuple, list)):
        yield path, f"{type(value).__name__} of {len(value)}", b""
        for k, part in enumerate(value):
            yield from _parts(part, f"{path}/{k}")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield path, f"{value.dtype.str} {value.shape}", value.tobytes()
    elif isinstance(value, np.ndarray):
        yield path, f"object {value.shape}", b""
        for k, part in enumerate(value.ravel().tolist()):
            yield from _parts(part, f"{path}/[{k}]")
    else:
        yield path, type(value).__name__, repr(value).encode()


def _at(value: Any, path: str) -> Any:
    for key in path.split("/")[1:]:
        if isinstance(value, dict):
            value = next(part for name, part in value.items() if str(name) == key)
        else:
            value = value.ravel()[int(key[1:-1])] if isinstance(value, np.ndarray) else value[int(key)]
    return value


# --- Random actions that are allowed, from what a vectorizer says in its infos


def legal_actions(venv: VectorEnv, infos: dict[str, Any], rng: np.random.Generator) -> list[NDArray[Any]]:
    """One array (N, A_g, ...) per group.

    Agents that act get an action their mask allows; where actions are Discrete, all others get one that their space
    does not have, for it must reach nobody.
    """
    out = []
    masks = infos.get("action_mask")
    for group in venv.spec.groups:
        space = venv.agent_action_space(group.agents[0])
        acting = infos["acting"][:, list(group.agents)]
        mask = masks.get(group.name) if isinstance(masks, dict) else masks
        if isinstance(space, Discrete):
            size = int(space.n)
            allowed = np.ones((*acting.shape, size), bool) if mask is None else mask
            drawn = np.where(allowed, rng.random(allowed.shape), -1.0).argmax(axis=-1)  # the first among equals
            out.append((np.where(acting, drawn, size) + space.start).astype(space.dtype))
        else:
            space.seed(int(rng.integers(2**31)))
            samples = [[space.sample() for _ in group.agents] for _ in range(venv.num_envs)]
            out.append(np.array(samples, space.dtype))
    return out
