"""`OpponentPool`: frozen opponents in memory and in a folder."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote

from marlvec.arguments import whole_number
from marlvec.collect import Collector
from marlvec.connectors import ActionPipeline, AgentPipeline
from marlvec.errors import ArgumentError, CheckpointError
from marlvec.policies import ObjectPolicy, Policy, PolicyLike, RandomPolicy, as_policy
from marlvec.selfplay.opponents.eviction_rules import EvictionRule, oldest
from marlvec.selfplay.opponents.opponent import MakePolicy, Opponent
from marlvec.selfplay.opponents.snapshot_rules import SnapshotRule
from marlvec.serialization.archive import FilePath, read_archive, write_archive
from marlvec.serialization.values import decode, encode

if TYPE_CHECKING:
    from marlvec.selfplay.rating_tracker import RatingTracker

__all__ = ["INDEX", "KINDS", "MakeOf", "PoolIndex", "inside", "make_of", "read_opponents", "OpponentPool"]

INDEX = "pool.npz"
KINDS = ("policy", "agent", "action")
"""What an opponent's files hold, in their order, as their names say."""
_OWN_FILE = re.compile(rf"[\w.~%-]+\.({'|'.join(KINDS)})-[0-9a-f]{{16}}-[0-9]+\.npz", re.ASCII)
MakeOf = Callable[[str], MakePolicy]
"""From whose snapshot an opponent is to what builds such a policy."""


def make_of(make: MakePolicy | Mapping[str, MakePolicy]) -> MakeOf:
    """Say who is built by what.

    Args:
        make: What builds all policies; or whose snapshot one is to what builds it.

    Raises:
        ArgumentError: It is neither; or, when asked, nothing builds policies of this one.
    """
    if not isinstance(make, Mapping):
        if not callable(make):
            raise ArgumentError(f"make must be a function that builds a policy, or a dict of such, got {make!r}")
        return lambda of: make
    if not all(map(callable, make.values())):
        raise ArgumentError(f"make must be a function that builds a policy, or a dict of such, got {make!r}")

    def find(of: str) -> MakePolicy:
        if of not in make:
            raise ArgumentError(f"nothing says how to build a policy of {of!r}; make has {list(make)}")
        return make[of]

    return find


