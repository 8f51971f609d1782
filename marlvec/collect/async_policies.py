"""`AsyncScheduler`: envs whose policies answer row by row, each stepped as soon as its own answers are there.

`AsyncRunner` gives the answers to the rollout loop. Imported only where a policy is an `AsyncPolicy`.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from itertools import accumulate
from operator import attrgetter
from time import monotonic
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.background import SampleTarget
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics import CurrentState
from marlvec.collect.policy_runner import PolicyAnswer, PolicyRunner
from marlvec.collect.rows import PolicyPart
from marlvec.collect.scheduling import EnvsNeeded, EnvStep, LockstepScheduler
from marlvec.connectors import Rows
from marlvec.errors import ContractWarning
from marlvec.policies import AnswerLimit, AsyncPolicy, Policy, PolicyOutput
from marlvec.policies.answers import Finished, Request, Row, ask_all, gather, wait_for
from marlvec.policies.policy_map import asynchronous
from marlvec.trees import Tree
from marlvec.vector.calls import is_interrupt
from marlvec.vector.vector_env import VectorEnv

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Table = dict[int, Request]
"""Lane to the request for its ready row."""

_NO_ENVS: IntArray = np.zeros(0, np.int64)
_AHEAD = 2  # batches whose games may be played, with overlap


class AsyncRunner(PolicyRunner):
    """A policy that was asked before: its answers are in ``table``."""

    table: Table = {}  # the scheduler's, once it asks

    @property
    def asked(self) -> AsyncPolicy | None:
        """The policy, if it answers row by row."""
        return asynchronous(self.policy)

    def act(self, ready: PolicyPart, *, explore: bool) -> PolicyAnswer:
        """Return the answers to ready rows; an answer of the wrong form is requested again."""
        try:
            return super().act(ready, explore=explore)
        except Exception:
            self._ask_again(ready)
            raise

    def _ask(self, policy: Policy, rows: Rows, *, explore: bool) -> tuple[Tree, Mapping[str, Tree]]:
        found = asynchronous(policy)
        asked = policy if found is None else _Asked(found, self.table, self._num_agents)
        return super()._ask(asked, rows, explore=explore)

    def transform(self, answer: PolicyAnswer) -> None:
        """Send an answer through the action connectors; each row has the policy's version when it was asked."""
        if answer is not self.unsent:
            asked = [self.table.get(lane) for lane in answer.ready.lanes.tolist()]
            versions = [answer.version if one is None or not one.is_done else one.version for one in asked]
            answer.version, self._version_n = versions[0], np.array(versions)
        try:
            super().transform(answer)
        except Exception:
            self._ask_again(answer.ready)
            raise

    def _ask_again(self, ready: PolicyPart) -> None:
        for lane in ready.lanes.tolist():
            if (request := self.table.get(lane)) is not None:
                request.is_done = False


class _Asked(Policy):
    """Stands for a policy in a call of `act`: the answers that have come, and for other rows those that it gives now.

    Others are rows of which connectors need the policy's columns, though their actions are given.
    """

    def __init__(self, policy: AsyncPolicy, table: Table, num_agents: int) -> None:
        self._policy, self._table, self._num_agents = policy, table, num_agents

    def act(self, rows: Rows, *, explore: bool = True) -> PolicyOutput:
        lanes = (rows["env_id"] * self._num_agents + rows["agent_index"]).tolist()
        requests = [self._table.get(lane) for lane in lanes]
        values = [None if request is None or not request.is_done else request.value for request in requests]
        others = [i for i, request in enumerate(requests) if request is None or not request.is_done]
        if others:
            for i, value in zip(others, ask_all(self._policy, rows, others, explore=explore), strict=True):
                values[i] = value
        return gather(self._policy, values)


