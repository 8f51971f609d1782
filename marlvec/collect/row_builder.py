"""From replies of the envs to rows, through the agent connectors, and into the logs of their policies.

`RandomSteps` are random actions in the first steps of a run; `RowDraws` draw numbers that belong to a row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(slots=True)
class BuiltRows:
    """Rows of one group that came together, policy after policy."""

    lanes: IntArray  # (n,)
    env_t: IntArray  # (n,)
    eps_id: IntArray  # (n,)
    missing: BoolArray | None  # (n,), of last rows; else None
    parts: list[PolicyPart]  # without those of policies of which no row is left
    runners: list[PolicyRunner]  # of these
    shared: dict[int, Collection[str]]  # by policy: columns that others may write into later, or connectors have made
    removed: list[tuple[PolicyRunner, IntArray]]  # lanes whose rows connectors took out

    def take(self, mask: BoolArray) -> BuiltRows:
        """Some of the rows."""
        parts, runners, start = [], [], 0
        for part, runner in zip(self.parts, self.runners, strict=True):
            own = mask[start : start + len(part.lanes)]
            start += len(part.lanes)
            if np.count_nonzero(own):
                parts.append(part.take(own))
                runners.append(runner)
        missing = None if self.missing is None else self.missing[mask]
        lanes, env_t, eps_id = self.lanes[mask], self.env_t[mask], self.eps_id[mask]
        return BuiltRows(lanes, env_t, eps_id, missing, parts, runners, self.shared, self.removed)


class RowBuilder:
    """Makes policies' rows, and sends them through the agent connectors.

    ``copies``: whether the envs' observations are arrays that the envs do not write into again.
    """

    def __init__(self, router: PolicyRouter, episodes: EpisodeTracker, metrics: Metrics, *, copies: bool) -> None:
        self._router, self._episodes, self._metrics = router, episodes, metrics
        self._of_envs = () if copies else ("obs", "action_mask")
        self._false_L = np.zeros(episodes.policy_NA.size, np.bool_)
        self._false_L.flags.writeable = False

    def build(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[BuiltRows]:
        """Return the rows of these lanes (None: all), group by group; ``last``: they are final observations.

        Rows of several policies in one group are made together, and are parts of the same arrays.
        """
        found = self._before_connectors(env_step, lanes, last=last)
        for built in found:
            for k, runner in enumerate(built.runners):
                if not runner.agent_connectors.is_identity:
                    self._observe(built, k)
            if built.removed:
                _leave_out(built)
        return found

    def build_together(
        self, env_step: EnvStep, acting: IntArray | None, ended: IntArray
    ) -> tuple[list[BuiltRows], list[BuiltRows]]:
        """Return rows of agents that have ended while their episodes go on, and rows of ``acting`` ones (None: all).

        A policy's rows of both kinds pass its connectors in one call: what a connector shows of other agents is then of
        the same moment. No ended lane acts next.
        """
        all_ends = self._before_connectors(env_step, ended, last=True)
        all_following = self._before_connectors(env_step, acting, last=False)
        over = {runner: (built, k) for built in all_ends for k, runner in enumerate(built.runners)}
        for following in all_following:
            for k, runner in enumerate(following.runners):
                if (ends := over.pop(runner, None)) is not None:
                    self._observe_together(*ends, following, k)
                elif not runner.agent_connectors.is_identity:
                    self._observe(following, k)
            if following.removed:
                _leave_out(following)
        for built, k in over.values():
            if not built.runners[k].agent_connectors.is_identity:
                self._observe(built, k)
        return all_ends, all_following

    def _before_connectors(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[BuiltRows]:
        router, found = self._router, []
        for runner in router.alone:
            if lanes is None:
                chosen = router.everyone(runner, env_step.env_ids)
            else:
                chosen = router.select(runner, env_step.env_ids, lanes)
            if len(chosen.lanes):
                built, columns = self._make(runner.group_index, chosen, env_step, last=last)
                built.parts.append(PolicyPart(runner.number, chosen.lanes, columns, None, chosen.places))
                built.runners.append(runner)
                if self._of_envs and chosen.flat is None:
                    built.shared[runner.number] = self._of_envs
                found.append(built)
        if not router.is_shared:
            return found
        env_ids = env_step.env_ids
        for g, chosen, shares in router.split_everyone(env_ids) if lanes is None else router.split(env_ids, lanes):
            built, columns = self._make(g, chosen, env_step, last=last)
            built.parts = [PolicyPart(runner.number, own, columns, part) for runner, part, own in shares]
            built.runners = [runner for runner, _, _ in shares]
            found.append(built)
        return found

    def _observe(self, built: BuiltRows, k: int) -> None:
        """Send a policy's rows through its agent connectors."""
        runner, before = built.runners[k], built.parts[k]
        began = perf_counter()
        own = {name: part_of(column, before.part) for name, column in before.columns.items()}
        out, kept = runner.observe(Rows.of_length(own, len(before.lanes)))
        timer = self._metrics.timers["agent_connectors"]
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        shared = built.shared.get(runner.number, ())
        built.shared[runner.number] = [
            name for name, column in out.items() if name in shared or column is not own.get(name)
        ]
        lanes, places = (before.lanes, before.places) if kept is None else (before.lanes[kept], None)
        built.parts[k] = PolicyPart(runner.number, lanes, dict(out.items()), None, places)
        if kept is not None:
            built.removed.append((runner, before.lanes[~kept]))

    def _observe_together(self, ends: BuiltRows, j: int, following: BuiltRows, k: int) -> None:
        """Send last rows and rows to act on through their policy's connectors in one call, in the order of lanes."""
        runner, last = following.runners[k], ends.parts[j].lanes
        both = replace(following, parts=[ends.parts[j].join(following.parts[k])], runners=[runner], removed=[])
        self._observe(both, 0)
        [part] = both.parts
        is_last = np.isin(part.lanes, last)  # of which none is removed
        ends.parts[j], following.parts[k] = part.take(is_last), part.take(~is_last)
        names = tuple(part.columns)
        ends.shared[runner.number] = following.shared[runner.number] = names
        following.removed += both.removed

    def _make(self, g: int, chosen: Selection, env_step: EnvStep, *, last: bool) -> tuple[BuiltRows, dict[str, Tree]]:
        """Rows of one group, of no policy yet, and their columns."""
        router, episodes, places, n = self._router, self._episodes, chosen.places, len(chosen.lanes)
        rewards, first = episodes.settle(chosen.lanes, places)
        false, turns = self._false_L[:n], episodes.turn_L[places]
        leaves = [chosen.pick(leaf) for leaf in (env_step.final if last else env_step.obs)[g]]
        tree = router.groups[g].observation_tree
        eps_id = episodes.eps_id_N[chosen.env_id]
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": eps_id,
            "t": turns.copy() if isinstance(places, slice) else turns,
            "obs": leaves[0] if tree.is_leaf else tree.unflatten(leaves),
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
        return BuiltRows(chosen.lanes, env_t, eps_id, missing, [], [], {}, []), columns


