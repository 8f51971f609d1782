"""`Pipeline`: a chain of connectors as one connector, bound to spaces; how it is saved; the agent and learner chain."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from reprlib import repr as short
from time import perf_counter_ns
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeGuard, TypeVar

from gymnasium.spaces import Space

from marlvec.connectors.connector import (
    AgentConnector,
    Connector,
    EnvIds,
    LearnerConnector,
    State,
    holds,
    is_left_out,
    overrides,
)
from marlvec.connectors.function import FunctionConnector
from marlvec.connectors.leafwise import space_summary
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, CheckpointError, ContractError, RegistryError, StateError
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.values import Config, decode, encode, outline
from marlvec.spaces import describe_difference

P = TypeVar("P", bound=Connector)


class Timing(NamedTuple):
    """Time spent in one piece of a pipeline, over all calls."""

    seconds: float
    calls: int


class Stage(Generic[P]):
    """A piece, its name in the pipeline, and its timer."""

    __slots__ = ("calls", "change", "is_checked", "name", "ns", "piece")

    def __init__(self, name: str, piece: P) -> None:
        self.name, self.piece = name, piece
        ours = type(piece).__module__.startswith("marlvec.connectors.") and not isinstance(piece, FunctionConnector)
        self.is_checked = not ours  # results of user code are checked
        self.ns = self.calls = 0
        self.change: Any = None  # action side: writes the changes of a user's piece into ``actions_executed``

    @property
    def timing(self) -> Timing:
        """Time spent in the piece so far; for a pipeline, in all of its pieces."""
        if isinstance(self.piece, Pipeline) and not self.is_checked:
            inner = self.piece.timings.values()
            return Timing(sum(one.seconds for one in inner), max((one.calls for one in inner), default=0))
        return Timing(self.ns * 1e-9, self.calls)

    def is_meant_by(self, target: object) -> bool:
        """Return whether ``target`` is the piece's name, its class or a base of it, or the piece."""
        if isinstance(target, str):
            return self.name == target
        return isinstance(self.piece, target) if isinstance(target, type) else self.piece is target


Target = int | str | type[Connector] | Connector
"""What picks a piece: its position, its name in the chain, a class that only it is of, or the piece itself."""


class _Program(NamedTuple):
    """Compiled form of a chain, with inner pipelines expanded."""

    stages: tuple[Stage[Any], ...]  # that a call runs, in order
    watchful: tuple[Connector, ...]  # pieces that override `on_policy_output`
    forgetful: tuple[Connector, ...]  # pieces that override `reset`
    only_converts: bool  # all stages only convert


def with_inner(piece: Connector) -> list[Connector]:
    """List a piece and, if it is a chain, all pieces in it, outer pieces first."""
    inner = piece if isinstance(piece, Pipeline) else ()
    return [piece, *(found for part in inner for found in with_inner(part))]


def _shared(name: str) -> Any:
    """Make a property that a pipeline shares with its pieces: assignments go to all of them."""

    def read(pipeline: Pipeline[Any]) -> Any:
        return vars(pipeline).get(name, getattr(Connector, name))

    def write(pipeline: Pipeline[Any], value: Any) -> None:
        vars(pipeline)[name] = value
        for stage in pipeline._stages:
            setattr(stage.piece, name, value)

    return property(read, write, doc=f"`Connector.{name}`, of all pieces as well.")


