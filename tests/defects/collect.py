"""Defects of the collector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from marlvec.collect import policies as policy_set
from marlvec.collect import rollout as batch_builder
from marlvec.collect import row_log
from marlvec.collect.collector import EvaluationCollector
from marlvec.collect.columns import ColumnForms
from marlvec.collect.episodes import Episode, EpisodeTracker
from marlvec.collect.policies import PolicyRouter
from marlvec.collect.policy_runner import PolicyRunner, Selection
from marlvec.collect.rollout import BatchBuilder, RolloutLoop
from marlvec.collect.row_builder import RowBuilder
from marlvec.collect.row_log import RowLog
from marlvec.collect.rows import Block, PolicyPart
from marlvec.collect.scheduling import EnvStep
from marlvec.connectors import Rows
from tests.defects.registry import Patch, after, during, found_by

REFERENCE = "tests/collect/test_rollout.py"
AT_FAULT = "tests/collect/test_policy_runner.py"
LOST = "tests/collect/test_lost_rows.py"


# --- what a row holds


Values = Callable[[RowBuilder, int, Selection, EnvStep], Any]


def give(patch: Patch, column: str, values: Values, *, of_last: bool) -> None:
    """Put other values into a column of rows before the agent connectors see them; of last rows, or of all."""
    make = RowBuilder._make

    def wrong(row_builder: RowBuilder, g: int, chosen: Selection, env_step: EnvStep, *rest: Any, last: bool) -> Any:
        moment, columns = make(row_builder, g, chosen, env_step, *rest, last=last)
        if last or not of_last:
            columns[column] = values(row_builder, g, chosen, env_step)
        return moment, columns

    patch.setattr(RowBuilder, "_make", wrong)


@found_by(REFERENCE)
def collected_t_from_one(patch: Patch) -> None:
    """Decisions are counted from 1."""
    give(patch, "t", lambda row_builder, _, chosen, __: row_builder._episodes.turn_L[chosen.places] + 1, of_last=False)


@found_by("tests/collect/test_collector.py")
def collected_rows_are_views(patch: Patch) -> None:
    """Rows are views of the accounts, and change with them."""

    def count(episodes: EpisodeTracker, places: Any, n: int) -> None:
        episodes.turn_L[places] += 1

    patch.setattr(EpisodeTracker, "count_turns", count)


@found_by(REFERENCE)
def collected_truncated_is_terminated(patch: Patch) -> None:
    """Whoever is truncated is said to be terminated."""

    def ended(row_builder: RowBuilder, g: int, chosen: Selection, env_step: EnvStep) -> Any:
        return row_builder._router.pick(g, chosen, env_step.ended)

    give(patch, "terminated", ended, of_last=True)


@found_by(REFERENCE)
def collected_early_rewards_dropped(patch: Patch) -> None:
    """What an agent is paid before its first row is dropped."""

    def drop(_: Any, row_builder: RowBuilder, g: int, chosen: Selection, *rest: Any, **more: Any) -> None:
        row_builder._episodes._add_up()
        row_builder._episodes._owed_L[chosen.lanes] = 0.0

    after(patch, RowBuilder, "_make", drop)


@found_by(REFERENCE)
def collected_idle_rewards_dropped(patch: Patch) -> None:
    """A row's reward is that of the last step alone: what an idle agent was paid before is dropped."""
    make = RowBuilder._make

    def wrong(
        row_builder: RowBuilder, g: int, chosen: Selection, env_step: EnvStep, rewards_L: Any, *, last: bool
    ) -> Any:
        episodes, rewards = row_builder._episodes, row_builder._router.pick(g, chosen, env_step.rewards)
        episodes._add_up()
        (episodes._owed_L if rewards_L is None else rewards_L)[chosen.places] = rewards
        return make(row_builder, g, chosen, env_step, rewards_L, last=last)

    patch.setattr(RowBuilder, "_make", wrong)


@found_by(REFERENCE)
def collected_final_obs_of_the_next_episode(patch: Patch) -> None:
    """The final observation is the next episode's first."""
    make = RowBuilder._make

    def wrong(row_builder: RowBuilder, g: int, chosen: Selection, env_step: EnvStep, *rest: Any, last: bool) -> Any:
        env_step = copy.copy(env_step)
        env_step.final = env_step.obs
        return make(row_builder, g, chosen, env_step, *rest, last=last)

    patch.setattr(RowBuilder, "_make", wrong)


@found_by(REFERENCE)
def collected_first_obs_of_the_episode_before(patch: Patch) -> None:
    """Outside same-step mode, the first observation of an episode is the last of the one before."""
    renew = EnvStep.renew

    def keep(env_step: EnvStep, other: EnvStep) -> None:
        before = [[leaf.copy() for leaf in leaves] for leaves in env_step.obs]
        renew(env_step, other)
        for leaves, old_leaves in zip(env_step.obs, before, strict=True):
            for leaf, old in zip(leaves, old_leaves, strict=True):
                leaf[...] = old

    patch.setattr(EnvStep, "renew", keep)


