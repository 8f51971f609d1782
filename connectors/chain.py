"""Chains: connectors in a row, each with a name and a timer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from marlvec.connectors.connector import Connector, EnvIds, State
from marlvec.connectors.rows import Rows
from marlvec.connectors.stage import Stage, Timing
from marlvec.errors import ArgumentError

__all__ = ["Chain", "Target", "with_inner"]

P = TypeVar("P", bound=Connector)
Target = int | str | type[Connector] | Connector
"""What picks a piece: its position, its name in the chain, a class that only it is of, or the piece itself."""


class Chain(Connector, Generic[P]):
    """Named pieces in a row: what a `Pipeline` can be asked, and what it passes on to each of its pieces."""

    def __init__(self) -> None:
        self._stages: tuple[Stage[P], ...] = ()

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

    def _walk(self) -> Iterator[Connector]:
        for stage in self._stages:
            yield stage.piece
            if isinstance(stage.piece, Chain):
                yield from stage.piece._walk()

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
            ArgumentError: The names are not those of this pipeline's pieces, or a state is not its piece's; then
                nothing was loaded.
        """
        self._check_names(state)
        before: list[tuple[P, State]] = []
        try:
            for stage in self._stages:
                if state[stage.name]:
                    before.append((stage.piece, stage.piece.state_dict()))
                    stage.piece.load_state_dict(state[stage.name])
        except BaseException as error:
            error.add_note(f"in connector {stage.name!r} of {self.name}")
            for piece, old in before:
                if old:
                    piece.load_state_dict(old)
            raise

    def merge_states(self, states: Sequence[Mapping[str, Any]]) -> State:
        for state in states:
            self._check_names(state)
        return {stage.name: stage.piece.merge_states([s[stage.name] for s in states]) for stage in self._stages}

    def _check_names(self, state: Mapping[str, Any]) -> None:
        if state.keys() != set(self.names):
            raise ArgumentError(f"{self.name} has the connectors {list(self.names)}, the state is of {list(state)}")

    def params(self) -> dict[str, Any]:
        return {"pieces": list(self)}


def with_inner(piece: Connector) -> list[Connector]:
    """List a piece and, if it is a chain, all that it holds, outer ones first."""
    return [piece, *piece._walk()] if isinstance(piece, Chain) else [piece]