class Pipeline(Connector, Generic[P]):
    """Connectors that run one after the other; base of all three sides.

    Edited like a list. Each piece has a unique name: its own, with ``_2``, ``_3``, … if that is taken; names never
    change later. A target is a position, a name, a class of exactly one piece, or the piece itself; a missing target
    raises KeyError.

    Every edit recomputes all spaces, in outer pipelines too; an invalid edit is undone before its error is raised. A
    new piece gets the pipeline's train/eval mode, agents and action space. State, also of inner pipelines, is kept by
    name.

    Args:
        pieces: Connectors of this side, functions made into one, or pipelines, in the order in which they run.
    """

    agents: tuple[str, ...] = _shared("agents")
    """Names of the env's agents; set by `bind`."""
    action_space: Space[Any] | None = _shared("action_space")
    """Space of one action of the policy; set by `bind`."""
    policy_id: str | None = _shared("policy_id")
    """Id of the policy it belongs to; set by the collector."""

    edits: ClassVar[int] = 0
    """Counts edits of all pipelines and settings of their spaces: what follows from pieces may be another after one."""

    _side: type[Connector]
    _section: str = ""  # of a file of `save_policy`
    _needs_space: bool = True  # False: also runs unbound
    _starts_last: bool = False  # whether the space passes through the last piece first

    def __init__(self, pieces: Iterable[P] = ()) -> None:
        self._stages: tuple[Stage[P], ...] = ()
        self._program: _Program | None = None
        self._space: Space[Any] | None = None
        self._owner: Pipeline[Any] | None = None
        self._run_seed: int | None = None  # of the collector it belongs to
        if not isinstance(pieces, Iterable):
            raise ArgumentError(f"{type(self).__name__} takes a list of connectors, got {pieces!r:.200}")
        try:
            for piece in pieces:
                self.append(piece)
        except BaseException:
            _set_owner(self, None)
            raise

    @classmethod
    def default(cls) -> Self:
        """Build the default chain; it has connectors on the action side only."""
        return cls()

    # --- calling

    def __call__(self, rows: Rows) -> Rows:
        """Run the pieces over ``rows``.

        Raises:
            StateError: The pipeline was not bound.
            ContractError: A piece returned something other than rows, or another number of rows without declaring
                `changes_length`; names pipeline and piece.
            Exception: Raised by a piece, with a note that names pipeline and piece. Earlier pieces have already
                processed the rows: reset these envs before they are used again.
        """
        if self._space is None and self._stages and self._needs_space:
            raise self._not_bound()
        breach: ContractError | None = None
        start = perf_counter_ns()
        try:
            for stage in (self._program or self._compile()).stages:
                out = stage.piece(rows)
                now = perf_counter_ns()
                stage.ns += now - start
                stage.calls += 1
                start = now
                if stage.is_checked:
                    if out is not rows and (breach := self._breach(stage, rows, out)):
                        raise breach
                    out = self._noted(stage, rows, out)
                rows = out
        except Exception as error:
            for where in self._path_to(stage)[error is breach :]:  # a breach names the piece itself
                error.add_note(f"in {where}")
            raise
        return rows

    def _breach(self, stage: Stage[Any], rows: Rows, out: Any) -> ContractError | None:
        if not isinstance(out, Rows):
            return ContractError(f"{self._path_to(stage)[0]} must return Rows, got {type(out).__name__}")
        if len(out) != len(rows) and not stage.piece.changes_length:
            return ContractError(
                f"{self._path_to(stage)[0]} got {len(rows)} rows and returned {len(out)}; "
                f"one that may do so sets changes_length = True"
            )
        return None

    def _noted(self, stage: Stage[Any], before: Rows, after: Rows) -> Rows:
        """Return rows behind a user's piece; the action side also notes the change that it made."""
        return after

    def reset(self, env_ids: EnvIds | None = None) -> None:
        for piece in (self._program or self._compile()).forgetful:
            piece.reset(env_ids)

    @property
    def is_forgetful(self) -> bool:
        """Whether any piece overrides `reset`."""
        own = type(self).reset is not Pipeline.reset
        return own or bool((self._program or self._compile()).forgetful)

    @property
    def is_watchful(self) -> bool:
        """Whether any piece overrides `on_policy_output`."""
        own = type(self).on_policy_output is not Pipeline.on_policy_output
        return own or bool((self._program or self._compile()).watchful)

    @property
    def policy_columns(self) -> tuple[str, ...]:
        """Columns of the policy's output that any piece needs in every row."""
        watchful = (self._program or self._compile()).watchful
        return tuple(dict.fromkeys(name for piece in watchful for name in piece.policy_columns))

    def on_policy_output(self, rows: Rows) -> None:
        for piece in (self._program or self._compile()).watchful:
            piece.on_policy_output(rows)

    def _compile(self) -> _Program:
        """Compile the chain; calls use the result until a piece or a space changes."""
        flat = list(self._flat())
        self._program = program = _Program(
            tuple(stage for stage in flat if not is_left_out(stage.piece)),
            tuple(stage.piece for stage in flat if overrides(stage.piece, "on_policy_output")),
            tuple(stage.piece for stage in flat if overrides(stage.piece, "reset")),
            all(is_left_out(stage.piece) or holds(stage.piece, "only_converts") for stage in flat),
        )
        return program

    def _flat(self) -> Iterator[Stage[Any]]:
        """Return the stages, with marlvec's inner pipelines expanded."""
        for stage in self._stages:
            if isinstance(stage.piece, Pipeline) and not stage.is_checked:
                yield from stage.piece._flat()
            else:
                yield stage

    def _path_to(self, stage: Stage[Any]) -> list[str]:
        """Return a stage's place for messages: pipeline by pipeline, from inside out."""
        for own in self._stages:
            here = f"connector {own.name!r} of {self.name}"
            if own is stage:
                return [here]
            if isinstance(own.piece, Pipeline) and (path := own.piece._path_to(stage)):
                return [*path, here]
        return []

    @property
    def timings(self) -> dict[str, Timing]:
        """Time spent in each piece, by name; for an inner pipeline the total.

        Pieces that change nothing (`Connector.is_identity`) are not called, and count no calls. Nor are pieces that
        only convert (`Connector.only_converts`), if all pieces only convert and the policy answers with one array in
        the env's form, with or without columns that are arrays.
        """
        return {stage.name: stage.timing for stage in self._stages}

    # --- reading

    def _find(self, target: Target) -> int:
        names = list(self.names)
        if isinstance(target, int):
            if -len(names) <= target < len(names):
                return target % len(names)
            raise KeyError(f"no position {target} in {self.name}; its {len(names)} connectors are {names}")
        found = [i for i, stage in enumerate(self._stages) if stage.is_meant_by(target)]
        if not found:
            what = target.__name__ if isinstance(target, type) else repr(target)
            raise KeyError(f"no connector {what} in {self.name}; its connectors are {names}")
        if isinstance(target, type) and len(found) > 1:
            raise ArgumentError(f"{[names[i] for i in found]} are all {target.__name__}; say which by its name")
        return found[0]

    def __getitem__(self, target: Target) -> P:
        return self._stages[self._find(target)].piece

    def __contains__(self, target: object) -> bool:
        return any(stage.is_meant_by(target) for stage in self._stages)

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
        """Load each piece's state by its name; an empty state leaves its piece unchanged.

        Raises:
            ArgumentError: The names are not this pipeline's, or a state does not fit its piece; nothing was loaded.
        """
        self._check_names(state)
        before: list[tuple[P, State]] = []
        try:
            for stage in self._stages:
                if state[stage.name]:
                    with self._naming(stage):
                        before.append((stage.piece, stage.piece.state_dict()))
                        stage.piece.load_state_dict(state[stage.name])
        except BaseException:
            for piece, old in before:
                if old:
                    piece.load_state_dict(old)
            raise

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        for state in states:
            self._check_names(state)
        return {stage.name: stage.piece.merge_states([s[stage.name] for s in states]) for stage in self._stages}

    def hand_over(self) -> State:
        return {stage.name: stage.piece.hand_over() for stage in self._stages}

    def take_merged(self, state: Mapping[str, Any]) -> None:
        self._check_names(state)
        for stage in self._stages:
            with self._naming(stage):
                stage.piece.take_merged(state[stage.name])

    def _check_names(self, state: Mapping[str, Any]) -> None:
        if state.keys() != set(self.names):
            raise ArgumentError(
                f"{self.name}: expected a state of the connectors {list(self.names)}, got {list(state)}"
            )

    def follow_run(self, run_seed: int | None) -> None:
        self._run_seed = run_seed
        for stage in self._stages:
            stage.piece.follow_run(run_seed)

    def params(self) -> dict[str, Any]:
        return {"pieces": list(self)}

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
        """Remove the target and return it."""
        where = self._find(target)
        gone = self._stages[where].piece
        self._edit(self._stages[:where] + self._stages[where + 1 :])
        return gone

    def replace(self, target: Target, piece: P) -> P:
        """Replace the target by a piece; return the old piece."""
        where = self._find(target)
        before, after = self._stages[:where], self._stages[where + 1 :]
        gone = self._stages[where].piece
        self._edit((*before, self._admit(piece, (*before, *after)), *after))
        return gone

    def _insert(self, where: int, piece: P) -> None:
        stage = self._admit(piece, self._stages)
        self._edit((*self._stages[:where], stage, *self._stages[where:]))

    def _admit(self, piece: P, others: Sequence[Stage[P]]) -> Stage[P]:
        """Check that a piece may join ``others``, and choose its name."""
        if not isinstance(piece, self._side):
            hint = ""
            if isinstance(piece, type):
                hint = "; give an instance, not the class"
            elif callable(piece) and not isinstance(piece, Connector):
                hint = "; decorate the function with @agent_connector, @action_connector or @learner_connector"
            elif isinstance(piece, Connector):
                sides = {"AgentConnector": "agent", "ActionConnector": "action", "LearnerConnector": "learner"}
                own = [side for base in type(piece).__mro__ if (side := sides.get(base.__name__))]
                hint = f"; it belongs into {own[0]}_connectors" if own else ""
            raise ArgumentError(f"{self.name} takes {self._side.__name__}s, got {piece!r}{hint}")
        root = self._root()
        if isinstance(piece, Pipeline) and (piece is root or piece._owner is not None):
            raise ArgumentError(f"{piece!r} is part of a pipeline already")
        mine = {id(p) for p in with_inner(root)} - {id(stage.piece) for stage in self._stages}
        mine |= {id(stage.piece) for stage in others}
        twice = [p for p in with_inner(piece) if id(p) in mine]
        if twice and not isinstance(twice[0], FunctionConnector):
            raise ArgumentError(f"{twice[0]!r} is in this pipeline already, and would see every row twice")
        taken = {stage.name for stage in others}
        names = chain([piece.name], (f"{piece.name}_{i}" for i in count(2)))
        return Stage(next(name for name in names if name not in taken), piece)

    def _edit(self, stages: tuple[Stage[P], ...]) -> None:
        """Install the stages and compute all spaces; on an error undo everything."""
        old, root = self._stages, self._root()
        came = [s.piece for s in stages if s not in old]
        went = [s.piece for s in old if s not in stages]
        before = [(part, vars(part).copy()) for piece in came for part in with_inner(piece)]
        try:
            self._put(stages)
            _set_owner(came, self)
            for piece in came:
                _ = piece.train() if self.training else piece.eval()
                piece.agents, piece.action_space, piece.policy_id = self.agents, self.action_space, self.policy_id
                piece.follow_run(self._run_seed)
            root._refresh()
        except BaseException:
            self._put(old)
            for part, attributes in before:
                part.__dict__ = attributes
            root._refresh()
            raise
        _set_owner(went, None)

    def _put(self, stages: tuple[Stage[P], ...]) -> None:
        self._stages = stages
        at: Pipeline[Any] | None = self
        while at is not None:
            at._program = None
            Pipeline.edits += 1
            at.changes_length = any(stage.piece.changes_length for stage in at._stages)
            at.across_agents = any(stage.piece.across_agents for stage in at._stages)
            at = at._owner

    def _root(self) -> Pipeline[Any]:
        return self if self._owner is None else self._owner._root()

    def describe(self) -> str:
        """List the pieces and, if they have spaces, the spaces before, between and after them, one per line."""
        head = f"{self.name} ({'training' if self.training else 'eval'}"
        if self._space is None or not self._needs_space:
            return "\n".join([f"{head}, not bound)" if self._needs_space else f"{head})", *self._lines()])
        first = self._spaces(self._space)[-1 if self._starts_last else 0]
        return "\n".join([f"{head})", f"     {space_summary(first)}", *self._lines()])

    def _lines(self) -> list[str]:
        spaces = self._spaces(self._space) if self._space is not None and self._needs_space else []
        if self._starts_last:
            spaces.reverse()
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

    # --- configs and files

    def _config_parts(self) -> Config:
        return {"pieces": [stage.piece.to_config() for stage in self._stages], "names": list(self.names)}

    @classmethod
    def _from_parts(cls, config: Mapping[str, Any]) -> Self:
        pieces: list[Any] = [cls._side.from_config(piece) for piece in config["pieces"]]
        pipeline = cls(pieces)
        names = config["names"]
        if len(set(names)) != len(pipeline) or not all(type(name) is str for name in names):
            raise ArgumentError(f"expected a name for each of the {len(pipeline)} connectors, got {short(names)}")
        for stage, name in zip(pipeline._stages, names, strict=True):
            stage.name = name
        return pipeline

    def save(self, path: FilePath) -> None:
        """Save the pipeline as one ``.npz``: its pieces, their states, its spaces and mode.

        The file is written atomically. It holds data only: numbers, text, arrays.

        Args:
            path: The file; an existing file is replaced.

        Raises:
            ArgumentError: This pipeline is part of another pipeline: save the outer one.
            SerialisationError: A class, or a function among the arguments, is not registered (`register_connector`,
                `register_function`), or an argument, a state or a space is of a kind that no data file can hold.
            OSError: The file cannot be written; an existing file is unchanged.
        """
        write_archive(path, self.pack())

    def pack(self) -> Config:
        """Return what `save` writes, for a file that also holds other things.

        Returns:
            Its pieces, their states, its spaces and mode, as JSON data and arrays.

        Raises:
            ArgumentError, SerialisationError: As `save`.
        """
        if self._owner is not None:
            raise ArgumentError(f"{self.name} is part of {self._owner.name}; save {self._owner.name}")
        return self._saved().pack()

    @classmethod
    def load(cls, path: FilePath) -> Self:
        """Build a saved pipeline, which continues like the original.

        First import the modules that register its classes and functions. Loading executes no code from the file.

        Args:
            path: A file of `save`; or of `marlvec.policies.save_policy`, which holds a policy and its pipelines.

        Returns:
            The pipeline with its state.

        Raises:
            CheckpointError: The file is damaged, of another class, or of another version; the text has the reason.
            RegistryError: A class or function in it is not registered here.
        """
        saved = SavedPipeline.read(path, cls._section)
        with explained(path):
            pipeline = cls.from_config(saved.config)
            if saved.space is not None:
                pipeline.bind(saved.space, saved.agents, saved.action_space)
            pipeline._take_over(saved)
        return pipeline

    def restore(self, path: FilePath) -> None:
        """Load state and mode of a saved pipeline with equal pieces, spaces and agents.

        Raises:
            CheckpointError: The file is damaged, or of another pipeline; names the difference. Nothing has changed.
            SerialisationError: This pipeline cannot be saved, so the two cannot be compared.
        """
        saved = SavedPipeline.read(path, self._section)
        saved.check_same(self._saved(), path)
        with explained(path):
            self._take_over(saved)

    def _saved(self) -> SavedPipeline:
        training = [piece.training for piece in with_inner(self)]
        return SavedPipeline(self.to_config(), self.state_dict(), training, self._space, self.agents, self.action_space)

    def _take_over(self, saved: SavedPipeline) -> None:
        modes = list(zip(with_inner(self), saved.training, strict=True))
        self.load_state_dict(saved.state)
        self._forget_unsaved(saved.state)
        for piece, training in modes:
            piece.training = training

    def _forget_unsaved(self, state: Mapping[str, Any]) -> None:
        """Clear pieces that were saved without state, which `load_state_dict` skips."""
        for stage in self._stages:
            if isinstance(stage.piece, Pipeline):
                stage.piece._forget_unsaved(state[stage.name])
            elif not state[stage.name] and stage.piece.state_dict():
                stage.piece.load_state_dict({})

    # --- spaces

    def bind(self, space: Space[Any], agents: Sequence[str] = (), action_space: Space[Any] | None = None) -> None:
        """Fix the space at the pipeline's outer end and set every piece up.

        Args:
            space: Agent side: the space of one env observation. Action side: the space of one env action.
            agents: Names of the env's agents in the order of ``agent_index``; needed by pieces that count them.
            action_space: Space of one action of the policy; needed by pieces that store actions. The action side
                computes it itself.

        Raises:
            ArgumentError: This pipeline is part of another pipeline: bind the outer one.
            UnsupportedSpaceError: A piece does not support its input space; a note names the piece.
        """
        if self._owner is not None:
            raise ArgumentError(f"{self.name} is part of {self._owner.name}; bind {self._owner.name}")
        old = self._space, self.agents, self.action_space
        self._space, self.agents, self.action_space = space, tuple(agents), action_space
        try:
            self._refresh()
        except BaseException:
            self._space, self.agents, self.action_space = old
            self._refresh()
            raise

    @property
    def bound(self) -> bool:
        """Whether the space is known."""
        return self._space is not None

    def setup(self, space: Space[Any]) -> None:
        self._space = space
        spaces = self._spaces(space)  # computes all spaces first: if a piece raises, no piece has changed
        for stage, at in zip(self._order, spaces, strict=False):
            with self._naming(stage):
                stage.piece.setup(at)
        around: Pipeline[Any] | None = self
        while around is not None:  # which pieces change nothing depends on the space
            around._program = None
            Pipeline.edits += 1
            around = around._owner

    def _refresh(self) -> None:
        if self._space is not None:
            self.setup(self._space)

    @property
    def _order(self) -> tuple[Stage[P], ...]:
        """The stages in the order in which spaces pass through them, and in which they are set up."""
        return self._stages[::-1] if self._starts_last else self._stages

    def _spaces(self, space: Space[Any]) -> list[Space[Any]]:
        """Return ``space``, and the space past each piece, in their `_order`. Changes nothing."""
        spaces = [space]
        for stage in self._order:
            with self._naming(stage):
                spaces.append(self._past(stage.piece, spaces[-1]))
        return spaces

    @abstractmethod
    def _past(self, piece: P, space: Space[Any]) -> Space[Any]:
        """Return the space past a piece."""

    @contextmanager
    def _naming(self, stage: Stage[P]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"in connector {stage.name!r} of {self.name}")
            raise

    def _bound_space(self) -> Space[Any]:
        if self._space is None:
            raise self._not_bound()
        return self._space

    def _not_bound(self) -> StateError:
        return StateError(f"{self.name} is not bound: call bind(space) first")