@dataclass(frozen=True)
class PoolIndex:
    """What is written of a pool.

    Attributes:
        opponents: By id, oldest first.
        counts: Snapshots taken, by whose they are.
        rules: States of the rules for snapshots.

    A `RandomPolicy` needs no factory: the index names those that are.
    """

    opponents: Mapping[str, Opponent]
    counts: Mapping[str, int]
    rules: tuple[Mapping[str, Any], ...]

    def write(self, folder: Path) -> None:
        """Write it into a folder, whole or not at all.

        Raises:
            OSError: It cannot be written; an old one is as it was.
            CheckpointError: A link stands in its place, and leads out of the folder.
        """
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
        """Read it.

        Raises:
            CheckpointError: There is none, a file is damaged or missing, or it names one that is not the pool's.
            ArgumentError: Nothing says how to build some of its policies.
        """
        path = inside(folder, INDEX)
        found = read_archive(path)
        opponents: dict[str, Opponent] = {}
        known: set[str] = set()
        try:
            counts = decode(found["counts"])
            rules = tuple(decode(state) for state in found["rules"])
            at_random = found.get("random", [])  # an older index names none
            for opponent_id, of, step, anchor, names in found["opponents"]:
                if not isinstance(opponent_id, str) or opponent_id in opponents:
                    raise ValueError(f"expected an id that no other opponent has, got {opponent_id!r}")
                policy, agent, action = (
                    None if name is None else _own_file(path, opponent_id, kind, name, known)
                    for kind, name in zip(KINDS, names, strict=True)
                )
                if policy is None:
                    raise ValueError(f"opponent {opponent_id!r} has no policy")
                built_by = RandomPolicy if opponent_id in at_random else make(of)
                opponents[opponent_id] = Opponent(opponent_id, of, step, anchor, built_by, (policy, agent, action))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise CheckpointError(path, f"holds no pool of opponents: {error!r}") from error
        for opponent in opponents.values():
            for file in opponent.files:
                if file is not None:
                    read_archive(file)  # to see that it is there, and sound
        return cls(opponents, counts, rules)


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder.

    Raises:
        CheckpointError: It is a link that leads out of the folder.
    """
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise CheckpointError(path, f"is a link that leads out of the pool's folder, to {path.resolve()}: remove it")
    return path


def _own_file(index: Path, opponent_id: str, kind: str, name: Any, known: set[str]) -> Path:
    """The file that an index names, if it can be one that a pool has written: it is read, and one day removed."""
    match = _OWN_FILE.fullmatch(name) if isinstance(name, str) else None
    if match is None or match[1] != kind or name in known:
        raise CheckpointError(
            index,
            f"names {name!r} as a file of opponent {opponent_id!r}; expected NAME.{kind}-DIGEST-NUMBER.npz in the "
            f"pool's own folder, which no other opponent has: use a pool that OpponentPool has written",
        )
    known.add(name)
    return inside(index.parent, name)


def read_opponents(folder: FilePath, make: MakePolicy | Mapping[str, MakePolicy]) -> dict[str, Opponent]:
    """The opponents in a pool's folder, to look at or to play against: nothing is written there, nor cleaned up.

    So a training may go on with the folder meanwhile. An opponent that it takes out can no longer be built.

    Args:
        folder: The folder of an `OpponentPool`.
        make: Builds a policy as it was at first; or who it is of to such a function.

    Returns:
        Opponent id to opponent, oldest first.

    Raises:
        CheckpointError: There is no pool, a file is damaged or missing, or lies outside the folder.
        ArgumentError: Nothing says how to build some of its policies.
    """
    return dict(PoolIndex.read(Path(folder), make_of(make)).opponents)


_NAME = 40  # characters of an id that its files' names show


class OpponentPool(Mapping[str, Opponent]):
    """Opponents by id, oldest first: policies as they were at some moments, with their connectors.

    Each one is in files from the moment it comes: what `Policy.state_dict` gives, and pipelines as they save
    themselves; numbers and texts, never pickles. So it can neither change nor be trained, however its learner goes on,
    and only those that play are in memory: give the collector a `PolicyMap` to bound them, too.

        pool = OpponentPool(make_net, folder="opponents", capacity=30, when=[Every(50_000)])
        mapping = SelfPlayMapping(pool, envs.agents, {"main": Uniform()})
        collector = Collector(envs, {"main": learner}, mapping, policies_to_train=["main"])
        while True:
            learn(collector.collect(env_steps=4096)["main"])
            if pool.offer(collector, "main"):
                mapping.update(collector)

    Args:
        make: Builds a policy as it was at first, of which there are snapshots; or who it is of to such a function.
        folder: Where the files are; made if need be. None: a temporary one, which goes when the pool does.
        capacity: How many there may be, anchors not counted; None: any number.
        leaves: Who leaves when there are too many: `oldest`, `thinned`, ``weakest(ratings)``, or a function.
        when: When `offer` takes a snapshot: as soon as one of these says so.
        board: A rating tracker, on which a snapshot begins with its learner's rating.

    Raises:
        ArgumentError: ``capacity`` is not positive, or there is a pool in the folder: `load` it.
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
        self._make = make_of(make)
        self._fitting: list[tuple[MakePolicy, type]] = []  # what was seen to build which kind of policy
        self.capacity = None if capacity is None else _positive(capacity)
        self._leaves, self._when, self._board = leaves, tuple(when), board
        self._opponents: dict[str, Opponent] = {}
        self._counts: dict[str, int] = {}  # snapshots taken, by whose they are
        if folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="marlvec-opponents-"))
            weakref.finalize(self, _remove, shutil.rmtree, os.getpid(), self.folder)
        else:
            self.folder = Path(folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / INDEX).exists():
                raise ArgumentError(
                    f"there is a pool in {str(self.folder)!r} already: OpponentPool.load() it, or choose another folder"
                )
            self._write_index()

    # --- as a mapping

    def __getitem__(self, opponent_id: str) -> Opponent:
        try:
            return self._opponents[opponent_id]
        except KeyError:
            raise KeyError(f"no opponent {opponent_id!r}; there are {list(self._opponents)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._opponents)

    def __len__(self) -> int:
        return len(self._opponents)

    def __repr__(self) -> str:
        bound = "" if self.capacity is None else f" of at most {self.capacity}"
        return f"<OpponentPool of {len(self)}{bound} in {str(self.folder)!r}>"

    # --- coming and going

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
        """Keep a policy as it is now. It is left as it was, and may go on learning.

        Args:
            opponent_id: Its id, a new one.
            policy: The policy, or what may stand for one. ``make`` must be able to build its like; a `RandomPolicy`
                can always be built.
            of: Whose snapshot it is, or what it is; where ``make`` is a dict, a key of it. None: its own id.
            step: When it is taken; should not decrease.
            anchor: Whether it never leaves: a scripted player, say, that all are measured by.
            agent_connectors: Its connectors, kept with what they have learned; None: the default ones.
            action_connectors: Likewise.

        Returns:
            The opponent, as it is in the pool.

        Raises:
            ArgumentError: The id is taken; or nothing says how to build it, or what ``make`` builds does not take its
                state: says what to give instead. Nothing has changed.
            SerialisationError: Its state, or a connector, cannot be written to a file. Nothing has changed.
            OSError: The files cannot be written. Nothing has changed.
        """
        if not isinstance(opponent_id, str):
            raise ArgumentError(f"an opponent's id must be a string, got {opponent_id!r}")
        policy = as_policy(policy, f"opponent {opponent_id!r}")
        if opponent_id in self._opponents:
            raise ArgumentError(f"there is an opponent {opponent_id!r} already")
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
        opponent = self._opponents[opponent_id] = Opponent(opponent_id, of, step, anchor, make, files)
        gone = self._too_many()
        for other in gone:
            del self._opponents[other.opponent_id]
        try:
            self._write_index()
        except BaseException:
            self._opponents = {other.opponent_id: other for other in (*gone, *self._opponents.values())}
            self._opponents.pop(opponent_id)
            raise
        for other in gone:
            self.let_go(other)
        return opponent

    def snapshot(
        self, collector: Collector, learner: str, *, opponent_id: str | None = None, step: int | None = None
    ) -> Opponent:
        """Keep one of a collector's policies as it is now, with its connectors.

        Args:
            collector: The collector.
            learner: The policy's id.
            opponent_id: The opponent's id; None: the learner's and a number, ``"main_3"``.
            step: How far training is; None: the collector's ``metrics.env_steps``.

        Returns:
            The opponent, as it is in the pool.

        Raises:
            KeyError: There is no such policy.
            ArgumentError, SerialisationError, OSError: As `add` does.
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
        """Take a snapshot if it is time for one; returns it, or None. Arguments as in `snapshot`."""
        step = collector.metrics.env_steps if step is None else step
        due = any(rule.is_due(learner, step) for rule in self._when)
        return self.snapshot(collector, learner, step=step) if due else None

    def remove(self, opponent_id: str) -> Opponent:
        """Take an opponent out. Who has it goes on playing with it.

        Args:
            opponent_id: Its id, e.g. ``"main_3"``.

        Returns:
            The opponent, which is in no pool now.

        Raises:
            KeyError: There is no such opponent.
            OSError: The folder cannot be written to. Nothing has changed.
        """
        gone = self[opponent_id]
        before = dict(self._opponents)
        del self._opponents[opponent_id]
        try:
            self._write_index()
        except BaseException:
            self._opponents = before
            raise
        self.let_go(gone)
        return gone

    def _check_make(self, make: MakePolicy, opponent_id: str, of: str, policy: Policy) -> None:
        """See that what is built takes the policy's state, once for each kind: not when it is first to play."""
        kind = _kind(policy)
        if make is RandomPolicy or any(make is known and kind is its for known, its in self._fitting):
            return
        built = as_policy(make(), f"what {make!r} builds for opponent {opponent_id!r}")
        reason: object = "it keeps no state in which the two could differ"
        try:
            if policy.observation_space is not None and policy.action_space is not None:
                built.setup(policy.observation_space, policy.action_space, seed=0)
            state = policy.state_dict()
            built.load_state_dict(state)
            fits = bool(state) or _kind(built) is kind
        except Exception as error:  # whatever its author has it raise
            fits, reason = False, error
        if not fits:
            raise ArgumentError(
                f"opponent {opponent_id!r} is {policy!r}, and the pool's make builds {built!r} for it, which does not "
                f"become the same: {reason!s:.300}. Give the pool a dict, make={{{of!r}: <what builds this one>, ...}} "
                f"with an entry for every `of`"
            )
        self._fitting.append((make, kind))

    def _too_many(self) -> list[Opponent]:
        leaving: list[Opponent] = []
        while self.capacity is not None:
            rest = [one for one in self._opponents.values() if not one.anchor and one not in leaving]
            if len(rest) <= self.capacity:
                break
            chosen = self._leaves(rest)
            if chosen not in rest:
                raise ArgumentError(f"leaves() chose {chosen!r}, which is none of those that it was given")
            leaving.append(chosen)
        return leaving

    def let_go(self, opponent: Opponent) -> None:
        """Its files are deleted once nothing refers to it any more, such as a collector in which it still plays.

        Args:
            opponent: One that is in the pool no more.
        """
        for file in opponent.files:
            if file is not None:
                weakref.finalize(opponent, _remove, os.unlink, os.getpid(), file)

    # --- files

    def _keep_pipeline(self, opponent_id: str, what: str, pipeline: Any) -> Path | None:
        if pipeline is None:
            return None
        frozen = copy.deepcopy(pipeline)
        frozen.reset()  # what it remembers of running episodes is not what it has learned
        return self._keep(opponent_id, what, frozen.eval().save)

    def _keep(self, opponent_id: str, what: str, write: Callable[[Path], None]) -> Path:
        """Write a file whose name says what is in it, so that another opponent's is never written over."""
        digest = hashlib.sha256(opponent_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        stem = f"{quote(opponent_id, safe='', errors='replace')[:_NAME]}-{digest}.{what}"
        draft = self.folder / f".{stem}.{os.getpid()}.tmp"
        draft.unlink(missing_ok=True)  # a link there would be followed
        try:
            write(draft)
            content, count = hashlib.sha256(draft.read_bytes()).hexdigest()[:16], 1
            while (file := self.folder / f"{stem}-{content}-{count}.npz").exists():
                count += 1  # of one that was removed, and still plays somewhere
            return draft.replace(file)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _write_index(self) -> None:
        rules = tuple(rule.state_dict() for rule in self._when)
        PoolIndex(self._opponents, self._counts, rules).write(self.folder)

    # --- as it was at some moment of a training

    def state_dict(self) -> dict[str, Any]:
        """All of it as plain data, with what is in its opponents' files: a checkpoint needs nothing beside it.

        Returns:
            Opponents, counts, and what the rules for snapshots remember. As large as the files together.

        Raises:
            CheckpointError: A file is gone.
        """
        return {
            "opponents": [self.pack(opponent) for opponent in self._opponents.values()],
            "counts": dict(self._counts),
            "rules": [rule.state_dict() for rule in self._when],
        }

    def load_state_dict(self, state: Mapping[str, Any], unpacked: Mapping[str, Opponent] | None = None) -> None:
        """Have the opponents again that `state_dict` was given, and no others; its folder follows.

        An opponent that is here already, file by file, stays the one that it is.

        Args:
            state: As `state_dict` gave it, of a pool with as many rules for snapshots.
            unpacked: Those of its opponents that `unpack` has built already, by id.

        Raises:
            ArgumentError: It is something else, or of other rules; nothing has changed.
            CheckpointError: What it holds for a file is none; nothing has changed.
            OSError: The folder cannot be written to; nothing has changed.
        """
        if not isinstance(state, Mapping) or state.keys() != {"opponents", "counts", "rules"}:
            raise ArgumentError(f"expected the state of an OpponentPool, got {state!r:.200}")
        if len(state["rules"]) != len(self._when):
            raise ArgumentError(
                f"the state is of a pool with {len(state['rules'])} rules for snapshots, this one has "
                f"{len(self._when)}: give when= the same ones"
            )
        before, rules = (self._opponents, self._counts), [rule.state_dict() for rule in self._when]
        found: dict[str, Opponent] = {}
        try:
            for packed in state["opponents"]:
                opponent = self.unpack(packed, unpacked)
                if opponent.opponent_id in found:
                    raise ArgumentError(f"the state of an OpponentPool has {opponent.opponent_id!r} twice")
                found[opponent.opponent_id] = opponent
            for rule, saved in zip(self._when, state["rules"], strict=True):
                rule.load_state_dict(saved)
            self._opponents, self._counts = found, {str(k): int(n) for k, n in state["counts"].items()}
            self._write_index()
        except BaseException:
            self._opponents, self._counts = before
            for rule, own in zip(self._when, rules, strict=True):
                rule.load_state_dict(own)
            self._discard(found.values(), before[0].values())
            raise
        self._discard(before[0].values(), found.values())

    def pack(self, opponent: Opponent) -> dict[str, Any]:
        """An opponent and its files as plain data, for `unpack`.

        Args:
            opponent: The opponent.

        Returns:
            Numbers, texts and arrays of bytes.
        """
        return opponent.pack()

    def unpack(self, packed: Mapping[str, Any], unpacked: Mapping[str, Opponent] | None = None) -> Opponent:
        """The opponent that `pack` was given: the one that is here, if it is the same, or one with files of its own.

        Args:
            packed: What it gave.
            unpacked: Opponents that it has returned before, by id, which will do, too, where they are the same.

        Returns:
            The opponent; it is in no pool yet.

        Raises:
            ArgumentError: It is something else; or nothing says how to build such a policy.
            CheckpointError: What it holds for a file is none.
        """
        try:
            name, of, step, anchor = packed["id"], packed["of"], packed["step"], packed["anchor"]
            contents = [None if file is None else bytes(file) for file in packed["files"]]
            is_one = len(contents) == len(KINDS) and contents[0] is not None
            if not (isinstance(name, str) and isinstance(of, str) and is_one):
                raise ValueError(f"{name!r} is no opponent")
            make = RandomPolicy if packed["random"] else self._make(of)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"expected an opponent's state: {error!r:.200}") from error
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
        return Opponent(name, of, step, anchor, make, (cast(Path, files[0]), files[1], files[2]))

    def _discard(self, opponents: Iterable[Opponent], kept: Iterable[Opponent]) -> None:
        """Let those go that are not kept."""
        stay = {id(opponent) for opponent in kept}
        for opponent in opponents:
            if id(opponent) not in stay:
                self.let_go(opponent)

    def save(self, folder: FilePath) -> None:
        """Write all of it into another folder, from which `load` builds it; its own is always up to date.

        Args:
            folder: The folder; made if need be. A pool that is in it is there until this one is, and then gone.

        Raises:
            OSError: It cannot be written.
            CheckpointError: A link stands where its index would be, and leads out of the folder.
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
                    draft.unlink(missing_ok=True)  # a link there would be followed
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
        """Go on with the pool that is in a folder; new opponents come there, too. Nothing in the files is executed.

        Args:
            folder: The folder.
            make: As the constructor's.
            capacity: Likewise.
            leaves: Likewise.
            when: Likewise; rules go on where those were that were given when it was written, if they are as many.
            board: Likewise.

        Returns:
            The pool, with its opponents, counts and results.

        Raises:
            CheckpointError: There is no pool, a file is damaged or missing, or lies outside the folder. Nothing has
                changed.
            ArgumentError: Nothing says how to build some of its policies.
        """
        pool = cls.__new__(cls)
        pool.folder, pool.capacity = Path(folder), None if capacity is None else _positive(capacity)
        pool._make, pool._leaves, pool._when, pool._board = make_of(make), leaves, tuple(when), board
        pool._fitting = []
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
    read_archive(path)  # to see that it is one


def _positive(number: int) -> int:
    found = whole_number(number)
    if found is None or found < 1:
        raise ArgumentError(f"capacity must be an integer of at least 1, or None, got {number!r}")
    return found


def _sweep(folder: Path) -> None:
    """Remove what a pool left behind that was killed; other files are none of its business."""
    rows = read_archive(folder / INDEX)["opponents"]
    known = {name for row in rows for name in row[4]} | {INDEX}
    for what in KINDS:
        for file in (*folder.glob(f"*.{what}-*.npz"), *folder.glob(f".*.{what}*.tmp")):
            if file.name not in known:
                file.unlink(missing_ok=True)


def _remove(how: Callable[[Path], object], pid: int, path: Path) -> None:
    if os.getpid() == pid:  # a forked child has the pool, too, and not the right to its files
        with contextlib.suppress(OSError):  # another process was faster
            how(path)
