"""`OpponentPool`: frozen snapshots of policies, in memory and in a folder; rules for who is added and who leaves."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote

import numpy as np
from gymnasium.spaces import Space
from numpy.typing import NDArray

from marlvec.arguments import count_from
from marlvec.collect import Collector
from marlvec.connectors import ActionPipeline, AgentPipeline, Rows
from marlvec.errors import ArgumentError, CheckpointError, MarlvecError, StateError
from marlvec.policies import ObjectPolicy, Policy, PolicyLike, RandomPolicy, as_policy, load_policy
from marlvec.policies.policy import PolicyOutput, PolicyState
from marlvec.selfplay.ratings import Ratings
from marlvec.selfplay.results import MatchTable, WinCount
from marlvec.serialization.archive import read_archive, write_archive
from marlvec.serialization.atomic_file import FilePath
from marlvec.serialization.records import Count, from_plain, read_fields, to_plain
from marlvec.serialization.saved import check_value
from marlvec.serialization.values import decode, encode

if TYPE_CHECKING:
    from marlvec.selfplay.results import RatingTracker


MakePolicy = Callable[[], PolicyLike]
"""Builds a policy in its initial form: two policies of a kind differ only in their state."""


@dataclass(frozen=True)
class Opponent:
    """A frozen snapshot of a policy, stored in files.

    Attributes:
        opponent_id: Its id, in its pool and in collectors.
        of: Id of the learner it is a snapshot of, or a name given to it.
        step: When it was taken, in steps of its pool.
        anchor: Whether it never leaves its pool.
        make: Builds such a policy.
        files: Files of its policy, agent connectors and action connectors; None: default connectors.
    """

    opponent_id: str
    of: str
    step: int
    anchor: bool
    make: MakePolicy
    files: tuple[Path, Path | None, Path | None]

    @classmethod
    def from_file(cls, path: FilePath, make: MakePolicy, *, opponent_id: str | None = None) -> Self:
        """Make an opponent, in no pool, of a file of `marlvec.policies.save_policy`; executes nothing from it.

            best = Opponent.from_file("best.npz", make_net)
            evaluate_match({"best": best, "random": RandomPolicy()}, "connect_four", 400)

        Args:
            path: The file. It is read again when the policy and its connectors are built.
            make: Builds the policy in its initial form.
            opponent_id: Its id; None: the file's name without its ending.

        Returns:
            The opponent, with the connectors in the file.

        Raises:
            CheckpointError: The file is missing or damaged, or holds no policy.
            ArgumentError: ``make`` is not a function.
        """
        if not callable(make):
            raise ArgumentError(f"make must be a function that builds a policy, got {make!r:.200}")
        file, found = Path(path), load_policy(path)
        chains = (found.agent_connectors, found.action_connectors)
        agent, action = (None if state is None else file for state in chains)
        name = file.stem if opponent_id is None else opponent_id
        return cls(name, name, 0, False, make, (file, agent, action))

    @property
    def digest(self) -> str:
        """SHA-256 over its files: equal if their contents are."""
        combined = hashlib.sha256()
        for file in self.files:
            combined.update(b"-" if file is None else hashlib.sha256(file.read_bytes()).digest())
        return combined.hexdigest()

    def policy_state(self) -> PolicyState:
        """Return a copy of the policy's stored `Policy.state_dict`.

        Returns:
            Numbers, texts, arrays, and dicts, lists and tuples of these.

        Raises:
            CheckpointError: Its file is damaged or missing.
        """
        return self.read()[0]

    def read(self) -> tuple[PolicyState, int]:
        """Return the policy's state and version."""
        found = read_archive(self.files[0])
        try:
            return decode(found["state"]), decode(found["version"])
        except KeyError as error:
            raise CheckpointError(self.files[0], f"holds no opponent: {error!r}") from error

    def policy(self) -> FrozenPolicy:
        """Return a policy with its weights; each call builds another one."""
        return FrozenPolicy(self)

    def agent_connectors(self) -> AgentPipeline:
        """Return its connectors with their learned state, in eval mode; default connectors if it has none."""
        if self.files[1] is None:
            return AgentPipeline.default()
        pipeline = AgentPipeline.load(self.files[1]).eval()
        pipeline.reset()  # files of `save_policy` have its memory of running episodes
        return pipeline

    def action_connectors(self) -> ActionPipeline:
        """Return its action connectors with their learned state, in eval mode; default connectors if it has none."""
        if self.files[2] is None:
            return ActionPipeline.default()
        pipeline = ActionPipeline.load(self.files[2]).eval()
        pipeline.reset()
        return pipeline

    def pack(self) -> dict[str, Any]:
        """Return it as plain data, with the contents of its files.

        Returns:
            Numbers, texts and arrays of bytes.

        Raises:
            CheckpointError: A file is missing.
        """
        return {
            "id": self.opponent_id,
            "of": self.of,
            "step": self.step,
            "anchor": self.anchor,
            "random": self.make is RandomPolicy,
            "files": [None if file is None else _content(file) for file in self.files],
        }

    def is_packed(self, packed: Mapping[str, Any]) -> bool:
        """Return whether `packed`, data from `pack` of any opponent, equals this opponent's, including the files."""
        own = self.pack()
        files = [[None if file is None else bytes(file) for file in one["files"]] for one in (own, packed)]
        return files[0] == files[1] and all(packed[name] == own[name] for name in own.keys() - {"files"})


