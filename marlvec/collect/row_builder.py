"""From replies of the envs to rows, through the agent connectors, and into the logs of their policies.

`RandomSteps` are random actions in the first steps of a run; `RowDraws` draw numbers that belong to a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from time import perf_counter
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from marlvec.collect.columns import COLUMNS
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics import Metrics
from marlvec.collect.policies import PolicyRouter
from marlvec.collect.policy_runner import PolicyRunner, Selection
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import UNREAD, Moment, PolicyPart, copied_rows, part_of
from marlvec.collect.scheduling import EnvStep, LockstepScheduler
from marlvec.connectors.rows import RowRandom, Rows
from marlvec.env_ids import Where
from marlvec.sampling import SpaceSampler
from marlvec.serialization.saved import Saved, SavedField
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class RowBuilder:
    """Makes policies' rows, and sends them through the agent connectors.

    ``copies``: whether the envs' observations are arrays that the envs do not write into again.
    """

    def __init__(
        self,
        router: PolicyRouter,
        episodes: EpisodeTracker,
        metrics: Metrics,
        scheduler: LockstepScheduler,
        *,
        copies: bool,
    ) -> None:
        self._router, self._episodes, self._scheduler = router, episodes, scheduler
        self._timer = metrics.timers["agent_connectors"]
        self._of_envs = () if copies else ("obs", "action_mask")
        self._false_L = np.zeros(episodes.policy_NA.size, np.bool_)
        self._false_L.flags.writeable = False

    def build(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[Moment]:
        """Return the rows of these lanes (None: all), group by group; ``last``: they are final observations.

        Rows of several policies in one group are made together, and are parts of the same arrays.
        """
        found = self._before_connectors(env_step, lanes, last=last)
        for moment in found:
            for k, part in enumerate(moment.parts):
                if not self._router.runners[part.number].agent_connectors.is_identity:
                    self._observe(moment, k)
            if moment.removed:
                _leave_out(moment)
        return found

    def build_together(
        self, env_step: EnvStep, acting: IntArray | None, ended: IntArray
    ) -> tuple[list[Moment], list[Moment]]:
        """Return rows of agents that have ended while their episodes go on, and rows of ``acting`` ones (None: all).

        A policy's rows of both kinds pass its connectors in one call: what a connector shows of other agents is then of
        the same moment. No ended lane acts next.
        """
        all_ends = self._before_connectors(env_step, ended, last=True)
        all_following = self._before_connectors(env_step, acting, last=False)
        over = {part.number: (ends, k) for ends in all_ends for k, part in enumerate(ends.parts)}
        runners = self._router.runners
        for following in all_following:
            for k, part in enumerate(following.parts):
                if (found := over.pop(part.number, None)) is not None:
                    self._observe_together(*found, following, k)
                elif not runners[part.number].agent_connectors.is_identity:
                    self._observe(following, k)
            if following.removed:
                _leave_out(following)
        for ends, k in over.values():
            if not runners[ends.parts[k].number].agent_connectors.is_identity:
                self._observe(ends, k)
        return all_ends, all_following

    def _before_connectors(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[Moment]:
        router, found = self._router, []
        rewards_L = self._episodes.pay_all() if lanes is None and env_step.everything else None
        for runner in router.alone:
            if lanes is None:
                chosen = router.everyone(runner, env_step.env_ids)
            else:
                chosen = router.select(runner, env_step.env_ids, lanes)
            if len(chosen.lanes):
                moment, columns = self._make(runner.group_index, chosen, env_step, rewards_L, last=last)
                shared = self._of_envs if chosen.flat is None else ()
                moment.parts = [PolicyPart(runner.number, chosen.lanes, columns, None, chosen.places, shared)]
                found.append(moment)
        if not router.is_shared:
            return found
        env_ids = env_step.env_ids
        for g, chosen, shares in router.split_everyone(env_ids) if lanes is None else router.split(env_ids, lanes):
            moment, columns = self._make(g, chosen, env_step, rewards_L, last=last)
            moment.parts = [PolicyPart(runner.number, own, columns, part) for runner, part, own in shares]
            found.append(moment)
        return found

    def _observe(self, moment: Moment, k: int) -> None:
        """Send a policy's rows through its agent connectors."""
        before, parts = moment.parts[k], list(moment.parts)
        began = perf_counter()
        own = {name: part_of(column, before.part) for name, column in before.columns.items()}
        out, kept = self._router.runners[before.number].observe(Rows.of_length(own, len(before.lanes)))
        timer = self._timer
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        columns, shared = dict(out.items()), before.shared
        shared = [name for name, column in columns.items() if name in shared or column is not own.get(name)]
        lanes, places = (before.lanes, before.places) if kept is None else (before.lanes[kept], None)
        parts[k] = PolicyPart(before.number, lanes, columns, None, places, shared)
        moment.parts = parts
        if kept is not None:
            moment.removed = [*moment.removed, (before.number, before.lanes[~kept])]

    def _observe_together(self, ends: Moment, j: int, following: Moment, k: int) -> None:
        """Send last rows and rows to act on through their policy's connectors in one call, in the order of lanes."""
        last = ends.parts[j].lanes
        both = replace(following, parts=[ends.parts[j].join(following.parts[k])], removed=[])
        self._observe(both, 0)
        [part] = both.parts
        part.shared = tuple(part.columns)
        is_last = np.isin(part.lanes, last)  # of which none is removed
        for moment, i, mask in ((ends, j, is_last), (following, k, ~is_last)):
            parts = list(moment.parts)
            parts[i] = part.take(mask)
            moment.parts = parts
        following.removed = [*following.removed, *both.removed]

    def _make(
        self,
        g: int,
        chosen: Selection,
        env_step: EnvStep,
        rewards_L: NDArray[np.float64] | None,
        *,
        last: bool,
    ) -> tuple[Moment, dict[str, Tree]]:
        """Rows of one group, of no policy yet, and their columns; ``rewards_L``: of all agents, if all get rows."""
        router, episodes, places, n = self._router, self._episodes, chosen.places, len(chosen.lanes)
        rewards, first = episodes.pay(chosen.lanes, places) if rewards_L is None else (rewards_L[places], None)
        false = self._false_L[:n]
        leaves, tree = (env_step.final if last else env_step.obs)[g], router.groups[g].observation_tree
        obs: Tree = chosen.pick(leaves[0]) if tree.is_leaf else tree.unflatten([chosen.pick(leaf) for leaf in leaves])
        known = chosen.eps_id
        if known is None or known[0] is not episodes.eps_id_N:
            chosen.eps_id = known = episodes.eps_id_N, episodes.eps_id_N[chosen.env_id]
        eps_id = known[1]
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": eps_id,
            "t": episodes.turns(places),
            "obs": obs,
            "rewards": rewards,
            "terminated": router.pick(g, chosen, env_step.terminated) if last else false,
            "truncated": router.pick(g, chosen, env_step.truncated) if last else false,
            "first": false if first is None else first,
            "last": np.ones(n, np.bool_) if last else false,
        }
        mask = env_step.masks[g]
        if mask is not None:
            columns["action_mask"] = np.ones((n, mask.shape[2]), np.bool_) if last else chosen.pick(mask)
        if env_step.state is not None:
            columns["state"] = _state(chosen, env_step, last=last)
        missing = router.pick(g, chosen, env_step.missing) if last else None
        env_t = episodes.length_N[chosen.env_id]
        rounds = self._scheduler.rounds(chosen.env_id)
        return Moment(chosen.lanes, rounds, env_t, eps_id, last, missing, []), columns