def _set_owner(pieces: Iterable[Connector], owner: Pipeline[Any] | None) -> None:
    for piece in pieces:
        if isinstance(piece, Pipeline):
            piece._owner = owner


_SAVE_AGAIN = (
    "an earlier save_policy() wrote it: load this state (load_policy) into the connectors that it is of, and "
    "save_policy() with them again"
)


def is_packed(found: Any) -> TypeGuard[Config]:
    """Return whether data are a whole pipeline from `SavedPipeline.pack`, not just its state."""
    return isinstance(found, dict) and found.keys() >= {"config", "state", "training"}


@contextmanager
def explained(path: FilePath) -> Iterator[None]:
    """Convert errors of building a pipeline from a valid file (other versions, for one) to `CheckpointError`."""
    try:
        yield
    except (CheckpointError, RegistryError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(path, f"cannot be built here: {error!r:.500}") from error


@dataclass(frozen=True, slots=True)
class SavedPipeline:
    """Complete content of a pipeline at one moment; spaces are None if it is unbound."""

    config: Config  # from `Connector.to_config`
    state: State
    training: list[bool]  # mode of the pipeline and each piece, outer pieces first
    space: Space[Any] | None
    agents: tuple[str, ...]
    action_space: Space[Any] | None

    def pack(self) -> Config:
        """Return the content as data for `write_archive`."""
        parts = {
            "state": encode(self.state, "the state"),
            "training": self.training,
            "space": encode(self.space, "the space"),
            "agents": list(self.agents),
            "action_space": encode(self.action_space, "the action space"),
        }
        return {"config": self.config, **parts}

    @classmethod
    def read(cls, path: FilePath, section: str) -> Self:
        """Read a file of `Pipeline.save`, or the section of a file of `save_policy`."""
        found = read_archive(path)
        if "config" not in found and section in found:
            found = found[section]
            if not is_packed(found):
                raise CheckpointError(path, f"holds a state of {section} without their configuration; {_SAVE_AGAIN}")
        with explained(path):
            decoded = {key: decode(found[key]) for key in ("state", "space", "action_space")}
            return cls(config=found["config"], training=found["training"], agents=tuple(found["agents"]), **decoded)

    def check_same(self, own: SavedPipeline, path: FilePath) -> None:
        """Raise CheckpointError, with the difference, if this content of a file does not fit an existing pipeline."""
        if own.space is None and self.space is not None:
            raise CheckpointError(
                path, "is of a bound pipeline, this one is not bound: call bind() first, or reset() of its Collector"
            )
        if own.agents != self.agents:
            raise CheckpointError(path, f"expected the agents {list(own.agents)}, got {list(self.agents)}")
        for what in ("space", "action_space"):
            mine, other = getattr(own, what), getattr(self, what)
            if mine is None or other is None:
                difference = None if mine is other else f"expected {mine}, got {other}"
            else:
                difference = describe_difference(mine, other)
            if difference is not None:
                raise CheckpointError(path, f"is of another {what.replace('_', ' ')}: {difference}")
        lines = list(difflib.unified_diff(outline(own.config), outline(self.config), "here", "file", n=2, lineterm=""))
        if lines:
            raise CheckpointError(path, "\n".join(["is of another pipeline:", *lines]))


class AgentPipeline(Pipeline[AgentConnector], AgentConnector):
    """A chain of agent connectors: from the envs' rows to the policy's rows.

    Bound to the space of one observation: ``pipeline.bind(envs.agent_observation_space(0), envs.agents)``.

    Args:
        pieces: Agent connectors, first to last.
    """

    _side = AgentConnector
    _section = "agent_connectors"

    @property
    def is_identity(self) -> bool:
        return type(self).__call__ is Pipeline.__call__ and not (self._program or self._compile()).stages

    @property
    def input_space(self) -> Space[Any]:
        """Space of one observation before the first piece."""
        return self._bound_space()

    @property
    def output_space_(self) -> Space[Any]:
        """Space of one observation after the last piece."""
        return self._spaces(self._bound_space())[-1]

    def output_space(self, space: Space[Any]) -> Space[Any]:
        return self._spaces(space)[-1]

    def _past(self, piece: AgentConnector, space: Space[Any]) -> Space[Any]:
        return piece.output_space(space)


class LearnerPipeline(Pipeline[LearnerConnector], LearnerConnector):
    """A chain of learner connectors: from a finished batch's rows to the rows to learn from.

    It needs no space and so no `bind`: ``pipeline(batch["main"])``.

    Args:
        pieces: Learner connectors, first to last.
    """

    _side = LearnerConnector
    _needs_space = False

    def see_batch(self, batch: Mapping[str, Rows]) -> None:
        for stage in self._stages:
            with self._naming(stage):
                stage.piece.see_batch(batch)

    def _past(self, piece: LearnerConnector, space: Space[Any]) -> Space[Any]:
        return space
