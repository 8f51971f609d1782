"""From replies of the envs to rows, through the agent connectors, and into the logs of their policies.

`RandomSteps` are random actions in the first steps of a run; `RowDraws` draw numbers that belong to a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from time import perf_counter
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from marlvec.collect.columns import COLUMNS
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics import Metrics
from marlvec.collect.policies import PolicyLogs, PolicyRouter, joined
from marlvec.collect.policy_runner import PolicyRunner, Selection
from marlvec.collect.rows import Moment, PolicyRows, copied_rows, part_of
from marlvec.collect.scheduling import EnvStep, LockstepScheduler
from marlvec.connectors.rows import RowRandom, Rows
from marlvec.env_ids import Where
from marlvec.sampling import SpaceSampler
from marlvec.serialization.saved import Saved, SavedField
from marlvec.spaces import SpaceTree
from marlvec.trees import Tree, map_tree

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class BuiltRows(NamedTuple):
    """A policy's rows behind its agent connectors."""

    runner: PolicyRunner
    moment: Moment  # without its round
    shared: Collection[str]  # columns whose arrays other code may write into later, or that connectors have made
    removed: IntArray | None = None  # lanes whose rows the connectors took out; None: none


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
        """Return each policy's rows of these lanes (None: all); ``last``: they are final observations.

        Rows of several policies in one group are made together, and are parts of the same arrays.
        """
        found = self._before_connectors(env_step, lanes, last=last)
        return [built if built.runner.agent_connectors.is_identity else self._observed(built) for built in found]

    def build_together(
        self, env_step: EnvStep, acting: IntArray | None, ended: IntArray
    ) -> tuple[list[BuiltRows], list[BuiltRows]]:
        """Return rows of agents that have ended while their episodes go on, and rows of ``acting`` ones (None: all).

        A policy's rows of both kinds pass its connectors in one call: what a connector shows of other agents is then of
        the same moment. No ended lane acts next.
        """
        over = {built.runner: built for built in self._before_connectors(env_step, ended, last=True)}
        all_ends, all_following = [], []
        for following in self._before_connectors(env_step, acting, last=False):
            ends = over.pop(following.runner, None)
            if ends is not None:
                ends, following = self._observed_together(ends.moment, following)
                all_ends.append(ends)
            elif not following.runner.agent_connectors.is_identity:
                following = self._observed(following)
            all_following.append(following)
        return [*map(self._observed, over.values()), *all_ends], all_following

    def _before_connectors(self, env_step: EnvStep, lanes: IntArray | None, *, last: bool) -> list[BuiltRows]:
        router, found = self._router, []
        for runner in router.alone:
            if lanes is None:
                chosen = router.everyone(runner, env_step.env_ids)
            else:
                chosen = router.select(runner, env_step.env_ids, lanes)
            if len(chosen.lanes):
                columns, env_t, missing = self._make(runner.group_index, chosen, env_step, last=last)
                moment = Moment(chosen.lanes, 0, env_t, last, missing, columns, places=chosen.places)
                found.append(BuiltRows(runner, moment, self._of_envs if chosen.flat is None else ()))
        if not router.is_shared:
            return found
        env_ids = env_step.env_ids
        for g, chosen, shares in router.split_everyone(env_ids) if lanes is None else router.split(env_ids, lanes):
            columns, env_t, missing = self._make(g, chosen, env_step, last=last)
            for runner, part, own in shares:
                own_missing = None if missing is None else missing[part]
                found.append(BuiltRows(runner, Moment(own, 0, env_t[part], last, own_missing, columns, part), ()))
        return found

    def _observed(self, built: BuiltRows) -> BuiltRows:
        """Send a policy's rows through its agent connectors."""
        runner, before, shared, _ = built
        began = perf_counter()
        own = {name: part_of(column, before.part) for name, column in before.columns.items()}
        out, kept = runner.observe(Rows.of_length(own, len(before.lanes)))
        timer = self._metrics.timers["agent_connectors"]
        timer.seconds, timer.calls = timer.seconds + perf_counter() - began, timer.calls + 1
        made = [name for name, column in out.items() if name in shared or column is not own.get(name)]
        columns = dict(out.items())
        if kept is None:
            before.columns, before.part = columns, None
            return BuiltRows(runner, before, made)
        lanes, env_t = before.lanes[kept], before.env_t[kept]
        return BuiltRows(runner, Moment(lanes, 0, env_t, False, None, columns), made, before.lanes[~kept])

    def _observed_together(self, ends: Moment, following: BuiltRows) -> tuple[BuiltRows, BuiltRows]:
        """Send last rows and rows to act on through their policy's connectors in one call, in the order of lanes."""
        runner, after, _, _ = following
        _, moment, _, removed = self._observed(BuiltRows(runner, ends.join(after), ()))
        is_last = np.isin(moment.lanes, ends.lanes)  # of which none is removed
        over, names = moment.take(is_last), tuple(moment.columns)
        over.final, over.missing = True, ends.missing
        return BuiltRows(runner, over, names), BuiltRows(runner, moment.take(~is_last), names, removed)

    def _make(
        self, g: int, chosen: Selection, env_step: EnvStep, *, last: bool
    ) -> tuple[dict[str, Tree], IntArray, BoolArray | None]:
        """Columns of rows of one group; env steps made; and which last rows have no observation of their own."""
        router, episodes, places, n = self._router, self._episodes, chosen.places, len(chosen.lanes)
        rewards, first = episodes.settle(chosen.lanes, places)
        false, turns = self._false_L[:n], episodes.turn_L[places]
        leaves = [chosen.pick(leaf) for leaf in (env_step.final if last else env_step.obs)[g]]
        tree = router.groups[g].observation_tree
        columns: dict[str, Any] = {
            "env_id": chosen.env_id,
            "agent_index": chosen.agent_index,
            "eps_id": episodes.eps_id_N[chosen.env_id],
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
        return columns, episodes.length_N[chosen.env_id], missing


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
    """Stores rows of one moment in the logs; the scheduler knows the rounds of the envs."""

    def __init__(self, logs: PolicyLogs, episodes: EpisodeTracker, scheduler: LockstepScheduler) -> None:
        self._logs, self._episodes, self._scheduler = logs, episodes, scheduler
        self.open_L = np.zeros(episodes.policy_NA.size, np.bool_)  # lanes that wait for an action or for its outcome
        self.open_NA = self.open_L.reshape(episodes.policy_NA.shape)

    def close(self, all_built: Sequence[BuiltRows]) -> int:
        """Store last rows; return how many transitions they close."""
        closed, unread = 0, []
        for runner, moment, shared, _ in all_built:
            acted = self.open_L[moment.lanes]
            # Agents that ended before they ever acted: the connectors saw their last row, but it closes nothing.
            rows = moment if np.count_nonzero(acted) == len(acted) else moment.take(acted)
            if not len(rows.lanes):
                continue
            if runner.keeps_rows:
                rows.ticks = self._rounds(rows.lanes)
                runner.log.append(rows, shared)
            else:
                unread.append(rows.lanes)
            self.open_L[rows.lanes] = False
            closed += len(rows.lanes)
        if unread:
            self._count(unread, final=True)
        return closed

    def wait(self, all_built: Sequence[BuiltRows], *, hands_over: bool) -> int:
        """Store rows to act on, and have them wait, ready, for their policies; return how many transitions they close.

        ``hands_over``: no other code has the envs' observations, so a policy may be given those arrays.
        """
        owned = _ENVS_COLUMNS if hands_over else ()
        seen: list[Moment] = []
        unread: list[IntArray] = []
        for runner, moment, shared, removed in all_built:
            if removed is not None:  # no policy is asked about them; their open rows stay open
                runner.noops.add(removed)
                if not len(moment.lanes):
                    continue
            moment.ticks = self._rounds(moment.lanes)
            if runner.keeps_rows:
                columns, part = moment.columns, moment.part
                runner.log.append(moment, shared)
                if moment.block is not None and not shared and runner.agent_connectors.is_identity:
                    moment.spare = PolicyRows(columns, part, len(moment.lanes), owned)  # the log has copies
            else:
                if shared:
                    moment.columns = dict(copied_rows(Rows(moment.columns)).items())
                unread.append(moment.lanes)
            seen.append(moment)
            runner.ready = runner.ready.join(moment) if len(runner.ready.lanes) else moment
        if unread:
            self._count(unread, final=False)
        if not seen:
            return 0
        everyone: Where = seen[0].where if len(seen) == 1 else np.concatenate([moment.lanes for moment in seen])
        closed = int(np.count_nonzero(self.open_L[everyone]))
        self.open_L[everyone] = True
        return closed

    def _count(self, unread: Sequence[IntArray], *, final: bool) -> None:
        """Store whose rows came that are not read."""
        lanes = joined(unread)
        env_id, episodes = lanes // self.open_NA.shape[1], self._episodes
        env_t, eps_id = episodes.length_N[env_id], episodes.eps_id_N[env_id]
        self._logs.unread.count(lanes, self._rounds(lanes), env_t, eps_id, final=final)

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

    def note(self, runner: PolicyRunner, ready: Moment) -> None:
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