class AsyncScheduler(LockstepScheduler):
    """Requests answers to ready rows; an env is due once the answers of its agents are there.

    `round_N` counts each env's own steps. What is in a batch does not depend on which answers come first:

    - complete mode: games are in order of their number in their env, then of envs; a batch has the next ones.
    - truncate mode without overlap, an amount of env steps: each env makes as many as in lockstep.

    In truncate mode otherwise steps count as they come. With overlap, envs also play games of the batch after the next
    one; without, they wait.

    Attributes:
        loop: The rollout loop.
    """

    loop: Any

    def __init__(
        self,
        envs: VectorEnv,
        runners: Mapping[int, PolicyRunner],
        episodes: EpisodeTracker,
        current: CurrentState,
        *,
        complete: bool,
        overlap: bool,
        note_random: Callable[[PolicyRunner, PolicyPart], object],
    ) -> None:
        super().__init__(envs, overlap=False)
        self._runners, self._episodes, self._current = runners, episodes, current
        self._complete, self._ahead, self._note_random = complete, overlap, note_random
        self._agents = envs.agent_num
        self._is_stale = False
        self._mode: Literal["none", "games", "shares", "free"] = "none"
        self._amount, self._unit = 0, ""
        self._left_N = np.zeros(envs.num_envs, np.int64)  # steps of its share that an env still has to make
        self._seen: tuple[Any, ...] = ()  # what `_whole` and `_allowed_games_N` follow from
        self._whole, self._allowed_games_N = False, np.zeros(envs.num_envs, np.bool_)
        self._table: Table = {}
        self._fresh_N = np.zeros(envs.num_envs, np.bool_)  # envs that are back, and whose rows were not looked at
        self._lacking: dict[int, int] = {}  # env to number of answers that it waits for
        self._answered: set[int] = set()  # envs that may be sent to
        self._waiting: dict[AnswerLimit, deque[Request]] = {}  # not sent yet
        self._flying: dict[Request, None] = {}  # sent, in order
        self._finished = Finished()
        self._held: IntArray | None = None  # were due, and not sent to: policies and connectors may have answered them

    # --- batches

    @property
    def all_go_together(self) -> bool:
        """False: each env steps independently."""
        return False

    def rounds(self, env_id: IntArray) -> IntArray | int:
        """Return the step of its env that each row came in, (n,)."""
        found: IntArray = self.round_N[env_id]
        return found

    @property
    def order_N(self) -> IntArray:
        """Finished games are in order of this and the env: in complete mode the game's number in its env."""
        return self._episodes.number_N if self._complete else self.round_N

    @property
    def is_in_a_round(self) -> bool:
        """Whether a reply is pending, or games before the batch's last one are still played."""
        if self._mode != "games":
            return self._num_away > 0
        self._look_at_games()
        return not self._whole or self._num_away > 0

    def begin_call(self, needed: EnvsNeeded) -> None:
        """Begin a call that collects a batch of `goal`; without one, only pending replies are taken in."""
        goal, self.goal = self.goal, None
        self._seen = ()
        if not isinstance(goal, SampleTarget):
            self._mode = "none"
            return
        self._amount, self._unit = goal.amount, goal.unit
        if self._complete:
            self._mode = "games"
        elif goal.unit == "env_steps" and not self._ahead:
            self._mode = "shares"
            self._share_out(goal.amount - self._current.state.counters.waiting_env_steps)
        else:
            self._mode = "free"

    def _share_out(self, steps: int) -> None:
        """Share out steps so that all envs have made equally many, the first ones one more."""
        going = self._going
        self._left_N[:] = 0
        if not len(going) or steps <= 0:
            return
        made = self._episodes.steps_N[going]
        each, rest = divmod(steps, len(going))
        self._left_N[going] = each
        fewest = np.argsort(made, kind="stable")[:rest]
        self._left_N[going[fewest]] += 1

    def _allowed_N(self, needed: EnvsNeeded) -> BoolArray:
        """Which envs may make a step in this call: (N,)."""
        allowed = np.zeros(len(self.all_ids), np.bool_)
        if self._mode == "none":
            return allowed
        if self._mode == "shares":
            going = self._going
            if not self._num_away and not np.count_nonzero(self._left_N[going]) and (steps := needed(0)):
                self._share_out(steps)  # steps were lost
            allowed[going] = self._left_N[going] > 0
        elif self._mode == "games":
            self._look_at_games()
            allowed[self._going] = self._allowed_games_N[self._going]
        else:
            allowed[self._going] = True
        return allowed

    def _look_at_games(self) -> None:
        """Find out whether the batch's games have ended, and which running games may go on."""
        finished, numbers = self._current.state.finished, self._episodes.number_N
        seen = finished, numbers, self._going
        if len(self._seen) == 3 and all(a is b for a, b in zip(seen, self._seen, strict=True)):
            return
        n, going = len(self.all_ids), self._going
        keys = numbers * n + self.all_ids  # in order of games
        sums = list(accumulate(map(attrgetter(self._unit), finished), initial=0))
        first = int(keys[going].min()) if len(going) else np.iinfo(np.int64).max
        self._whole = sums[bisect_left(finished, divmod(first, n))] >= self._amount
        amount = self._amount * (_AHEAD if self._ahead else 1)

        def before(key: int) -> int:
            """The least that games before this one bring: an unfinished one brings 1."""
            unfinished = np.maximum(0, -(-(key - going) // n) - numbers[going])
            return int(sums[bisect_left(finished, divmod(key, n))] + unfinished.sum())

        self._allowed_games_N[:] = False
        if len(going):
            low, high = first, int(keys[going].max()) + 1
            while low < high:  # the first game that is not needed
                middle = (low + high) // 2
                if before(middle) >= amount:
                    high = middle
                else:
                    low = middle + 1
            self._allowed_games_N[going] = keys[going] < low
        self._seen = seen

    # --- who may go

    def due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray | None:
        """Return envs whose answers are there; if no reply is pending, wait for an answer.

        Raises:
            Exception: A policy's failed answer, if it is to raise. It is requested again at the next call.
            KeyboardInterrupt: While it waits; requests are cancelled, and made again at the next call.
        """
        try:
            return self._due(needed, steps_N)
        except BaseException as error:
            if is_interrupt(error):
                self.cancel_requests()
            raise

    def _due(self, needed: EnvsNeeded, steps_N: IntArray) -> IntArray:
        if self._mode == "none":
            return _NO_ENVS
        if self._is_stale:
            self.cancel_requests()
        if self._held is not None:  # the last call has failed: ask again for what was refused
            self._answered.difference_update(self._held.tolist())
            self._fresh_N[self._held] = True
        while True:
            allowed = self._allowed_N(needed)
            if self._held is not None and not allowed[self._held].all():
                self._held = None
            self._look_at_rows(allowed)
            self._send_requests()
            if self._held is not None:
                if self._answered.issuperset(self._held.tolist()):
                    return self._held
            else:
                found = [i for i in self._answered if allowed[i]]
                if self._mode == "free" and len(found) > (most := needed(self._num_away)):
                    found = sorted(found, key=lambda i: (steps_N[i], i))[:most]
                if found:
                    self._held = np.array(sorted(found))
                    return self._held
            if self._num_away:
                return _NO_ENVS
            self._come_back(wait_for(self._finished, tuple(self._flying)))

    def _look_at_rows(self, allowed: BoolArray) -> None:
        """Make requests for the ready rows of envs that came back."""
        fresh = self._fresh_N & allowed & ~self._away_N
        if not np.count_nonzero(fresh):
            return
        ids = fresh.nonzero()[0]
        lacking = dict.fromkeys(ids.tolist(), 0)
        for runner in self._runners.values():
            if not isinstance(runner, AsyncRunner) or (policy := runner.asked) is None:
                continue
            runner.table = self._table
            ready = runner.ready
            envs = ready.lanes // self._agents
            mine = fresh[envs]
            if not np.count_nonzero(mine):
                continue
            self._note_random(runner, ready)
            if runner.off_policy.used and not runner.agent_connectors.policy_columns:
                mine &= ~runner.off_policy.among(ready.lanes)
            for i in mine.nonzero()[0].tolist():
                if self._request(runner, policy, ready, i):
                    lacking[int(envs[i])] += 1
        self._lacking.update(lacking)
        self._answered.update(i for i, number in lacking.items() if not number)
        self._fresh_N[ids] = False

    def _request(self, runner: AsyncRunner, policy: AsyncPolicy, ready: PolicyPart, i: int) -> bool:
        """Make a request for a ready row, unless there is one; return whether its answer is still to come."""
        lane = int(ready.lanes[i])
        at = i
        if isinstance(ready.part, slice):
            start, _, step = ready.part.indices(len(ready.columns["eps_id"]))
            at = start + i * step
        elif ready.part is not None:
            at = int(ready.part[i])
        columns = ready.columns
        key = int(columns["eps_id"][at]), int(columns["t"][at])
        old = self._table.get(lane)
        if old is not None and old.key == key and old.runner is runner:
            if old.is_done:
                return False
            if old.is_open:
                return True
        row = Row(columns, at, policy.answer_seed, explore=self.loop.explore)
        request = Request(policy, row, key=key, runner=runner, lane=lane)
        self._table[lane] = request
        self._waiting.setdefault(policy.limit, deque()).append(request)
        return True

    def _send_requests(self) -> None:
        """Send what waits, as far as the policies' limits allow."""
        for waiting in self._waiting.values():
            while waiting:
                request = waiting[0]
                if request.is_open and request.future is None:
                    if not request.send(self._finished, int(request.runner.policy.version)):
                        break
                    self._flying[request] = None
                waiting.popleft()

    def _come_back(self, requests: Collection[Request]) -> None:
        """Take in requests that have come back, or are late."""
        failed = []
        for request in requests:
            self._flying.pop(request, None)
            env_id = request.lane // self._agents
            if request.error is None:
                self._lacking[env_id] -= 1
                if not self._lacking[env_id]:
                    self._answered.add(env_id)
            else:
                failed.append(request)
                self._fresh_N[env_id] = True
        for request in failed:
            self._fail(request)

    def _fail(self, request: Request) -> None:
        policy, runner, error = request.policy, request.runner, request.error
        assert error is not None
        env_id, agent = divmod(request.lane, self._agents)
        policy.failures += 1
        name = f"policy {runner.policy_id!r}"
        where = f"env {env_id}: agent {self._envs.agents[agent]!r}"
        if policy.on_failure == "raise" or runner.agent_connectors.policy_columns:
            error.add_note(f"in {name}, {where}; nothing was sent to this env, collect() may be called again")
            raise error
        if policy.failures == 1:
            does = "its episode is lost" if policy.on_failure == "restart" else f"{policy.fallback!r:.100} is sent"
            warnings.warn(f"{name}, {where}: the answer failed, {error!r:.300}: {does}", ContractWarning, stacklevel=2)
        if policy.on_failure == "restart":
            if self._table.get(request.lane) is request:  # else another agent's answer has cost the episode
                self.loop.restart_envs(np.array([env_id]), None)
        else:
            runner.off_policy.note(request.lane, policy.fallback, f"{where}: fallback")

    # --- requests that are not wanted any more

    def cancel_requests(self) -> None:
        """Cancel all requests; those without an answer are made again when they are due. May be called again."""
        self._is_stale = True
        for request in tuple(self._table.values()):
            if not request.is_done:
                request.cancel()
        self._flying.clear()
        self._waiting.clear()
        self._lacking.clear()
        self._answered.clear()
        self._fresh_N[:] = True
        self._is_stale = False

    def wait_for_requests(self) -> None:
        """Wait until no request is under way; answers are kept."""
        for request in tuple(self._flying):
            if (future := request.future) is not None:
                wait([future], None if request.deadline is None else max(0.0, request.deadline - monotonic()))

    def _forget(self, env_ids: IntArray | None) -> None:
        """Cancel requests of these envs, and drop their answers."""
        self._held = None
        for env_id in (self.all_ids if env_ids is None else env_ids).tolist():
            for lane in range(env_id * self._agents, (env_id + 1) * self._agents):
                if (request := self._table.pop(lane, None)) is not None:
                    self._flying.pop(request, None)
                    if request.is_open:
                        request.cancel()
            self._answered.discard(env_id)
        self._fresh_N[slice(None) if env_ids is None else env_ids] = True

    # --- on the way

    def send(self, actions: Any, env_ids: IntArray | None) -> None:
        """Send actions to envs that were `due`. Where the envs refuse them, the policies are asked again."""
        if self._envs.drive_count != self._drive_count:
            self.check_alone()
        assert env_ids is not None
        try:
            self._envs.send(actions, env_ids)
        except Exception:
            for lane, request in self._table.items():
                if lane // self._agents in env_ids:
                    request.is_done = False
            raise
        self.round_N[env_ids] += 1
        self._left_N[env_ids] -= 1
        self._note_sent(env_ids)
        self._forget(env_ids)

    def reset(self, *, env_ids: IntArray | None = None, seed: int | None = None) -> None:
        """Begin an episode in some envs, or in all."""
        super().reset(env_ids=env_ids, seed=seed)
        self._forget(env_ids)

    def receive(self) -> EnvStep:
        """Return the step of envs that have replied."""
        self.is_waiting = False
        return self._hand_out(self._inbox.pop(0) if self._inbox else self._take(1))

    def _hand_out(self, env_step: EnvStep) -> EnvStep:
        self._fresh_N[env_step.env_ids] = True
        return super()._hand_out(env_step)

    def rest(self, resting_N: BoolArray) -> None:
        """Exclude these envs from `due`, until the next call of `rest`."""
        super().rest(resting_N)
        self._behind = 0

    def abandon(self) -> None:
        """Drop all pending replies, and cancel all requests."""
        super().abandon()
        self._forget(None)
        self.cancel_requests()

    def install(self, values: Mapping[str, Any]) -> None:
        """Set the attributes, once the envs are in the state of that moment."""
        super().install(values)
        self._forget(None)
        self.cancel_requests()