@found_by(f"{REFERENCE}::test_connectors_stand_between_envs_policies_and_batches")
def collected_last_rows_pass_connectors_by(patch: Patch) -> None:
    """Final observations do not go through the agent connectors."""
    observe = PolicyRunner.observe

    def pass_by(runner: PolicyRunner, rows: Rows) -> Any:
        return (rows, None) if rows["last"][0] else observe(runner, rows)

    patch.setattr(PolicyRunner, "observe", pass_by)


# --- who plays, and what goes to the envs


@found_by(REFERENCE)
def collected_actions_of_wrong_rows(patch: Patch) -> None:
    """Each agent's action goes to another."""
    actions = PolicyRouter.actions

    def confuse(router: PolicyRouter, parts: Any, env_ids: Any, *, grouped: bool) -> Any:
        def wrong(part: Any) -> Any:
            if len(part.lanes) == len(env_ids) * len(router.groups[part.group_index].agents):
                return part
            return part._replace(leaves=[leaf[::-1] for leaf in part.leaves])

        return actions(router, list(map(wrong, parts)), env_ids, grouped=grouped)

    patch.setattr(PolicyRouter, "actions", confuse)


@found_by("tests/collect/test_connectors.py")
def collected_connectors_remember(patch: Patch) -> None:
    """Agent connectors are not told that episodes begin."""
    begin = PolicyRunner.reset_connectors

    def keep(runner: PolicyRunner, env_ids: Any) -> None:
        with during(runner.agent_connectors, "reset", lambda env_ids: None):
            begin(runner, env_ids)

    patch.setattr(PolicyRunner, "reset_connectors", keep)


@found_by("tests/collect/test_policies.py")
def collected_mapping_asked_mid_episode(patch: Patch) -> None:
    """When an episode begins, who plays in the running ones is settled anew, too."""

    def settle(_: Any, episodes: EpisodeTracker, env_ids: Any, entropy: int) -> None:
        if (function := episodes._function) is None:
            return
        for i in set(range(len(episodes.policy_NA))) - set(env_ids.tolist()):
            episode = Episode(*episodes.identity(i), entropy)
            episodes.policy_NA[i] = [episodes._numbers[function(name, episode)] for name in episodes._agents]

    after(patch, EpisodeTracker, "begin", settle)


@found_by(REFERENCE)
def collected_t_goes_on(patch: Patch) -> None:
    """Decisions are counted on from the episode before."""
    begin = EpisodeTracker.begin

    def go_on(episodes: EpisodeTracker, *what: Any) -> bool:
        turns = episodes.turn_L.copy()
        changed = begin(episodes, *what)
        episodes.turn_L[:] = turns
        return changed

    patch.setattr(EpisodeTracker, "begin", go_on)


@found_by(AT_FAULT)
def collected_half_a_tick_kept(patch: Patch) -> None:
    """Where a policy raises, those before it forget that their rows wait."""

    def forget(_: Any, runner: PolicyRunner, ready: PolicyPart) -> None:
        runner.ready = runner.ready.take(~np.isin(runner.ready.lanes, ready.lanes))

    after(patch, PolicyRunner, "act", forget)


# --- what goes into a batch


@found_by(REFERENCE)
def collected_leftovers_doubled(patch: Patch) -> None:
    """Rows that were handed over come again in the next batch."""
    forget = RowLog.forget
    patch.setattr(RowLog, "forget", lambda log, numbers: forget(log, log._numbers(numbers)[1:]))


@found_by("tests/collect/test_row_log.py")
def collected_block_without_ends(patch: Patch) -> None:
    """Where a block is read in place, what follows an end is the next episode's first row."""
    make_later = RowLog._next_in_block
    patch.setattr(row_log, "_put_ends", lambda *what: None)
    patch.setattr(RowLog, "_next_in_block", lambda *what: make_later(*what[:4], []))


@found_by("tests/collect/test_row_log.py")
def collected_block_of_others(patch: Patch) -> None:
    """A block goes on although the rows of some of its lanes do not come."""

    patch.setattr(Block, "is_next", lambda block, lanes: block.steps <= block.length)


@found_by("tests/collect/test_row_log.py")
def collected_answers_as_they_came(patch: Patch) -> None:
    """The k-th answer belongs to the k-th row, whichever lanes were answered."""

    def in_order(index: Any, answers: Any) -> Any:
        found = np.full(len(index.lane), -1)
        decisions = (~index.final).nonzero()[0]
        found[decisions[: len(answers.lane)]] = np.arange(len(answers.lane))[: len(decisions)]
        return found

    patch.setattr(row_log._Index, "answer_of", in_order)