def _leave_out(moment: Moment) -> None:
    """Drop what is known of rows that connectors took out."""
    there = ~np.isin(moment.lanes, np.concatenate([lanes for _, lanes in moment.removed]))
    moment.lanes, moment.env_t, moment.eps_id = moment.lanes[there], moment.env_t[there], moment.eps_id[there]
    if not isinstance(moment.ticks, int):
        moment.ticks = moment.ticks[there]
    moment.parts = [part for part in moment.parts if len(part.lanes)]


def _state(chosen: Selection, env_step: EnvStep, *, last: bool) -> NDArray[Any]:
    """Each row's global state: with a last row that in which the episode ended, where all of it has ended."""
    assert env_step.state is not None
    at = np.searchsorted(env_step.env_ids, chosen.env_id)
    state: NDArray[Any] = env_step.state[at]
    if last and env_step.final_state is not None:
        over = env_step.done[at]
        state[over] = env_step.final_state[at[over]]
    return state


_ENVS_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.from_env)


class RowStore:
    """Stores rows of one moment in the log, and has them wait for their policies."""

    def __init__(self, log: RowLog, runners: Mapping[int, PolicyRunner], num_envs: int, agent_num: int) -> None:
        self._log, self._runners = log, runners
        self._open_L = np.zeros(num_envs * agent_num, np.bool_)  # lanes that wait for an action or for its outcome
        self._open_NA = self._open_L.reshape(num_envs, agent_num)
        self._all_are_open = False  # whether all are known to be
        self._hides = False  # whether rows of some policies are counted alone

    def close(self, moments: Sequence[Moment]) -> int:
        """Store last rows; return how many transitions they close."""
        closed, stored = 0, []
        for moment in moments:
            acted = self._open_L[moment.lanes]
            # Agents that ended before they ever acted: the connectors saw their last row, but it closes nothing.
            rows = moment if np.count_nonzero(acted) == len(acted) else moment.take(acted)
            if not len(rows.lanes):
                continue
            if self._hides:
                self._hide_unread(rows)
            stored.append(rows)
            self.shut(rows.lanes)
            closed += len(rows.lanes)
        self._log.append(stored)
        return closed

    def wait(self, moments: Sequence[Moment], *, hands_over: bool) -> int:
        """Store rows to act on, and have them wait, ready, for their policies; return how many transitions they close.

        ``hands_over``: no other code has the envs' observations, so a policy may be given those arrays.
        """
        closed, runners, stored = 0, self._runners, []
        waiting: list[PolicyPart] = []
        for moment in moments:
            for number, lanes in moment.removed:  # no policy is asked about them; their open rows stay open
                runners[number].noops.add(lanes)
            n, parts = len(moment.lanes), moment.parts
            if not n:
                continue
            stored.append(moment)
            waiting += parts
            if self._all_are_open:
                closed += n
            else:
                where: Where = parts[0].where if len(parts) == 1 else moment.lanes
                closed += int(np.count_nonzero(self._open_L[where]))
                self._open_L[where] = True
                self._all_are_open = n == len(self._open_L)
            if self._hides:
                self._hide_unread(moment)
        self._log.append(stored, _ENVS_COLUMNS if hands_over else ())
        for part in waiting:
            runner = runners[part.number]
            if part.shared and not runner.keeps_rows:
                part.columns = dict(copied_rows(Rows(part.columns)).items())
            runner.ready = runner.ready.join(part) if len(runner.ready.lanes) else part
        return closed

    def look_who_is_read(self) -> None:
        """Call before rows come, when it may have changed whether rows of some policies are read."""
        self._hides = not all(runner.keeps_rows for runner in self._runners.values())

    def _hide_unread(self, moment: Moment) -> None:
        """Leave of rows that are not read only whose they are."""
        runners, parts = self._runners, list(moment.parts)
        for k, part in enumerate(parts):
            if not runners[part.number].keeps_rows:
                parts[k] = PolicyPart(UNREAD, part.lanes, {})
        moment.parts = parts

    # --- lanes that wait

    def shut(self, lanes: IntArray) -> None:
        """These lanes wait no more."""
        self._all_are_open = False
        self._open_L[lanes] = False

    def shut_envs(self, env_ids: IntArray) -> int:
        """No lane of these envs waits any more; return how many did."""
        found = int(np.count_nonzero(self._open_NA[env_ids]))
        self._all_are_open = False
        self._open_NA[env_ids] = False
        return found

    def open_of(self, env_ids: IntArray) -> BoolArray:
        """Which agents of these envs wait, (n, A)."""
        return self._open_NA[env_ids]

    def set_open(self, lanes: IntArray) -> None:
        """These lanes wait, and no others."""
        self._all_are_open = False
        self._open_L[:] = False
        self._open_L[lanes] = True


