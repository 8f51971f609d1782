"""Which envs are stepped together: `LockstepScheduler`, and `OnDemandScheduler` for envs driven from outside.

`EnvStep` holds the replies of some envs in one form, whatever the autoreset mode.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from marlvec.env_ids import Where, rows_of
from marlvec.errors import ArgumentError, EnvFault, EnvsDriven, StateError
from marlvec.serialization.saved import Saved, SavedField, State
from marlvec.vector.vector_env import VectorEnv
from marlvec.vector.vector_step import VectorStep


def index_of(ids: NDArray[np.int64]) -> Where:
    """Return ascending row numbers (n,) as an index: a slice if evenly spaced (four times as fast as an array)."""
    rows = rows_of(ids)
    if isinstance(rows, slice) or not len(ids):
        return rows
    first, last = int(ids[0]), int(ids[-1])
    step, rest = divmod(last - first, len(ids) - 1)
    if rest or np.count_nonzero(ids[1:] - ids[:-1] != step):
        return ids
    return slice(first, last + 1, step)


AnyArray = NDArray[Any]
_FLAGS = ("terminated", "truncated", "missing", "alive", "acting", "done", "fault", "quiet")


class EnvStep:
    """Rows of some envs in env order: the end of an ended episode together with the beginning of the next.

    Same-step mode returns both at once. In the other modes `renew` adds the new episodes' first rows. ``writable``:
    whether the step's arrays are this object's to write to.

    Attributes:
        env_ids: (n,) int64, ascending; ``everything``: these are all envs; ``where``: the same as an index.
        obs, final: Per group, per leaf: (n, A_g, …), present and final observations.
        missing: (n, A) bool, the agent ended and has no final observation.
        masks: Per group (n, A_g, k) bool, or None.
        rewards: (n, A) float64.
        terminated, truncated, ended, alive, acting: (n, A) bool; no agent has ended in an episode that was lost.
        eventful: Whether any agent has ended, or an episode is over.
        done, fault, quiet: (n,) bool.
        given: (env id, agent name, action, whether it is the env's) of agents that do something unasked.
        untrained: Ids of envs whose episode begins here and is for no batch.
        is_first: Whether all these rows begin episodes, and nothing came before them; see `OnDemandScheduler`.
        state, final_state: (n, …) global states, the latter where ``done``; None where the envs give none.
        results: What the envs returned, as it came: at once, or one after the other.
    """

    __slots__ = (
        "_writable",
        "acting",
        "alive",
        "done",
        "ended",
        "env_ids",
        "eventful",
        "everything",
        "fault",
        "final",
        "final_state",
        "given",
        "is_first",
        "masks",
        "missing",
        "obs",
        "quiet",
        "results",
        "rewards",
        "state",
        "terminated",
        "truncated",
        "untrained",
        "where",
    )

    def __init__(self, step: VectorStep, num_envs: int, *, writable: bool) -> None:
        self.results = [step]
        self.env_ids = step.env_ids
        self.everything = len(step.env_ids) == num_envs
        self.obs, self.final, self.masks = step.obs_leaves, step.final_leaves, step.action_masks
        self.rewards, self.terminated, self.truncated = step.rewards, step.terminated, step.truncated
        self.missing = step.final_missing
        self.alive, self.acting, self.done = step.alive, step.acting, step.done
        self.eventful = step.eventful
        # Where nothing has happened these are all False, like the done flags, and nothing writes to them.
        self.fault, self.quiet = (step.fault, step.quiet) if self.eventful else (step.done, step.done)
        self.state, self.final_state = step.state, step.final_state
        self.given, self.untrained = step.off_policy_actions, step.untrained
        self.is_first = False
        self._writable = writable
        if not self.everything and np.count_nonzero(step.env_ids[1:] < step.env_ids[:-1]):
            self._choose(np.argsort(step.env_ids))  # first come, first in row: no order to build on
        self.where: Where = slice(None) if self.everything else index_of(self.env_ids)
        self.ended = self.terminated | self.truncated if self.eventful else self.terminated
        if self.eventful and np.count_nonzero(self.fault):
            self.ended[self.fault] = False  # there are no final observations of what was lost

    def _choose(self, rows: NDArray[np.int64]) -> None:
        same = self.final is self.obs
        self.obs = [[leaf[rows] for leaf in leaves] for leaves in self.obs]
        self.final = self.obs if same else [[leaf[rows] for leaf in leaves] for leaves in self.final]
        self.masks = [None if mask is None else mask[rows] for mask in self.masks]
        for name in ("env_ids", "rewards", *_FLAGS):
            setattr(self, name, getattr(self, name)[rows])
        if self.state is not None and self.final_state is not None:
            self.state, self.final_state = self.state[rows], self.final_state[rows]
        self._writable = True

    def part(self, chosen: NDArray[np.bool_]) -> EnvStep:
        """Return the rows where the mask (n,) is True."""
        part = copy.copy(self)
        part._choose(np.flatnonzero(chosen))
        part.everything, part.where, part.ended = False, index_of(part.env_ids), self.ended[chosen]
        mine = set(part.env_ids.tolist())
        part.given = [given for given in self.given if given[0] in mine]
        part.untrained = [i for i in self.untrained if i in mine]
        return part

    @classmethod
    def join(cls, parts: Sequence[EnvStep]) -> EnvStep:
        """Join rows of different envs that arrived one after the other into one step."""
        if len(parts) == 1:
            return parts[0]
        whole = copy.copy(parts[0])
        whole.obs = _stack([part.obs for part in parts])
        apart = any(part.final is not part.obs for part in parts)
        whole.final = _stack([part.final for part in parts]) if apart else whole.obs
        lengths = [len(part.env_ids) for part in parts]
        whole.masks = [_join_masks(masks, lengths) for masks in zip(*(part.masks for part in parts), strict=True)]
        for name in ("env_ids", "rewards", *_FLAGS, "ended"):
            setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        for name in ("state", "final_state"):
            if getattr(whole, name) is not None:
                setattr(whole, name, np.concatenate([getattr(part, name) for part in parts]))
        whole.eventful = any(part.eventful for part in parts)
        whole.results = [step for part in parts for step in part.results]
        order = np.argsort(whole.env_ids)
        whole._choose(order)
        whole.ended, whole.where = whole.ended[order], index_of(whole.env_ids)
        whole.given = sorted((given for part in parts for given in part.given), key=itemgetter(0))
        whole.untrained = sorted(i for part in parts for i in part.untrained)
        return whole

    def own(self) -> None:
        """Copy the arrays that are still to be read, before the next call of the envs overwrites them."""
        if not self._writable:
            self.obs = [[leaf.copy() for leaf in leaves] for leaves in self.obs]
            self.masks = [None if mask is None else mask.copy() for mask in self.masks]
            self.alive, self.acting = self.alive.copy(), self.acting.copy()
            self.state = None if self.state is None else self.state.copy()
            self._writable = True

    def renew(self, other: EnvStep) -> None:
        """Replace the last rows of ended episodes by the first rows of new ones; call `own` before the envs' reset."""
        at = np.searchsorted(self.env_ids, other.env_ids)
        for leaves, new_leaves in zip(self.obs, other.obs, strict=True):
            for leaf, new in zip(leaves, new_leaves, strict=True):
                leaf[at] = new
        for g, (mask, new_mask) in enumerate(zip(self.masks, other.masks, strict=True)):
            if new_mask is None:
                continue
            if mask is None:  # no env has given one before
                self.masks[g] = mask = np.ones((len(self.env_ids), *new_mask.shape[1:]), np.bool_)
            mask[at] = new_mask
        if self.state is not None:
            self.state[at] = other.state
        self.given = [given for given in self.given if given[0] not in other.env_ids] + other.given
        self.untrained = [i for i in self.untrained if i not in other.env_ids] + other.untrained
        self.alive[at] = other.alive
        self.acting[at] = other.acting


def _stack(parts: Sequence[list[list[AnyArray]]]) -> list[list[AnyArray]]:
    """Per group, per leaf: the parts' rows one after the other."""
    return [[np.concatenate(leaves) for leaves in zip(*group, strict=True)] for group in zip(*parts, strict=True)]


def _join_masks(masks: Sequence[AnyArray | None], lengths: Sequence[int]) -> AnyArray | None:
    """Masks of one group; before an env gives the first one everything is allowed."""
    given = next((mask for mask in masks if mask is not None), None)
    if given is None:
        return None
    shape, pairs = given.shape[1:], zip(masks, lengths, strict=True)
    return np.concatenate([np.ones((n, *shape), np.bool_) if mask is None else mask for mask, n in pairs])


IntArray = NDArray[np.int64]

EnvsNeeded = Callable[[int], int]
"""Takes how many env steps are under way or not counted yet; says how many envs must be stepped after them."""

_NO_ENVS: IntArray = np.zeros(0, np.int64)


class LockstepScheduler(Saved):
    """Sends to the envs and receives from them.

    Envs step in *rounds*: in each round all living envs (or as many as are still needed) make one step. Without
    overlap, a round begins when all envs of the last round have replied. With overlap, a round is sent in two halves; a
    half continues while the other half's replies are pending, once it is certain that all envs take part in the next
    round. So every env makes the same steps with and without overlap.

    Envs that were sent to together are received together, in the order of sending, so that timing has no effect.
    """

    saved_as = "rounds"
    saved_fields: ClassVar = {
        "round": SavedField("round_N"),
        "open": SavedField("_open"),
        "behind": SavedField("_behind"),
        "living": SavedField("living", (None,)),
    }

    def __init__(self, envs: VectorEnv, *, overlap: bool) -> None:
        self._envs, self._overlap = envs, overlap
        self._drive_count = 0  # the envs', as this object's last call left it
        self.all_ids: IntArray = np.arange(envs.num_envs)
        self.living = self.all_ids  # ids of envs that are not masked
        self._resting_N = np.zeros(envs.num_envs, np.bool_)
        self._going = self.all_ids  # of those that live, who does not rest
        self.round_N = np.zeros(envs.num_envs, np.int64)  # each env's current or last round
        self._open = 0  # the last round that may begin
        self._behind = 0  # how many steps those that go are behind it, together
        self._all_begin = self._all_take_part = True  # whether those that are due begin a round, in which all are
        self._away_N = np.zeros(envs.num_envs, np.bool_)
        self._num_away = 0
        self._sent: deque[IntArray] = deque()  # envs that were sent to together, and were not received
        self._all_are_away = False  # all were sent to at once: they come back so, and `_away_N` does not say it
        self._inbox: list[EnvStep] = []  # came while others were waited for
        # Whether rows were requested and not yet received. True after an interrupted `receive`, which may be called
        # again: nothing was lost.
        self.is_waiting = False
        self.goal: object = None  # of the batch that the next call collects

    def check_alone(self) -> None:
        """Raise `EnvsDriven` if other code drove the envs since this object did; so do sending and receiving."""
        if self.is_driven:
            raise EnvsDriven(
                "the envs of this collector were reset, stepped or received from since it last did so itself: by code "
                "of yours, by another collector, or in a call that Ctrl-C has ended. So its running episodes are lost: "
                "call reset() to begin new ones, and give others envs of their own, marlvec.make(...)"
            )

    @property
    def is_driven(self) -> bool:
        """Whether `check_alone` would raise."""
        return self._envs.drive_count != self._drive_count

    @property
    def all_go_together(self) -> bool:
        """Whether each round is one step of all envs, and all have replied."""
        return not self._overlap and not self._num_away and len(self._going) == len(self.all_ids)

    @property
    def order_N(self) -> NDArray[np.int64]:
        """Finished episodes are in order of this and the env."""
        return self.round_N

    @property
    def is_on_the_way(self) -> bool:
        """Whether a reply is pending."""
        return self._num_away > 0

    @property
    def is_in_a_round(self) -> bool:
        """Whether some envs are one step ahead of others."""
        return self._overlap and (self._num_away > 0 or self._behind > 0)

    def rounds(self, env_id: IntArray) -> IntArray | int:
        """Return the round that rows of these envs come in: of all, or (n,) of each."""
        if self.all_go_together:
            return self._open
        found: IntArray = self.round_N[env_id]
        return found

    def among_those_back(self, env_ids: IntArray) -> NDArray[np.bool_] | None:
        """Return an (N,) mask of these envs; None if no other env has replied, so that all waiting rows are theirs."""
        if len(env_ids) + self._num_away == len(self.living):
            return None
        chosen = np.zeros(len(self.all_ids), np.bool_)
        chosen[env_ids] = True
        return chosen

    # --- who may go

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Begin a new call of `collect`; drop conclusions of the last call, which may have failed."""
        to_come = self._num_away + self._behind
        if to_come and not needed(to_come - 1):
            self._open, self._behind = int(self.round_N.max()), 0
            self.round_N[:] = self._open
        # Where all go together `due` is not called, and its last result was of those behind the ones it had sent.
        self._all_begin = self._all_take_part = not self._num_away and not self._behind

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """Return the envs that make their next step now; None for all.

        With overlap these are one half: call again after sending to them. If only some envs are needed, those with the
        fewest steps in ``steps_N`` go.
        """
        going = self._going
        self._all_begin = not self._num_away and not (self._overlap and self._behind)
        if self._all_begin:
            k = needed(0)
            self._all_take_part = k >= len(going)
            if not self._all_take_part:
                chosen = np.sort(going[np.argsort(steps_N[going], kind="stable")[:k]])
            else:
                # Every other one: so every worker has some of both halves.
                chosen = going[::2] if self._overlap else going
            return None if len(chosen) == len(self.all_ids) else chosen
        if not self._overlap or self._num_away == len(self.living):
            return _NO_ENVS
        idle = going[~self._away_N[going]]
        if not len(idle):
            return idle
        rounds = self.round_N[idle]
        if np.count_nonzero(rounds == self._open) and needed(self._num_away + self._behind) >= len(going):
            self._open, self._behind = self._open + 1, self._behind + len(going)
        last = rounds.min()
        return idle[rounds == last] if last < self._open else _NO_ENVS

    def rest(self, resting_N: NDArray[np.bool_]) -> None:
        """Exclude these envs from `due`, until the next call of `rest`."""
        self._resting_N = resting_N
        self._going = self.living[~resting_N[self.living]]
        self._behind = int((self._open - self.round_N[self._going]).sum())

    # --- on the way

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Send actions to envs that were `due`."""
        envs = self._envs
        if envs.drive_count != self._drive_count:
            self.check_alone()
        envs.send(actions, env_ids)
        if env_ids is None:  # all are due: none is away
            self._open = int(self.round_N[self.round_N.argmax()]) + self._all_begin  # a quarter of the time of max()
            self.round_N[:] = self._open
            self._behind, self._num_away, self._all_are_away = 0, len(self.all_ids), True
            self._drive_count = envs.drive_count
            return
        if self._all_begin:
            self._open = int(self.round_N.max()) + 1
            self._behind = len(self._going)
        if self._all_begin and not self._all_take_part:
            self.round_N[:] = self._open  # an env that does not take part is left out of this round
            self._behind = 0
        else:
            self.round_N[env_ids] += 1
            self._behind -= len(env_ids)
        self._note_sent(env_ids)
        self._sent.append(env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Begin an episode in some envs, or in all."""
        self.check_alone()
        ask = self._envs.async_reset if self._num_away else self._envs.reset_send
        ask(seed=seed, env_ids=env_ids)
        self._note_sent(env_ids)

    def _note_sent(self, env_ids: IntArray | None) -> None:
        self._drive_count = self._envs.drive_count
        if env_ids is None:
            self._away_N[:] = True
            self._num_away = len(self.all_ids)
        else:
            self._away_N[env_ids] = True
            self._num_away += len(env_ids)

    # --- back

    def receive(self) -> EnvStep:
        """Return the step of the envs that were sent to first."""
        self.is_waiting = False
        if self._all_are_away:
            env_step = self._take(None)
            self._num_away, self._all_are_away = 0, False
            return env_step
        sent = self._sent[0]
        if len(sent) == self._num_away and not self._inbox:  # nothing else can come, and nothing has
            env_step = self._take(None)
        else:
            mine_N = np.zeros(len(self.all_ids), np.bool_)
            mine_N[sent] = True
            while missing := len(sent) - sum(int(mine_N[some.env_ids].sum()) for some in self._inbox):
                self._inbox.append(self._take(missing))
            chosen = [(some, mine_N[some.env_ids]) for some in self._inbox]
            env_step = EnvStep.join([some.part(mine) for some, mine in chosen if mine.any()])
            self._inbox = [some if not mine.any() else some.part(~mine) for some, mine in chosen if not mine.all()]
        self._sent.popleft()
        return self._hand_out(env_step)

    def begin_next(self, env_step: EnvStep, env_ids: IntArray, idle: Callable[[IntArray], Any]) -> IntArray:
        """Begin the next episode in these envs (retry after faults), and put its first rows into ``env_step``.

        ``idle`` returns actions of envs in which no agent acts. Returns the envs that have begun an episode.
        """
        autoreset, waiting = self._envs.autoreset, env_ids
        if autoreset.begins_at_once:
            return env_ids
        env_step.own()
        while len(waiting := self.of_living(waiting)):
            if autoreset.begins_on_next_step:
                self.check_alone()
                self._envs.send(idle(waiting), waiting)  # a step that belongs to no round
                self._note_sent(waiting)
            else:
                self.reset(env_ids=waiting)
            again = []
            for fresh in self.receive_all(waiting):
                env_step.renew(fresh)
                self.leave_out_masked(fresh)
                again.append(fresh.env_ids[fresh.done])
            waiting = np.sort(np.concatenate(again))
        return env_ids

    def receive_all(self, env_ids: IntArray) -> Iterator[EnvStep]:
        """Yield the steps of these envs until all have replied; other replies are received later."""
        missing = len(env_ids)
        while missing:
            env_step = self._take(None if missing == self._num_away else 1)
            mine = np.isin(env_step.env_ids, env_ids)
            if not mine.all():
                self._inbox.append(env_step.part(~mine))
                env_step = env_step.part(mine)
            missing -= len(env_step.env_ids)
            if len(env_step.env_ids):
                yield self._hand_out(env_step)

    def _take(self, at_least: int | None) -> EnvStep:
        envs = self._envs
        if envs.drive_count != self._drive_count:
            self.check_alone()
        self.is_waiting = True
        step = envs.recv(at_least)
        self.is_waiting = False
        self._drive_count = envs.drive_count
        return EnvStep(step, len(self.all_ids), writable=envs.copy)

    def _hand_out(self, env_step: EnvStep) -> EnvStep:
        self._away_N[env_step.where] = False
        self._num_away -= len(env_step.env_ids)
        return env_step

    def abandon(self) -> None:
        """Drop all pending replies, and let all envs begin their next round."""
        self._inbox.clear()
        self._sent.clear()
        with suppress(EnvFault):
            self._envs.drain()
        self._away_N[:] = self._all_are_away = False
        self._num_away = self._behind = 0
        self._open = int(self.round_N.max())  # no round comes twice: rows are ordered by them
        self.round_N[:] = self._open
        self._drive_count = self._envs.drive_count

    # --- saved

    def get_state(self) -> State:
        """Return the rounds of all envs and the ids of living ones; no step may be in flight (`StateError`)."""
        if self._num_away:
            raise StateError(f"{self._num_away} envs have not come back")
        return super().get_state()

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Check the ids of envs."""
        living = values["living"]
        if not np.array_equal(np.intersect1d(living, self.all_ids), living):
            raise ArgumentError(f"{self.saved_as}: living: expected ascending ids of envs, got {living.tolist()}")
        return {**values, "_going": living, "_num_away": 0, "is_waiting": False}

    def install(self, values: Mapping[str, Any]) -> None:
        """Set the attributes, once the envs are in the state of that moment."""
        self._inbox.clear()
        self._sent.clear()
        self._away_N[:] = self._all_are_away = False
        super().install({**values, "_drive_count": self._envs.drive_count})
        self._resting_N[:] = False

    # --- who is out for good

    def leave_out_masked(self, env_step: EnvStep) -> None:
        """Exclude masked envs, once their own rows report it."""
        if masked := self._envs.masked_env_ids:
            silent = env_step.env_ids[~env_step.alive.any(axis=1)]
            self.living = self.living[~np.isin(self.living, np.intersect1d(silent, masked))]
            self.rest(self._resting_N)

    def of_living(self, env_ids: IntArray) -> IntArray:
        """Drop masked envs from these ids."""
        return env_ids if len(self.living) == len(self.all_ids) else env_ids[np.isin(env_ids, self.living)]


class OnDemandScheduler(LockstepScheduler):
    """Sends to external envs, whose simulators decide when they reply, and receives from them.

    Each env continues as soon as its agents' actions are sent, and begins its next episode when its simulator does.
    There are no rounds: `round_N` numbers arrivals. No more rows are returned than are needed; others wait for the next
    call.
    """

    def __init__(self, envs: VectorEnv) -> None:
        super().__init__(envs, overlap=False)
        self._beginning_N = np.zeros(envs.num_envs, np.bool_)  # sent for, and no episode runs yet
        self._needed = 0
        self._number = 0

    @property
    def all_go_together(self) -> bool:
        """False: each env steps independently."""
        return False

    @property
    def is_on_the_way(self) -> bool:
        """False: no reply is waited for."""
        return False

    @property
    def is_in_a_round(self) -> bool:
        """False: there are none."""
        return False

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Do nothing: no call depends on the last one."""

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """Return all envs that have replied; steps beyond this call are kept for the next one."""
        self._needed = needed(0)
        if not self._needed or self._num_away == len(self.all_ids):
            return _NO_ENVS
        idle = self._going[~self._away_N[self._going]]
        return None if len(idle) == len(self.all_ids) else idle

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Send actions to envs that were `due`."""
        self.check_alone()
        self._envs.send(actions, env_ids)
        self._note_sent(env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Request the next episode of some envs, or of all; it begins when its simulator begins it."""
        self.check_alone()
        self._envs.async_reset(seed=seed, env_ids=env_ids)
        self._beginning_N[slice(None) if env_ids is None else env_ids] = True
        self._note_sent(env_ids)

    def begin_next(self, env_step: EnvStep, env_ids: IntArray, idle: Callable[[IntArray], Any]) -> IntArray:
        """Schedule the next episode of these envs, which have no running episode."""
        self.reset(env_ids=env_ids)
        return _NO_ENVS

    def receive_all(self, env_ids: IntArray) -> Iterator[EnvStep]:
        """Yield nothing: replies are received as they arrive."""
        return iter(())

    def receive(self) -> EnvStep:
        """Return arrived rows of one kind: first rows of episodes, or replies to actions; errors keep arrived rows."""
        self.is_waiting = False
        if not self._inbox:
            self._sort_in(self._take(1))
        env_step = self._inbox.pop(0)
        if not env_step.is_first and len(env_step.env_ids) > self._needed:
            chosen = np.zeros(len(env_step.env_ids), np.bool_)
            chosen[: self._needed] = True
            self._inbox.insert(0, env_step.part(~chosen))
            env_step = env_step.part(chosen)
        self._number += 1
        self.round_N[env_step.env_ids] = self._number
        self._beginning_N[env_step.env_ids] = False
        return self._hand_out(env_step)

    def _sort_in(self, env_step: EnvStep) -> None:
        first = self._beginning_N[env_step.env_ids]
        for chosen, is_first in ((first, True), (~first, False)):
            if chosen.any():
                part = env_step if chosen.all() else env_step.part(chosen)
                part.is_first = is_first
                self._inbox.append(part)


def scheduler_for(envs: VectorEnv, *, overlap: bool) -> LockstepScheduler:
    """Return the scheduler for these envs; where no env goes in rounds there is nothing to overlap."""
    return LockstepScheduler(envs, overlap=overlap) if envs.lockstep else OnDemandScheduler(envs)