def _leave_out(built: BuiltRows) -> None:
    """Drop what is known of rows that connectors took out."""
    gone = np.isin(built.lanes, np.concatenate([lanes for _, lanes in built.removed]))
    built.lanes, built.env_t, built.eps_id = built.lanes[~gone], built.env_t[~gone], built.eps_id[~gone]
    there = [bool(len(part.lanes)) for part in built.parts]
    built.parts = [part for part, is_there in zip(built.parts, there, strict=True) if is_there]
    built.runners = [runner for runner, is_there in zip(built.runners, there, strict=True) if is_there]


def _state(chosen: Selection, env_step: EnvStep, *, last: bool) -> NDArray[Any]:
    """Each row's global state: with a last row that in which the episode ended, where all of it has ended."""
    assert env_step.state is not None
    at = np.searchsorted(env_step.env_ids, chosen.env_id)
    state: NDArray[Any] = env_step.state[at]
    if last and env_step.final_state is not None:
        over = env_step.done[at]
        state[over] = env_step.final_state[at[over]]
    return state


def _shared(all_built: Sequence[BuiltRows]) -> Mapping[int, Collection[str]]:
    """Of all groups; no policy plays in two."""
    return (
        all_built[0].shared if len(all_built) == 1 else {n: c for built in all_built for n, c in built.shared.items()}
    )


_ENVS_COLUMNS = tuple(name for name, column in COLUMNS.items() if column.from_env)


class RowStore:
    """Stores rows of one moment in the log; the scheduler knows the rounds of the envs."""

    def __init__(self, log: RowLog, episodes: EpisodeTracker, scheduler: LockstepScheduler) -> None:
        self._log, self._scheduler = log, scheduler
        self.open_L = np.zeros(episodes.policy_NA.size, np.bool_)  # lanes that wait for an action or for its outcome
        self.open_NA = self.open_L.reshape(episodes.policy_NA.shape)

    def close(self, all_built: Sequence[BuiltRows]) -> int:
        """Store last rows; return how many transitions they close."""
        closed, moments = 0, []
        for built in all_built:
            acted = self.open_L[built.lanes]
            # Agents that ended before they ever acted: the connectors saw their last row, but it closes nothing.
            rows = built if np.count_nonzero(acted) == len(acted) else built.take(acted)
            if not len(rows.lanes):
                continue
            moments.append(self._moment(rows, final=True))
            self.open_L[rows.lanes] = False
            closed += len(rows.lanes)
        self._log.append(moments, _shared(all_built))
        return closed

    def wait(self, all_built: Sequence[BuiltRows], *, hands_over: bool) -> int:
        """Store rows to act on, and have them wait, ready, for their policies; return how many transitions they close.

        ``hands_over``: no other code has the envs' observations, so a policy may be given those arrays.
        """
        closed, moments = 0, []
        for built in all_built:
            for runner, lanes in built.removed:  # no policy is asked about them; their open rows stay open
                runner.noops.add(lanes)
            if len(built.lanes):
                moments.append(self._moment(built, final=False))
                where: Where = built.parts[0].where if len(built.parts) == 1 else built.lanes
                closed += int(np.count_nonzero(self.open_L[where]))
                self.open_L[where] = True
        self._log.append(moments, _shared(all_built), _ENVS_COLUMNS if hands_over else ())
        for built in all_built:
            for runner, part in zip(built.runners, built.parts, strict=True):
                if not runner.keeps_rows and runner.number in built.shared:
                    part.columns = dict(copied_rows(Rows(part.columns)).items())
                runner.ready = runner.ready.join(part) if len(runner.ready.lanes) else part
        return closed

    def _moment(self, built: BuiltRows, *, final: bool) -> Moment:
        """These rows as the log has them; of policies that are not read, whose they are alone."""
        stored = [
            part if runner.keeps_rows else PolicyPart(UNREAD, part.lanes, {})
            for part, runner in zip(built.parts, built.runners, strict=True)
        ]
        return Moment(built.lanes, self._rounds(built.lanes), built.env_t, built.eps_id, final, built.missing, stored)

    def _rounds(self, lanes: IntArray) -> IntArray | int:
        """The round that rows of these lanes come in: of all, or (n,) of each."""
        rounds = self._scheduler.round_N
        if self._scheduler.all_go_together:
            return int(rounds[0])
        found: IntArray = rounds[lanes // self.open_NA.shape[1]]
        return found


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