@found_by("tests/collect/test_row_log.py")
def collected_policies_write_into_the_log(patch: Patch) -> None:
    """A policy is given the stored observations themselves."""
    given = PolicyPart.given
    patch.setattr(PolicyPart, "given", lambda ready: given(ready).replace(obs=ready.rows["obs"]))


@found_by("tests/collect/test_rollout.py")
def collected_stale_successors(patch: Patch) -> None:
    """At a cut, a value function sees the masks and previous actions of the moment before."""
    patch.setattr(ColumnForms, "followed", property(lambda forms: [n for n in ("obs", "state") if n in forms.rows]))


@found_by("tests/collect/test_rollout.py")
def collected_ends_before_their_moment(patch: Patch) -> None:
    """The last row of an agent whose team goes on passes the connectors before the team's rows of that moment."""
    patch.setattr(RolloutLoop, "_closed_later", lambda *what: None)


@found_by(REFERENCE)
def collected_more_than_asked(patch: Patch) -> None:
    """All envs step where fewer would do."""
    needed = BatchBuilder.envs_needed

    def all_of_them(found: BatchBuilder, *what: Any) -> int:
        return found._num_envs if needed(found, *what) else 0

    patch.setattr(BatchBuilder, "envs_needed", all_of_them)


@found_by(REFERENCE)
def collected_newest_rows_first(patch: Patch) -> None:
    """Where rows are left over for the next batch, they are the oldest."""
    order = RowLog.closing_order
    patch.setattr(RowLog, "closing_order", lambda log, numbers: tuple(-part for part in order(log, numbers)))


@found_by(REFERENCE)
def collected_parts_of_episodes(patch: Patch) -> None:
    """Batches of whole episodes hold the beginnings of others."""
    closed = RowLog.closed
    patch.setattr(RowLog, "closed", lambda log, eps_ids=None: closed(log))


@found_by(REFERENCE)
def collected_untrained_not_counted(patch: Patch) -> None:
    """What policies that do not learn decided is not counted."""
    batch_of = batch_builder.MultiAgentBatch

    def count(batches: Any, *, agent_steps: int, **what: Any) -> Any:
        return batch_of(batches, agent_steps=sum(map(len, batches.values())), **what)

    patch.setattr(batch_builder, "MultiAgentBatch", count)


@found_by(AT_FAULT)
def collected_version_of_the_batch(patch: Patch) -> None:
    """A row carries the version that its policy has when the batch is made."""
    make = BatchBuilder.make

    def stamp(batch_builder: BatchBuilder, *what: Any) -> Any:
        batches, unroll_id = make(batch_builder, *what)
        for runner in batch_builder._runners.values():
            if runner.policy_id in batches:
                batches[runner.policy_id]["policy_version"][...] = runner.policy.version
        return batches, unroll_id

    patch.setattr(BatchBuilder, "make", stamp)


# --- episodes that are lost


@found_by(LOST)
def collected_handed_steps_lost_too(patch: Patch) -> None:
    """Env steps that a batch has counted are counted as lost with their episode, too."""

    def count(episodes: EpisodeTracker, env_ids: Any) -> int:
        return int(episodes.length_N[env_ids].sum())

    patch.setattr(EpisodeTracker, "waiting_steps", count)


@found_by(LOST)
def collected_rows_of_lost_episodes(patch: Patch) -> None:
    """What is stored of a lost episode still comes into batches."""
    lose = RolloutLoop._lose

    def keep(loop: RolloutLoop, env_step: EnvStep) -> None:
        with during(loop._log, "of_episodes", lambda eps_ids: np.zeros(0, np.int64)):
            lose(loop, env_step)

    patch.setattr(RolloutLoop, "_lose", keep)


# --- seeds and connectors of several collectors


@found_by("tests/collect/test_connectors.py::test_evaluations_never_repeat_the_draws_of_training")
def evaluated_with_the_draws_of_training(patch: Patch) -> None:
    """Connectors draw in an evaluation what they drew in training with the same seed."""
    patch.setattr(EvaluationCollector, "_run_mark", 0)


@found_by("tests/collect/test_connectors.py::test_draws_follow_from_the_seeds_of_collector_and_connector")
def collected_draws_without_the_collectors_seed(patch: Patch) -> None:
    """Exploration is the same whatever the collector's seed is."""
    patch.setattr(PolicyRunner, "seed_connectors", lambda *_: None)


@found_by("tests/collect/test_connectors.py::test_a_connector_given_to_two_collectors_is_shared_by_neither")
def collected_connectors_shared(patch: Patch) -> None:
    """A connector that is given to a second collector remembers the first one's episodes."""
    patch.setattr(policy_set._Own, "_take", lambda _, given: given)