class RandomSteps(Saved):
    """Gives agents random actions in place of their policies', in the first ``steps`` env steps, shared over the envs.

    No policy was asked for these actions, see `GivenActions`. Each draw belongs to a row, whatever batch that is in.
    """

    saved_as = "random steps"
    saved_fields: ClassVar = {"left": SavedField("_left_N"), "seed": SavedField("_seed")}

    def __init__(self, steps: int, num_envs: int, agents: tuple[str, ...], seed: int) -> None:
        self._left_N = np.full(num_envs, steps // num_envs)
        self._left_N[: steps % num_envs] += 1
        self._agents, self._seed = agents, seed
        self.is_over = not steps  # whether no env has such a step to come

    def note(self, runner: PolicyRunner, ready: PolicyPart) -> None:
        """Draw for those of a policy's ready rows that have such a step to make, and for which nothing is noted yet."""
        num_agents = len(self._agents)
        mine = (self._left_N[ready.lanes // num_agents] > 0) & ~runner.off_policy.among(ready.lanes)
        if not mine.any():
            return
        ready = ready.take(mine)
        rows = ready.rows
        sampler = SpaceSampler(SpaceTree(runner.action_connectors.policy_space_))

        def where(i: int) -> str:
            env, agent = divmod(int(ready.lanes[i]), num_agents)
            return f"env {env}: agent {self._agents[agent]!r}"

        draws = cast(np.random.Generator, RowDraws(self._seed, "warm-up", rows))
        actions = sampler.sample(draws, len(rows), rows.get("action_mask"), where)
        for i, lane in enumerate(ready.lanes.tolist()):
            runner.off_policy.note(lane, map_tree(itemgetter(i), actions), where(i))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add whether a step is to come."""
        return {**values, "is_over": not (values["_left_N"] > 0).any()}

    def count(self, env_ids: IntArray) -> None:
        """These envs have made a step."""
        self._left_N[env_ids] -= 1
        self.is_over = not (self._left_N > 0).any()


AnyArray = NDArray[Any]


class RowDraws:
    """Random draws for n rows; each depends on the seed, the stream's name and its row only: see `RowRandom`.

    Has the methods of `numpy.random.Generator` that `SpaceSampler` uses, for arrays whose first axis is the row axis. A
    number without a row, such as the seed of a space with its own ``sample``, is drawn for the first row.
    """

    def __init__(self, seed: int, stream: str, rows: Rows) -> None:
        self._seed, self._stream, self._rows = seed, stream, rows
        self._calls = 0

    def random(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw uniformly from [0, 1)."""
        return self._source().uniform(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_normal(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from a normal distribution with mean 0 and variance 1."""
        return self._source().normal(self._rows, int(np.prod(size[1:]))).reshape(size)

    def standard_exponential(self, size: tuple[int, ...]) -> NDArray[np.float64]:
        """Draw from an exponential distribution with scale 1."""
        drawn: NDArray[np.float64] = -np.log1p(-self.random(size))
        return drawn

    def integers(
        self,
        low: ArrayLike,
        high: ArrayLike | None = None,
        size: int | tuple[int, ...] | None = None,
        dtype: DTypeLike = np.int64,
        endpoint: bool = False,
    ) -> AnyArray:
        """Draw integers from ``low`` to below ``high``, or from 0 to below ``low``."""
        begin, end = (np.asarray(0), np.asarray(low)) if high is None else (np.asarray(low), np.asarray(high))
        n = len(self._rows)
        shape = (n,) if size is None else (size,) if isinstance(size, int) else size
        # In floats, since a 64-bit range overflows its own type; the lowest bits of the widest range are not random.
        width = end.astype(np.float64) - begin + (1.0 if endpoint else 0.0)
        drawn = np.floor(self.random(shape) * width) + begin
        if np.dtype(dtype).itemsize == 8:
            drawn = np.minimum(drawn, np.nextafter(end.astype(np.float64) + (1.0 if endpoint else 0.0), -np.inf))
        numbers: AnyArray = drawn.astype(dtype)
        return numbers[0] if size is None and end.ndim == 0 else numbers

    def _source(self) -> RowRandom:
        self._calls += 1
        return RowRandom(self._seed, f"{self._stream}/{self._calls}")