def _content(file: Path) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(file.read_bytes(), np.uint8)
    except OSError as error:
        raise CheckpointError(file, f"cannot be read: {error.strerror or error}") from error


class FrozenPolicy(Policy):
    """An opponent's policy: `setup` builds it, loads weights from its file, which is never written to, and seeds it."""

    def __init__(self, opponent: Opponent) -> None:
        self._opponent = opponent  # its files exist as long as it is referenced
        self._inner: Policy | None = None

    def setup(self, observation_space: Space[Any], action_space: Space[Any], *, seed: int) -> None:
        name, make = self._opponent.opponent_id, self._opponent.make
        state, version = self._opponent.read()
        inner = as_policy(make(), f"the policy built by {make!r} for opponent {name!r}")
        inner.setup(observation_space, action_space, seed=seed)
        try:
            inner.load_state_dict(state)
        except ArgumentError as error:
            error.add_note(f"while opponent {name!r} was built by {make!r}; its state is in {self._opponent.files[0]}")
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # user code
            raise ArgumentError(
                f"{self._opponent.files[0]} does not fit policy {name!r}, as built by {make!r}: {error!r:.300}"
            ) from error
        self.version = inner.version = version
        self._inner = inner
        super().setup(observation_space, action_space, seed=seed)  # its random generator is not the stored one

    def reseed(self, seed: int) -> None:
        if self._inner is not None:
            self._inner.reseed(seed)

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        return self._built().act(rows, explore=explore)

    def probabilities(self, rows: Rows) -> Any:
        """Return the probability of each action, for n rows: (n, k)."""
        method = getattr(self._built(), "probabilities", None)
        if method is None:
            raise ArgumentError(
                f"{self!r}: expected probabilities, but {self._inner!r} has no method probabilities(rows)"
            )
        return method(rows)

    def state_dict(self) -> PolicyState:
        return self._built().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._built().load_state_dict(state)

    def _built(self) -> Policy:
        if self._inner is None:
            raise StateError(f"{self!r} has no spaces yet: call setup() first, or use a Collector")
        return self._inner

    def __repr__(self) -> str:
        return f"FrozenPolicy({self._opponent.opponent_id!r})"


class SnapshotRule(ABC):
    """Decides when to take a snapshot of a learner."""

    @abstractmethod
    def is_due(self, learner: str, step: int) -> bool:
        """Return whether to take a snapshot of a learner at this step of the training, e.g. in env steps."""

    @abstractmethod
    def taken(self, learner: str, step: int) -> None:
        """Note that a snapshot of a learner was taken at this step, because of this rule or another one."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the rule's state as plain data."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`."""


