"""Pipelines: connectors in a row, editable, timed, and connectors themselves. What both sides share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, Generic, Self, TypeVar

from gymnasium.spaces import Space

from marlvec.connectors.connector import Connector, EnvIds, State
from marlvec.connectors.function import FunctionActionConnector, FunctionAgentConnector
from marlvec.connectors.leaf_spaces import space_summary
from marlvec.connectors.rows import Rows
from marlvec.connectors.stage import Stage, Timing
from marlvec.errors import ArgumentError, ContractError, StateError

__all__ = ["Pipeline", "Target"]

P = TypeVar("P", bound=Connector)
Target = int | str | type[Connector] | Connector
"""What picks a piece: its position, its name in the pipeline, a class that only it is of, or the piece itself."""


class Pipeline(Connector, Generic[P]):
    """Connectors that run one after the other; what `AgentPipeline` and `ActionPipeline` share.

    Edited like a list. Each piece has a name of its own: the one it asks for, or that with ``_2``, ``_3``, … where
    it is taken; names never change later. Wherever a target is asked for, it is a position, a name, a class that fits
    one piece, or the piece itself; a missing one raises KeyError.

    Every edit computes all spaces anew, in the pipelines around this one too; an edit that does not fit is taken back
    before its error is raised. A piece that enters takes over the pipeline's train/eval mode. State, also of whole
    pipelines inside, is kept by name.
    """

    _side: type[Connector]

    def __init__(self, pieces: Iterable[P] = ()) -> None:
        self._stages: tuple[Stage[P], ...] = ()
        self._space: Space[Any] | None = None
        self._owner: Pipeline[Any] | None = None
        self._agents: tuple[str, ...] = ()
        try:
            for piece in pieces:
                self.append(piece)
        except BaseException:
            self._hand_over(self, None)
            raise

    # --- calling

    def __call__(self, rows: Rows) -> Rows:
        """Run the pieces over ``rows``.

        Raises:
            StateError: The pipeline was not bound.
            ContractError: A piece returned something other than rows, or another number of them than it was given
                without declaring `changes_length`; names pipeline and piece.
            Exception: Whatever a piece raises, with a note that names pipeline and piece. The pieces before it have
                taken the rows in already: reset those envs before they are used again.
        """
        if self._space is None and self._stages:
            raise StateError(f"{self.name} is not bound: call bind(space) first")
        n = len(rows)
        for stage in self._stages:
            piece = stage.piece
            start = perf_counter_ns()
            try:
                out = piece(rows)
            except Exception as error:
                error.add_note(f"in connector {stage.name!r} of {self.name}")
                raise
            stage.ns += perf_counter_ns() - start
            stage.calls += 1
            if not isinstance(out, Rows):
                raise ContractError(
                    f"connector {stage.name!r} of {self.name} must return Rows, got {type(out).__name__}"
                )
            if len(out) != n:
                if not piece.changes_length:
                    raise ContractError(
                        f"connector {stage.name!r} of {self.name} got {n} rows and returned {len(out)}; "
                        f"one that may do so sets changes_length = True"
                    )
                n = len(out)
            rows = out
        return rows

    def reset(self, env_ids: EnvIds | None = None) -> None:
        for stage in self._stages:
            stage.piece.reset(env_ids)

    def on_policy_output(self, rows: Rows) -> None:
        for stage in self._stages:
            stage.piece.on_policy_output(rows)

    @property
    def timings(self) -> dict[str, Timing]:
        """Time spent in each piece, by name; all of it for a piece that is a pipeline."""
        return {stage.name: stage.timing for stage in self._stages}

    # --- editing

    def append(self, piece: P) -> None:
        """Add a piece at the end."""
        self._insert(len(self._stages), piece)

    def prepend(self, piece: P) -> None:
        """Add a piece at the front."""
        self._insert(0, piece)

    def insert_before(self, target: Target, piece: P) -> None:
        """Add a piece just before the target."""
        self._insert(self._find(target), piece)

    def insert_after(self, target: Target, piece: P) -> None:
        """Add a piece just after the target."""
        self._insert(self._find(target) + 1, piece)

    def remove(self, target: Target) -> P:
        """Take the target out and return it."""
        where = self._find(target)
        gone = self._stages[where].piece
        self._edit(self._stages[:where] + self._stages[where + 1 :])
        return gone

    def replace(self, target: Target, piece: P) -> P:
        """Put a piece in the target's place and return the old one."""
        where = self._find(target)
        before, after = self._stages[:where], self._stages[where + 1 :]
        gone = self._stages[where].piece
        self._edit((*before, self._admit(piece, (*before, *after)), *after))
        return gone

    def _insert(self, where: int, piece: P) -> None:
        stage = self._admit(piece, self._stages)
        self._edit((*self._stages[:where], stage, *self._stages[where:]))

    def _admit(self, piece: P, others: Sequence[Stage[P]]) -> Stage[P]:
        """Check that a piece may stand beside ``others`` and find it a name."""
        if not isinstance(piece, self._side):
            hint = ""
            if isinstance(piece, type):
                hint = "; give an instance, not the class"
            elif callable(piece) and not isinstance(piece, Connector):
                hint = "; decorate the function with @agent_connector or @action_connector"
            raise ArgumentError(f"{self.name} takes {self._side.__name__}s, got {piece!r}{hint}")
        root = self._root()
        if isinstance(piece, Pipeline) and (piece is root or piece._owner is not None):
            raise ArgumentError(f"{piece!r} is part of a pipeline already")
        mine = {id(p) for p in root._walk()} - {id(stage.piece) for stage in self._stages}
        mine |= {id(stage.piece) for stage in others}
        twice = [p for p in _with_inner(piece) if id(p) in mine]
        if twice and not isinstance(twice[0], (FunctionAgentConnector, FunctionActionConnector)):
            raise ArgumentError(f"{twice[0]!r} is in this pipeline already, and would see every row twice")
        taken = {stage.name for stage in others}
        name, count = piece.name, 1
        while name in taken:
            count += 1
            name = f"{piece.name}_{count}"
        return Stage(name, piece)

    def _edit(self, stages: tuple[Stage[P], ...]) -> None:
        """Put the stages in place and compute all spaces; on an error, as if nothing had happened."""
        old, root = self._stages, self._root()
        came = [s.piece for s in stages if s not in old]
        went = [s.piece for s in old if s not in stages]
        before = [(p, p.training, p.agents) for piece in came for p in _with_inner(piece)]
        try:
            self._put(stages)
            self._hand_over(came, self)
            root._refresh()
        except BaseException:
            self._put(old)
            self._hand_over(came, None)
            for piece, training, agents in before:
                piece.agents = agents
                piece.training = training
            root._refresh()
            raise
        for piece in went:
            if isinstance(piece, Pipeline):
                piece._owner = None

    def _put(self, stages: tuple[Stage[P], ...]) -> None:
        self._stages = stages
        at: Pipeline[Any] | None = self
        while at is not None:
            at.changes_length = any(stage.piece.changes_length for stage in at._stages)
            at = at._owner

    def _hand_over(self, pieces: Iterable[Connector], owner: Pipeline[Any] | None) -> None:
        for piece in pieces:
            if isinstance(piece, Pipeline):
                piece._owner = owner
            if owner is not None:
                _ = piece.train() if self.training else piece.eval()
                piece.agents = self.agents

    def _root(self) -> Pipeline[Any]:
        return self if self._owner is None else self._owner._root()

    def _walk(self) -> Iterator[Connector]:
        for stage in self._stages:
            yield stage.piece
            if isinstance(stage.piece, Pipeline):
                yield from stage.piece._walk()

    # --- looking

    def _find(self, target: Target) -> int:
        names = [stage.name for stage in self._stages]
        if isinstance(target, int):
            if -len(names) <= target < len(names):
                return target % len(names)
            raise KeyError(f"no position {target} in {self.name}; its {len(names)} connectors are {names}")
        if isinstance(target, str):
            if target in names:
                return names.index(target)
            raise KeyError(f"no connector {target!r} in {self.name}; its connectors are {names}")
        if isinstance(target, type):
            found = [i for i, stage in enumerate(self._stages) if isinstance(stage.piece, target)]
            if len(found) > 1:
                raise ArgumentError(f"{[names[i] for i in found]} are all {target.__name__}; say which by its name")
            what = target.__name__
        else:
            found = [i for i, stage in enumerate(self._stages) if stage.piece is target]
            what = repr(target)
        if not found:
            raise KeyError(f"no connector {what} in {self.name}; its connectors are {names}")
        return found[0]

    def __getitem__(self, target: Target) -> P:
        return self._stages[self._find(target)].piece

    def __contains__(self, target: object) -> bool:
        if isinstance(target, str):
            return any(stage.name == target for stage in self._stages)
        if isinstance(target, type):
            return any(isinstance(stage.piece, target) for stage in self._stages)
        return any(stage.piece is target for stage in self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[P]:
        return iter([stage.piece for stage in self._stages])

    def __bool__(self) -> bool:
        return True  # an empty pipeline is the identity, not nothing

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the pieces, in order."""
        return tuple(stage.name for stage in self._stages)

    def __repr__(self) -> str:
        return f"{type(self).__name__}([{', '.join(repr(stage.piece) for stage in self._stages)}])"

    def describe(self) -> str:
        """List the pieces and the spaces before, between and after them, one a line."""
        mode = "training" if self.training else "eval"
        if self._space is None:
            return "\n".join([f"{self.name} ({mode}, not bound)", *self._lines()])
        first = space_summary(self._spaces(self._space)[0])
        return "\n".join([f"{self.name} ({mode})", f"     {first}", *self._lines()])

    def _lines(self) -> list[str]:
        spaces = [] if self._space is None else self._spaces(self._space)
        lines = []
        for i, stage in enumerate(self._stages):
            if isinstance(stage.piece, Pipeline):
                lines.append(f"  {i}. {stage.name}")
                lines += [f"   {line}" for line in stage.piece._lines()]
                continue
            text = repr(stage.piece)
            lines.append(f"  {i}. {text}" if text.startswith(stage.name) else f"  {i}. {stage.name}: {text}")
            if spaces:
                lines.append(f"     {space_summary(spaces[i + 1])}")
        return lines

    # --- spaces

    def bind(self, space: Space[Any], agents: Sequence[str] = ()) -> None:
        """Fix the space at the pipeline's outer end and set every piece up.

        Args:
            space: Agent side: the space of one observation the env gives. Action side: of one action it takes.
            agents: Names of the env's agents in the order of ``agent_index``; needed by pieces that count them.

        Raises:
            ArgumentError: This pipeline is part of another one: bind that.
            UnsupportedSpaceError: A piece cannot work on the space that reaches it; a note names the piece.
        """
        if self._owner is not None:
            raise ArgumentError(f"{self.name} is part of {self._owner.name}; bind that one")
        old_space, old_agents = self._space, self.agents
        self._space, self.agents = space, tuple(agents)
        try:
            self._refresh()
        except BaseException:
            self._space, self.agents = old_space, old_agents
            self._refresh()
            raise

    @property
    def bound(self) -> bool:
        """Whether the space is known."""
        return self._space is not None

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the env's agents; set by `bind`."""
        return self._agents

    @agents.setter
    def agents(self, agents: tuple[str, ...]) -> None:
        self._agents = agents
        for stage in self._stages:
            stage.piece.agents = agents

    def setup(self, space: Space[Any]) -> None:
        self._space = space
        for stage, at in self._inputs(space):
            with self._naming(stage):
                stage.piece.setup(at)

    def _refresh(self) -> None:
        if self._space is not None:
            self._spaces(self._space)  # asks every piece first: where one refuses, no piece has been touched
            self.setup(self._space)

    @abstractmethod
    def _spaces(self, space: Space[Any]) -> list[Space[Any]]:
        """Spaces before, between and after the pieces, in the order of the pieces. Changes nothing."""

    @abstractmethod
    def _inputs(self, space: Space[Any]) -> list[tuple[Stage[P], Space[Any]]]:
        """Each piece with the space its `setup` wants, in the order to set them up."""

    @contextmanager
    def _naming(self, stage: Stage[P]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in connector {stage.name!r} of {self.name}")
            raise

    def _bound_space(self) -> Space[Any]:
        if self._space is None:
            raise StateError(f"{self.name} is not bound: call bind(space) first")
        return self._space

    # --- mode and state

    def train(self) -> Self:
        super().train()
        for stage in self._stages:
            stage.piece.train()
        return self

    def eval(self) -> Self:
        super().eval()
        for stage in self._stages:
            stage.piece.eval()
        return self

    def state_dict(self) -> State:
        return {stage.name: stage.piece.state_dict() for stage in self._stages}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load each piece's state by its name; an empty one leaves its piece alone.

        Raises:
            ArgumentError: The names are not those of this pipeline's pieces; nothing was loaded.
        """
        self._check_names(state)
        for stage in self._stages:
            if state[stage.name]:
                stage.piece.load_state_dict(state[stage.name])

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        for state in states:
            self._check_names(state)
        return {stage.name: stage.piece.merge_states([s[stage.name] for s in states]) for stage in self._stages}

    def _check_names(self, state: Mapping[str, Any]) -> None:
        if state.keys() != set(self.names):
            raise ArgumentError(f"{self.name} has the connectors {list(self.names)}, the state is of {list(state)}")

    def params(self) -> dict[str, Any]:
        return {"pieces": list(self)}


def _with_inner(piece: Connector) -> list[Connector]:
    return [piece, *piece._walk()] if isinstance(piece, Pipeline) else [piece]
