"""From what came back from the envs to rows, through the agent connectors."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marlvec.collect.acting.policy_router import PolicyRouter
from marlvec.collect.acting.policy_runner import PolicyRunner, Selection
from marlvec.collect.episodes import EpisodeTracker
from marlvec.collect.metrics.metrics import Metrics
from marlvec.collect.scheduling.env_step import EnvStep
from marlvec.collect.storage.moment import Moment
from marlvec.collect.storage.policy_rows import part_of
from marlvec.connectors import Rows
from marlvec.trees import Tree

__all__ = ["BuiltRows", "RowBuilder"]

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