class Every(SnapshotRule):
    """Due when ``steps`` steps have passed since the last snapshot, or since the beginning.

    Args:
        steps: Number of steps.

    Raises:
        ArgumentError: ``steps`` is less than 1.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ArgumentError(f"steps must be at least 1, got {steps!r}")
        self.steps = steps
        self._last: dict[str, int] = {}

    def is_due(self, learner: str, step: int) -> bool:
        return step - self._last.get(learner, 0) >= self.steps

    def taken(self, learner: str, step: int) -> None:
        self._last[learner] = step

    def state_dict(self) -> dict[str, Any]:
        return {"last": dict(self._last)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._last = read_fields(state, "the state of Every", last=dict[str, Real])["last"]


class OnWinRate(SnapshotRule):
    """Due when a learner's win rate against others since the last snapshot is high enough.

    Args:
        table: The table that counts its games.
        win_rate: Required share of wins, draws counting half.
        games: Minimum number of games.

    Raises:
        ArgumentError: ``win_rate`` is not between 0 and 1, or ``games`` less than 1.
    """

    def __init__(self, table: MatchTable, win_rate: float = 0.7, games: int = 100) -> None:
        if not 0 < win_rate <= 1 or games < 1:
            raise ArgumentError(
                f"win_rate, games: expected a rate in (0, 1] and at least 1 game, got {win_rate}, {games}"
            )
        self.table, self.win_rate, self.games = table, win_rate, games
        self._before: dict[str, WinCount] = {}

    def is_due(self, learner: str, step: int) -> bool:
        since = self.table.total(learner) - self._before.get(learner, WinCount())
        return since.games >= self.games and since.win_rate >= self.win_rate

    def taken(self, learner: str, step: int) -> None:
        self._before[learner] = self.table.total(learner)

    def state_dict(self) -> dict[str, Any]:
        return {"before": to_plain(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = read_fields(state, "the state of OnWinRate", before=dict[str, WinCount])["before"]


EvictionRule = Callable[[Sequence[Opponent]], Opponent]
"""Function of the opponents that may leave, oldest first, to the one that leaves. The newest is included."""


def oldest(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the opponent that joined first.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    return opponents[0]


def thinned(opponents: Sequence[Opponent]) -> Opponent:
    """Evict the snapshot whose removal leaves the smallest gap in training steps; never the first or the newest.

    Args:
        opponents: Opponents that may leave, oldest first.

    Returns:
        The opponent that leaves.
    """
    if len(opponents) < 3:
        return opponents[0]
    steps = [opponent.step for opponent in opponents]
    gaps = [after - before for before, after in pairwise(steps)]
    around = [before + after for before, after in pairwise(gaps)]
    return opponents[1 + around.index(min(around))]


def weakest(ratings: Ratings) -> EvictionRule:
    """Return a rule that evicts the lowest rating; of equal ones the oldest. Never the newest, with few games so far.

    Args:
        ratings: The ratings, read at each eviction.

    Returns:
        The rule, for `OpponentPool`.
    """

    def rule(opponents: Sequence[Opponent]) -> Opponent:
        return min(opponents[:-1] or opponents, key=lambda opponent: ratings.rating(opponent.opponent_id))

    return rule


INDEX = "pool.npz"
KINDS = ("policy", "agent", "action")
"""Kinds of an opponent's files, in order; part of their names."""
_OWN_FILE = re.compile(rf"[\w.~%-]+\.({'|'.join(KINDS)})-[0-9a-f]{{16}}-[0-9]+\.npz", re.ASCII)
MakeOf = Callable[[str], MakePolicy]
"""Function of `Opponent.of` to a function that builds such a policy."""


def make_of(make: MakePolicy | Mapping[str, MakePolicy]) -> MakeOf:
    """Return a function that finds the builder of a policy: the only one, or by `Opponent.of`."""
    if not isinstance(make, Mapping):
        if not callable(make):
            raise ArgumentError(f"make must be a function that builds a policy, or a dict of functions, got {make!r}")
        return lambda of: make
    if not all(map(callable, make.values())):
        raise ArgumentError(f"make must be a function that builds a policy, or a dict of functions, got {make!r}")

    def find(of: str) -> MakePolicy:
        if of not in make:
            raise ArgumentError(f"make: no function for policies of {of!r}; add it to {list(make)}")
        return make[of]

    return find


_INDEX_FIELDS = {
    "opponents": list[tuple[str, str, Real, bool, tuple[Any, Any, Any]]],  # id, of, step, anchor, names of files
    "counts": Any,
    "rules": list[Any],
    "random": list[str],
}


