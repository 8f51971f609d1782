"""Random vectorizers: what their envs are like, and how they are made."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, OneOf, Sequence, Space, Text, Tuple
from hypothesis import strategies as st

from marlvec import VectorEnv
from marlvec.vector.settings import VALIDATE_MODES
from tests.properties.worlds import APIS, Design, Seat, factories_of
from tests.vector.support.kinds import vectorize
from tests.vector.support.reference import MODES, Reference

__all__ = ["IN_PROCESS", "PROCESSES", "Setup", "setups"]

IN_PROCESS = ("sync", "thread")
PROCESSES = ("async", "file")  # rows in shared memory, and in a file

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
SHAPES = ((), (1,), (3,), (0,), (2, 0), (2, 3), (1, 2, 2))


def box(dtype: str, bounds: int, shape: tuple[int, ...]) -> Box:
    """A Box of a dtype.

    Args:
        dtype: Its name.
        bounds: 0: as wide as the dtype; 1: narrow; 2: bounded on one side.
        shape: Of one value.
    """
    kind = np.dtype(dtype)
    if kind.kind == "b":
        low, high = False, True
    elif kind.kind == "f":
        low, high = ((-np.inf, np.inf), (-1.5, 2.0), (0.0, np.inf))[bounds]
    else:
        widest = np.iinfo(kind)
        low, high = ((widest.min, widest.max), (1, 100), (3, widest.max))[bounds]
    return Box(np.full(shape, low, kind), np.full(shape, high, kind), shape, kind.type)


shapes = st.sampled_from(SHAPES)
boxes = st.builds(box, st.sampled_from((*FLOATS, *FLOATS, "bool", *INTEGERS)), st.integers(0, 2), shapes)
discretes = st.builds(lambda n, start: Discrete(n, start=start), st.integers(1, 300), st.integers(-5, 5))
multi_discretes = st.builds(
    lambda sizes, start: MultiDiscrete(sizes, start=[start] * len(sizes)),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(-2, 2),
)
multi_binaries = st.sampled_from((1, 4, (2, 3))).map(MultiBinary)


class Palette(Space[frozenset[int]]):
    """A space of one's own: sets of colours."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> frozenset[int]:
        return frozenset(self.np_random.integers(9, size=3).tolist())

    def contains(self, x: Any) -> bool:
        return isinstance(x, frozenset) and all(0 <= colour < 9 for colour in x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Palette)

    __hash__ = None  # type: ignore[assignment]  # as all of Gymnasium's


objects = st.sampled_from(
    (
        Text(4),
        Text(3, charset="äöü", min_length=0),
        Sequence(Box(-1.0, 1.0, (2,), np.float32)),
        Sequence(Discrete(5), stack=True),
        OneOf([Discrete(3), Box(0, 255, (2,), np.uint8)]),
        Graph(Box(-1.0, 1.0, (2,), np.float32), Discrete(3)),
        Sequence(Dict({"name": Text(2), "bits": MultiBinary(2)})),
        Palette(),
    )
)
leaves = st.one_of(boxes, boxes, discretes, multi_discretes, multi_binaries, objects)


def nested(leaf: st.SearchStrategy[Space[Any]], depth: int = 2) -> st.SearchStrategy[Space[Any]]:
    """Leaves, and Dicts and Tuples of them."""
    if depth == 0:
        return leaf
    inner = nested(leaf, depth - 1)
    names = st.sampled_from(("a", "b", "observation", "x/y"))
    dicts = st.dictionaries(names, inner, max_size=2).map(Dict)
    return st.one_of(leaf, leaf, dicts, st.lists(inner, max_size=2).map(Tuple))


spaces = nested(leaves)
seats = st.builds(
    Seat,
    observation=spaces,
    action=st.one_of(discretes, multi_discretes, spaces),
    mask=st.sampled_from((None, "alone", "among", "info")),
)


@dataclass(frozen=True)
class Setup:
    """One vectorizer and one program of calls on it.

    Attributes:
        design: What its envs are like.
        n: How many there are.
        backend: One of `IN_PROCESS` or `PROCESSES`.
        workers: Threads or processes; more than envs counts as one per env.
        context: Start method of processes.
        mode: Autoreset mode.
        done_on: ``"all"`` or ``"any"``.
        copy: Whether results are copies.
        grouped: Whether one group, too, is a dict.
        validate: Whether observations are checked, if they are fit to be.
        state: Whether global states are told with each result, if there are any.
        seed: Of the program and of the first reset.
        calls: How many calls the program makes at least.
        episodes: How many episodes each env ends at least.
        restless: How often envs are reset whatever they are doing, 0 to 1.
    """

    design: Design
    n: int = 2
    backend: str = "sync"
    workers: int = 1
    context: str = "fork"
    mode: str = "same_step"
    done_on: str = "all"
    copy: bool = True
    grouped: bool = False
    validate: str = "off"
    state: bool = False
    seed: int = 0
    calls: int = 10
    episodes: int = 3
    restless: float = 0.1

    @property
    def tells_state(self) -> bool:
        return self.state and self.design.state is not None and self.design.api != "keyed"

    def make(self) -> VectorEnv:
        """The vectorizer."""
        options: dict[str, Any] = {}
        if self.backend != "sync":
            options["num_workers"] = min(self.workers, self.n)
        if self.backend in PROCESSES:
            options["context"] = self.context
        return vectorize(
            self.backend,
            factories_of(self.design, self.n),
            autoreset_mode=self.mode,
            done_on=self.done_on,
            copy=self.copy,
            grouped=self.grouped,
            validate="off" if self.design.wild else self.validate,
            state=self.tells_state,
            **options,
        )

    def reference(self) -> Reference:
        """What it must equal."""
        factories = factories_of(self.design, self.n, limited=False)
        return Reference(factories, self.mode, done_on=self.done_on, state=self.tells_state, limit=self.design.limit)


@st.composite
def designs(draw: st.DrawFn) -> Design:
    api = draw(st.sampled_from(APIS))
    kinds = draw(st.lists(seats, min_size=1, max_size=2))
    agents = [0] if api == "single" else draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=4))
    return Design(
        api,
        tuple(kinds[k] for k in agents),
        state=draw(st.one_of(boxes, boxes, st.none())),
        longest=draw(st.integers(1, 6)),
        limit=draw(st.sampled_from((None, None, 1, 3))),
        talk=draw(st.sampled_from((0.0, 0.2, 0.7))),
        wild=draw(st.booleans()),
        reuse=draw(st.booleans()),
        sloppy=draw(st.booleans()),
        flag=draw(st.booleans()),
    )


def setups(backends: abc.Sequence[str], **fixed: Any) -> st.SearchStrategy[Setup]:
    """Any setup.

    Args:
        backends: Which may be drawn.
        fixed: Strategies in place of those below.
    """
    drawn: dict[str, Any] = {
        "design": designs(),
        "n": st.integers(1, 4),
        "backend": st.sampled_from(backends),
        "workers": st.integers(1, 4),
        "mode": st.sampled_from(MODES),
        "done_on": st.sampled_from(("all", "all", "any")),
        "copy": st.booleans(),
        "grouped": st.booleans(),
        "validate": st.sampled_from(VALIDATE_MODES),
        "state": st.sampled_from((True, True, False)),
        "seed": st.integers(0, 2**63 - 1),
        "calls": st.integers(0, 25),
        "episodes": st.just(3),
        "restless": st.sampled_from((0.0, 0.1, 0.4)),
    }
    return st.builds(Setup, **(drawn | fixed))