@dataclass(frozen=True)
class PoolIndex:
    """The index file of a pool. It also lists every `RandomPolicy`, which needs no builder."""

    opponents: Mapping[str, Opponent]  # by id, oldest first
    counts: Mapping[str, int]  # number of snapshots taken, by learner
    rules: tuple[Mapping[str, Any], ...]  # states of the snapshot rules

    def write(self, folder: Path) -> None:
        """Write the index into a folder, atomically; an old index stays if that fails."""
        rows = [
            [o.opponent_id, o.of, o.step, o.anchor, [None if file is None else file.name for file in o.files]]
            for o in self.opponents.values()
        ]
        rules = [encode(state, "a rule's state") for state in self.rules]
        counts = encode(dict(self.counts), "counts")
        at_random = [name for name, opponent in self.opponents.items() if opponent.make is RandomPolicy]
        data = {"opponents": rows, "counts": counts, "rules": rules, "random": at_random}
        write_archive(inside(folder, INDEX), data)

    @classmethod
    def read(cls, folder: Path, make: MakeOf) -> PoolIndex:
        """Read the index; refuse one that names a file outside of the pool, or a policy without a builder."""
        path = inside(folder, INDEX)
        found = {"random": [], **read_archive(path)}  # older indexes do not list them
        opponents: dict[str, Opponent] = {}
        known: set[str] = set()
        try:
            rows, counts, rules, at_random = read_fields(found, "the index", **_INDEX_FIELDS).values()
            counts = from_plain(dict[str, Count], decode(counts), "the index: counts")
            rules = tuple(decode(state) for state in rules)
        except MarlvecError as error:
            raise CheckpointError(path, f"holds no pool of opponents: {error}") from error
        for opponent_id, of, step, anchor, names in rows:
            policy, agent, action = (
                None if name is None else _own_file(path, opponent_id, kind, name, known)
                for kind, name in zip(KINDS, names, strict=True)
            )
            if policy is None or opponent_id in opponents:
                raise CheckpointError(path, f"holds two opponents {opponent_id!r}, or one without a policy")
            built_by = RandomPolicy if opponent_id in at_random else make(of)
            opponents[opponent_id] = Opponent(opponent_id, of, step, anchor, built_by, (policy, agent, action))
        for opponent in opponents.values():
            for file in opponent.files:
                if file is not None:
                    read_archive(file)  # raises if it is missing or damaged
        return cls(opponents, counts, rules)


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; refuse a link that leads out of the folder."""
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise CheckpointError(path, f"is a link out of the pool's folder, to {path.resolve()}: remove it")
    return path


def _own_file(index: Path, opponent_id: str, kind: str, name: Any, known: set[str]) -> Path:
    """Return the path of a file that an index names, if a pool can have written it: it is read, and may be deleted."""
    match = _OWN_FILE.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] != kind or name in known:
        raise CheckpointError(
            index,
            f"names {name!r} as a file of opponent {opponent_id!r}; expected NAME.{kind}-DIGEST-NUMBER.npz in the "
            f"pool's own folder, used by no other opponent: use a pool that OpponentPool has written",
        )
    known.add(name)
    return inside(index.parent, name)


def read_opponents(folder: FilePath, make: MakePolicy | Mapping[str, MakePolicy]) -> dict[str, Opponent]:
    """Read the opponents in a pool's folder, to inspect or play against; writes and deletes nothing.

    A training may use the folder at the same time. An opponent that it removes can no longer be built.

    Args:
        folder: The folder of an `OpponentPool`.
        make: Builds a policy in its initial form; or a dict of `Opponent.of` to such a function.

    Returns:
        Opponent id to opponent, oldest first.

    Raises:
        CheckpointError: No pool, a file is damaged or missing, or lies outside the folder.
        ArgumentError: There is no function for some of its policies.
    """
    return dict(PoolIndex.read(Path(folder), make_of(make)).opponents)


_NAME = 40  # characters of an id in file names


class OpponentPool(Mapping[str, Opponent]):
    """Opponents by id, oldest first: frozen snapshots of policies, with their connectors.

    Each opponent is stored in files when it is added: its `Policy.state_dict` and its saved pipelines, as numbers and
    texts, never pickles. It cannot change, however its learner continues to train. Only opponents that play are in
    memory; a `PolicyMap` in the collector bounds these, too.

        pool = OpponentPool(make_net, folder="opponents", capacity=30, when=[Every(50_000)])
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = Collector(envs, {"main": learner}, mapping, policies_to_train=["main"])
        while True:
            learn(collector.collect(env_steps=4096)["main"])
            if pool.offer(collector, "main"):
                mapping.update(collector)

    Args:
        make: Builds a policy in its initial form; or a dict of `Opponent.of` to such a function.
        folder: Folder of the files; created if missing. None: a temporary folder, deleted with the pool.
        capacity: Maximum number of opponents, without anchors; None: no limit.
        leaves: Chooses who leaves a full pool: `oldest`, `thinned`, ``weakest(ratings)``, or a function.
        when: Rules for `offer`, which takes a snapshot as soon as one of them is due.
        board: A rating tracker; a snapshot starts with its learner's rating there.

    Raises:
        ArgumentError: ``capacity`` is not positive, or the folder holds a pool: `load` it.
        OSError: The folder cannot be written to.

    Attributes:
        folder, capacity: As given.
    """

    def __init__(
        self,
        make: MakePolicy | Mapping[str, MakePolicy],
        *,
        folder: FilePath | None = None,
        capacity: int | None = None,
        leaves: EvictionRule = oldest,
        when: Iterable[SnapshotRule] = (),
        board: RatingTracker | None = None,
    ) -> None:
        self._set_up(make, capacity, leaves, when, board)
        self._opponents: dict[str, Opponent] = {}
        self._counts: dict[str, int] = {}  # number of snapshots taken, by learner
        if folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="marlvec-opponents-"))
            weakref.finalize(self, _remove, shutil.rmtree, os.getpid(), self.folder)
        else:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / INDEX).exists():
                raise ArgumentError(
                    f"folder: {str(self.folder)!r} holds a pool already; OpponentPool.load() it, or choose another"
                )
            self._write_index()

    def _set_up(
        self,
        make: MakePolicy | Mapping[str, MakePolicy],
        capacity: int | None,
        leaves: EvictionRule,
        when: Iterable[SnapshotRule],
        board: RatingTracker | None,
    ) -> None:
        self._make, self._leaves, self._when, self._board = make_of(make), leaves, tuple(when), board
        self.capacity = None if capacity is None else count_from(capacity, f"capacity={capacity!r} (None: no limit)")
        # builders, and the kind of policy that they were checked to build
        self._fitting: list[tuple[MakePolicy, type]] = []

    # --- as a mapping

    def __getitem__(self, opponent_id: str) -> Opponent:
        try:
            return self._opponents[opponent_id]
        except KeyError:
            raise KeyError(f"no opponent {opponent_id!r}; the opponents are {list(self._opponents)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._opponents)

    def __len__(self) -> int:
        return len(self._opponents)

    def __repr__(self) -> str:
        bound = "" if self.capacity is None else f" of at most {self.capacity}"
        return f"<OpponentPool of {len(self)}{bound} in {str(self.folder)!r}>"

    # --- adding and removing

    def add(
        self,
        opponent_id: str,
        policy: PolicyLike,
        *,
        of: str | None = None,
        step: int = 0,
        anchor: bool = False,
        agent_connectors: AgentPipeline | None = None,
        action_connectors: ActionPipeline | None = None,
    ) -> Opponent:
        """Add a snapshot of a policy. The policy is unchanged, and may continue to learn.

        Args:
            opponent_id: Its id, a new one.
            policy: The policy, or an object that is used as one. ``make`` must be able to build such a policy, except a
                `RandomPolicy`.
            of: Id of the learner it is a snapshot of, or another name; if ``make`` is a dict, one of its keys. None:
                ``opponent_id``.
            step: When it is taken; should not decrease.
            anchor: Whether it never leaves, e.g. a scripted player as a fixed reference.
            agent_connectors: Its connectors, stored with their learned state; None: default connectors.
            action_connectors: Its action connectors, stored in the same way; None: default connectors.

        Returns:
            The opponent, as it is in the pool.

        Raises:
            ArgumentError: The id is taken; there is no builder; or the built policy cannot load its state: the message
                says what to pass instead. Nothing has changed.
            SerialisationError: Its state, or a connector, cannot be written to a file. Nothing has changed.
            OSError: The files cannot be written. Nothing has changed.
        """
        if not isinstance(opponent_id, str):
            raise ArgumentError(f"opponent_id: expected a string, got {opponent_id!r}")
        policy = as_policy(policy, f"opponent {opponent_id!r}")
        if opponent_id in self._opponents:
            raise ArgumentError(f"opponent_id: {opponent_id!r} is taken; choose another id")
        of = opponent_id if of is None else of
        make = RandomPolicy if type(policy) is RandomPolicy else self._make(of)
        state = encode(dict(policy.state_dict()), f"the state of {opponent_id!r}")
        self._check_make(make, opponent_id, of, policy)
        version = encode(policy.version, "its version")
        files = (
            self._keep(opponent_id, "policy", lambda path: write_archive(path, {"version": version, "state": state})),
            self._keep_pipeline(opponent_id, "agent", agent_connectors),
            self._keep_pipeline(opponent_id, "action", action_connectors),
        )
        opponent = Opponent(opponent_id, of, step, anchor, make, files)
        try:
            opponents = {**self._opponents, opponent_id: opponent}
            gone = self._too_many(opponents.values())
            self._replace({name: one for name, one in opponents.items() if one not in gone})
        except BaseException:
            self.let_go(opponent)
            raise
        for other in gone:
            self.let_go(other)
        return opponent

    def _replace(self, opponents: dict[str, Opponent]) -> None:
        """Have these opponents, here and in the index; if that cannot be written, nothing has changed."""
        before = self._opponents
        try:
            self._opponents = opponents
            self._write_index()
        except BaseException:
            self._opponents = before
            raise

    def snapshot(
        self, collector: Collector, learner: str, *, opponent_id: str | None = None, step: int | None = None
    ) -> Opponent:
        """Add a snapshot of one of a collector's policies, with its connectors.

        Args:
            collector: The collector.
            learner: The policy's id.
            opponent_id: The opponent's id; None: the learner's id and a number, ``"main_3"``.
            step: Step of the training; None: the collector's ``metrics.env_steps``.

        Returns:
            The opponent, as it is in the pool.

        Raises:
            KeyError: The policy is unknown.
            ArgumentError, SerialisationError, OSError: As `add`.
        """
        count = self._counts.get(learner, 0)
        while (name := f"{learner}_{count}") in self._opponents or name in collector.policies:
            count += 1
        name = name if opponent_id is None else opponent_id
        step = collector.metrics.env_steps if step is None else step
        self._counts[learner] = count + 1
        opponent = self.add(
            name,
            collector.policies[learner],
            of=learner,
            step=step,
            agent_connectors=collector.agent_connectors[learner],
            action_connectors=collector.action_connectors[learner],
        )
        for rule in self._when:
            rule.taken(learner, step)
        self._write_index()
        if self._board is not None:
            self._board.ratings.copy(learner, name)
        return opponent

    def offer(self, collector: Collector, learner: str, *, step: int | None = None) -> Opponent | None:
        """Take a snapshot if a rule is due; return it, or None. Arguments as in `snapshot`."""
        step = collector.metrics.env_steps if step is None else step
        due = any(rule.is_due(learner, step) for rule in self._when)
        return self.snapshot(collector, learner, step=step) if due else None

    def remove(self, opponent_id: str) -> Opponent:
        """Remove an opponent by its ``opponent_id``. Collectors in which it plays keep it.

        Returns:
            The opponent, no longer in the pool.

        Raises:
            KeyError: The opponent is unknown.
            OSError: The folder cannot be written to. Nothing has changed.
        """
        gone = self[opponent_id]
        self._replace({name: one for name, one in self._opponents.items() if name != opponent_id})
        self.let_go(gone)
        return gone

    def _check_make(self, make: MakePolicy, opponent_id: str, of: str, policy: Policy) -> None:
        """Check, once per kind of policy, that the built policy can load the policy's state."""
        kind = _kind(policy)
        if make is RandomPolicy or any(make is known and kind is its for known, its in self._fitting):
            return
        built = as_policy(make(), f"the policy built by {make!r} for opponent {opponent_id!r}")
        reason: object = "it has no state in which the two could differ"
        try:
            if policy.observation_space is not None and policy.action_space is not None:
                built.setup(policy.observation_space, policy.action_space, seed=0)
            state = policy.state_dict()
            built.load_state_dict(state)
            fits = bool(state) or _kind(built) is kind
        except Exception as error:  # user code may raise anything
            fits, reason = False, error
        if not fits:
            raise ArgumentError(
                f"opponent {opponent_id!r} is {policy!r}, but the pool's make builds {built!r}, which cannot become "
                f"equal to it: {reason!s:.300}. Give the pool a dict, make={{{of!r}: <what builds this one>, ...}}, "
                f"with an entry for every `of`"
            )
        self._fitting.append((make, kind))

    def _too_many(self, opponents: Iterable[Opponent]) -> list[Opponent]:
        rest, leaving = [one for one in opponents if not one.anchor], list[Opponent]()
        while self.capacity is not None and len(rest) > self.capacity:
            if (chosen := self._leaves(rest)) not in rest:
                raise ArgumentError(f"leaves(): expected one of {rest}, got {chosen!r}")
            rest = [one for one in rest if one != chosen]
            leaving.append(chosen)
        return leaving

    def let_go(self, opponent: Opponent) -> None:
        """Delete an opponent's files once nothing refers to it, such as a collector in which it still plays.

        Args:
            opponent: An opponent that has left the pool.
        """
        for file in opponent.files:
            if file is not None:
                weakref.finalize(opponent, _remove, os.unlink, os.getpid(), file)

    # --- files

    def _keep_pipeline(self, opponent_id: str, what: str, pipeline: Any) -> Path | None:
        if pipeline is None:
            return None
        frozen = copy.deepcopy(pipeline)
        frozen.reset()  # drop its memory of running episodes
        return self._keep(opponent_id, what, frozen.eval().save)

    def _keep(self, opponent_id: str, what: str, write: Callable[[Path], None]) -> Path:
        """Write a file whose name has a hash of its content, so that it overwrites no other opponent's file."""
        digest = hashlib.sha256(opponent_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        stem = f"{quote(opponent_id, safe='', errors='replace')[:_NAME]}-{digest}.{what}"
        draft = self.folder / f".{stem}.{os.getpid()}.tmp"
        draft.unlink(missing_ok=True)  # a link there would be followed
        try:
            write(draft)
            content, count = hashlib.sha256(draft.read_bytes()).hexdigest()[:16], 1
            while (file := self.folder / f"{stem}-{content}-{count}.npz").exists():
                count += 1  # file of an opponent that was removed but still plays
            return draft.replace(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _write_index(self) -> None:
        rules = tuple(rule.state_dict() for rule in self._when)
        PoolIndex(self._opponents, self._counts, rules).write(self.folder)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return the pool as plain data, with the contents of its opponents' files: a checkpoint needs nothing else.

        Returns:
            Opponents, counts, and states of the snapshot rules. As large as all files together.

        Raises:
            CheckpointError: A file is missing.
        """
        return {
            "opponents": [self.pack(opponent) for opponent in self._opponents.values()],
            "counts": dict(self._counts),
            "rules": [rule.state_dict() for rule in self._when],
        }

    def load_state_dict(self, state: Mapping[str, Any], unpacked: Mapping[str, Opponent] | None = None) -> None:
        """Load the opponents of a state, and drop all others; the folder is updated.

        An opponent that is in the pool already, with equal files, stays the same object.

        Args:
            state: A state from `state_dict`, of a pool with as many snapshot rules.
            unpacked: Opponents that `unpack` has already built, by id.

        Raises:
            ArgumentError: Not such a state, or of other rules; nothing has changed.
            CheckpointError: The contents of a file are damaged; nothing has changed.
            OSError: The folder cannot be written to; nothing has changed.
        """
        where = "the state of an OpponentPool"
        saved = read_fields(state, where, opponents=list[Any], counts=dict[str, Count], rules=list[Any])
        if len(saved["rules"]) != len(self._when):
            raise ArgumentError(
                f"state: expected {len(self._when)} snapshot rules, got {len(saved['rules'])}; give the pool the rules "
                f"(when=) that it was saved with"
            )
        before, rules = (self._opponents, self._counts), [rule.state_dict() for rule in self._when]
        found: dict[str, Opponent] = {}
        try:
            for packed in saved["opponents"]:
                opponent = self.unpack(packed, unpacked)
                if opponent.opponent_id in found:
                    raise ArgumentError(f"state: opponent {opponent.opponent_id!r} occurs twice")
                found[opponent.opponent_id] = opponent
            for rule, own in zip(self._when, saved["rules"], strict=True):
                rule.load_state_dict(own)
            self._opponents, self._counts = found, saved["counts"]
            self._write_index()
        except BaseException:
            self._opponents, self._counts = before
            for rule, own in zip(self._when, rules, strict=True):
                rule.load_state_dict(own)
            self._discard(found.values(), before[0].values())
            raise
        self._discard(before[0].values(), found.values())

    def pack(self, opponent: Opponent) -> dict[str, Any]:
        """Return an opponent and its files as plain data, for `unpack`: numbers, texts and arrays of bytes."""
        return opponent.pack()

    def unpack(self, packed: Mapping[str, Any], unpacked: Mapping[str, Opponent] | None = None) -> Opponent:
        """Return the opponent of packed data: the pool's own if equal, otherwise one with new files.

        Args:
            packed: Data from `pack`.
            unpacked: Opponents that were unpacked before, by id; an equal one is returned instead of a new one.

        Returns:
            The opponent; if new, it is in no pool yet.

        Raises:
            ArgumentError: Not such data; or there is no builder for the policy.
            CheckpointError: The contents of a file are damaged.
        """
        where, files_of = "the state of an opponent", tuple[Any, Any, Any]
        found = read_fields(packed, where, id=str, of=str, step=Real, anchor=bool, random=bool, files=files_of)
        name, of = found["id"], found["of"]
        contents = [
            None if file is None and k else check_value(file, np.uint8, (None,), f"{where}: files[{k}]").tobytes()
            for k, file in enumerate(found["files"])
        ]
        make = RandomPolicy if found["random"] else self._make(of)
        for known in (self._opponents.get(name), (unpacked or {}).get(name)):
            if known is not None and known.make == make and known.is_packed(packed):
                return known
        files: list[Path | None] = []
        try:
            for kind, content in zip(KINDS, contents, strict=True):
                files.append(None if content is None else self._keep(name, kind, partial(_write_sound, content)))
        except BaseException:
            for file in files:
                if file is not None:
                    file.unlink(missing_ok=True)
            raise
        return Opponent(name, of, found["step"], found["anchor"], make, (cast(Path, files[0]), files[1], files[2]))

    def _discard(self, opponents: Iterable[Opponent], kept: Iterable[Opponent]) -> None:
        """Let go of opponents that are not in `kept`."""
        stay = {id(opponent) for opponent in kept}
        for opponent in opponents:
            if id(opponent) not in stay:
                self.let_go(opponent)

    def save(self, folder: FilePath) -> None:
        """Write the pool into another folder, for `load`; the pool's own folder is always up to date.

        Args:
            folder: The folder; created if missing. A pool in it is valid until it is replaced by this one.

        Raises:
            OSError: It cannot be written.
            CheckpointError: A link of the index's name leads out of the folder.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        self._write_index()
        if target.resolve() == self.folder.resolve():
            return
        for opponent in self._opponents.values():
            for file in opponent.files:
                if file is not None:
                    draft = target / f".{file.name}.{os.getpid()}.tmp"
                    draft.unlink(missing_ok=True)  # a link would be followed
                    shutil.copyfile(file, draft)
                    draft.replace(target / file.name)
        write_archive(inside(target, INDEX), read_archive(self.folder / INDEX))
        _sweep(target)

    @classmethod
    def load(
        cls,
        folder: FilePath,
        make: MakePolicy | Mapping[str, MakePolicy],
        *,
        capacity: int | None = None,
        leaves: EvictionRule = oldest,
        when: Iterable[SnapshotRule] = (),
        board: RatingTracker | None = None,
    ) -> Self:
        """Load the pool of a folder and continue with it; new opponents are stored there. Executes nothing from files.

        ``make``, ``capacity``, ``leaves``, ``when`` and ``board`` are as for the constructor; rules of ``when`` load
        their stored states if there are equally many.

        Returns:
            The pool, with its opponents, counts and results.

        Raises:
            CheckpointError: No pool, a file is damaged or missing, or lies outside the folder. Nothing has changed.
            ArgumentError: There is no builder for some of its policies.
        """
        pool = cls.__new__(cls)
        pool.folder = Path(folder)
        pool._set_up(make, capacity, leaves, when, board)
        index = PoolIndex.read(pool.folder, pool._make)
        pool._opponents, pool._counts = dict(index.opponents), dict(index.counts)
        if index.rules and len(index.rules) == len(pool._when):
            for rule, state in zip(pool._when, index.rules, strict=True):
                rule.load_state_dict(state)
        _sweep(pool.folder)
        return pool


def _kind(policy: Policy) -> type:
    return type(policy.wrapped if isinstance(policy, ObjectPolicy) else policy)


def _write_sound(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    read_archive(path)  # raises if it is damaged


def _sweep(folder: Path) -> None:
    """Delete files that a killed process of a pool left behind; other files are not touched."""
    rows = read_archive(folder / INDEX)["opponents"]
    known = {name for row in rows for name in row[4]} | {INDEX}
    for what in KINDS:
        for file in (*folder.glob(f"*.{what}-*.npz"), *folder.glob(f".*.{what}*.tmp")):
            if file.name not in known:
                file.unlink(missing_ok=True)


def _remove(how: Callable[[Path], object], pid: int, path: Path) -> None:
    if os.getpid() == pid:  # a forked child must not delete the parent's files
        with contextlib.suppress(OSError):  # already deleted by another process
            how(path)
