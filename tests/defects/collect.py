"""Defects of the collector."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from marlvec.collect import delivery
from marlvec.collect.arrivals import Arrival
from marlvec.collect.cast import Cast, Selection
from marlvec.collect.delivery import Delivery
from marlvec.collect.episodes import Episode, Episodes
from marlvec.collect.harvest import Harvest
from marlvec.collect.intake import Intake
from marlvec.collect.loop import Loop
from marlvec.collect.roles import Ready, Role
from marlvec.collect.trajectories import Trajectories
from marlvec.connectors import Rows
from tests.defects.registry import Patch, after, during, found_by

REFERENCE = "tests/collect/test_reference.py"
AT_FAULT = "tests/collect/test_policies_at_fault.py"
LOST = "tests/collect/test_lost_episodes.py"


# --- what a row holds


def give(
    patch: Patch, column: str, values: Callable[[Intake, Role, Selection, Arrival], Any], *, of_last: bool
) -> None:
    """Put other values into a column of rows before the agent connectors see them; of last rows, or of all."""
    rows_of = Intake.rows

    def rows(intake: Intake, role: Role, chosen: Selection, arrival: Arrival, *, last: bool) -> Any:
        if of_last and not last:
            return rows_of(intake, role, chosen, arrival, last=last)
        observe, wrong = role.observe, values(intake, role, chosen, arrival)
        with during(role, "observe", lambda found: observe(found.replace(**{column: wrong}))):
            return rows_of(intake, role, chosen, arrival, last=last)

    patch.setattr(Intake, "rows", rows)


@found_by(REFERENCE)
def collected_t_from_one(patch: Patch) -> None:
    """Decisions are counted from 1."""
    give(patch, "t", lambda intake, _, chosen, __: intake._episodes.turn_L[chosen.places] + 1, of_last=False)


@found_by("tests/collect/test_kept_rows.py")
def collected_rows_are_views(patch: Patch) -> None:
    """Rows are views of the accounts, and change with them."""
    give(patch, "t", lambda intake, _, chosen, __: intake._episodes.turn_L[chosen.places], of_last=False)


@found_by(REFERENCE)
def collected_truncated_is_terminated(patch: Patch) -> None:
    """Whoever is truncated is said to be terminated."""

    def ended(intake: Intake, role: Role, chosen: Selection, arrival: Arrival) -> Any:
        return intake._cast.pick(role, chosen, arrival.ended)

    give(patch, "terminated", ended, of_last=True)


@found_by(REFERENCE)
def collected_early_rewards_dropped(patch: Patch) -> None:
    """What an agent is paid before its first row is dropped."""

    def drop(_: Any, intake: Intake, role: Role, chosen: Selection, *rest: Any) -> None:
        intake._episodes.owed_L[chosen.lanes] = 0.0

    after(patch, Intake, "rows", drop)


@found_by(REFERENCE)
def collected_idle_rewards_dropped(patch: Patch) -> None:
    """A row's reward is that of the last step alone: what an idle agent was paid before is dropped."""
    rows_of = Intake.rows

    def rows(intake: Intake, role: Role, chosen: Selection, arrival: Arrival, *, last: bool) -> Any:
        intake._episodes.owed_L[chosen.places] = intake._cast.pick(role, chosen, arrival.rewards)
        return rows_of(intake, role, chosen, arrival, last=last)

    patch.setattr(Intake, "rows", rows)


@found_by(REFERENCE)
def collected_final_obs_of_the_next_episode(patch: Patch) -> None:
    """The final observation is the next episode's first."""
    rows_of = Intake.rows

    def rows(intake: Intake, role: Role, chosen: Selection, arrival: Arrival, *, last: bool) -> Any:
        arrival = copy.copy(arrival)
        arrival.final = arrival.obs
        return rows_of(intake, role, chosen, arrival, last=last)

    patch.setattr(Intake, "rows", rows)


@found_by(REFERENCE)
def collected_first_obs_of_the_episode_before(patch: Patch) -> None:
    """Outside same-step mode, the first observation of an episode is the last of the one before."""
    renew = Arrival.renew

    def keep(arrival: Arrival, other: Arrival) -> None:
        before = [[leaf.copy() for leaf in leaves] for leaves in arrival.obs]
        renew(arrival, other)
        for leaves, old_leaves in zip(arrival.obs, before, strict=True):
            for leaf, old in zip(leaves, old_leaves, strict=True):
                leaf[...] = old

    patch.setattr(Arrival, "renew", keep)


@found_by(f"{REFERENCE}::test_connectors_stand_between_envs_policies_and_batches")
def collected_last_rows_pass_connectors_by(patch: Patch) -> None:
    """Final observations do not go through the agent connectors."""
    observe = Role.observe

    def pass_by(role: Role, rows: Rows) -> Any:
        return (rows, None) if rows["last"][0] else observe(role, rows)

    patch.setattr(Role, "observe", pass_by)


# --- who plays, and what goes to the envs


@found_by(REFERENCE)
def collected_actions_of_wrong_rows(patch: Patch) -> None:
    """Each agent's action goes to another."""
    actions = Cast.actions

    def confuse(cast: Cast, parts: Any, env_ids: Any, *, grouped: bool) -> Any:
        def wrong(part: Any) -> Any:
            if len(part.lanes) == len(env_ids) * len(cast.groups[part.group_index].agents):
                return part
            return replace(part, leaves=[leaf[::-1] for leaf in part.leaves])

        return actions(cast, list(map(wrong, parts)), env_ids, grouped=grouped)

    patch.setattr(Cast, "actions", confuse)


@found_by("tests/collect/test_connectors.py")
def collected_connectors_remember(patch: Patch) -> None:
    """Agent connectors are not told that episodes begin."""
    begin = Role.begin

    def keep(role: Role, env_ids: Any) -> None:
        with during(role.agent_connectors, "reset", lambda env_ids: None):
            begin(role, env_ids)

    patch.setattr(Role, "begin", keep)


@found_by("tests/collect/test_mapping.py")
def collected_mapping_asked_mid_episode(patch: Patch) -> None:
    """When an episode begins, who plays in the running ones is settled anew, too."""

    def settle(_: Any, episodes: Episodes, env_ids: Any, entropy: int) -> None:
        if (function := episodes._function) is None:
            return
        for i in set(range(len(episodes.policy_NA))) - set(env_ids.tolist()):
            episode = Episode(*episodes.identity(i), entropy)
            episodes.policy_NA[i] = [episodes._index[function(name, episode)] for name in episodes._agents]

    after(patch, Episodes, "begin", settle)


@found_by(REFERENCE)
def collected_t_goes_on(patch: Patch) -> None:
    """Decisions are counted on from the episode before."""
    begin = Episodes.begin

    def go_on(episodes: Episodes, *what: Any) -> bool:
        turns = episodes.turn_L.copy()
        changed = begin(episodes, *what)
        episodes.turn_L[:] = turns
        return changed

    patch.setattr(Episodes, "begin", go_on)


@found_by(AT_FAULT)
def collected_half_a_tick_kept(patch: Patch) -> None:
    """Where a policy raises, those before it forget that their rows wait."""

    def forget(_: Any, role: Role, ready: Ready) -> None:
        role.ready = role.ready.take(~np.isin(role.ready.lanes, ready.lanes))

    after(patch, Role, "act", forget)


# --- what goes into a batch


@found_by(REFERENCE)
def collected_leftovers_doubled(patch: Patch) -> None:
    """Rows that were handed over come again in the next batch."""
    forget = Trajectories.forget
    patch.setattr(Trajectories, "forget", lambda kept, slots, current: forget(kept, slots[1:], current))


@found_by(REFERENCE)
def collected_more_than_asked(patch: Patch) -> None:
    """All envs step where fewer would do."""
    needed = Delivery.envs_needed

    def all_of_them(found: Delivery, *what: Any) -> int:
        return found._num_envs if needed(found, *what) else 0

    patch.setattr(Delivery, "envs_needed", all_of_them)


@found_by(REFERENCE)
def collected_newest_rows_first(patch: Patch) -> None:
    """Where rows are left over for the next batch, they are the oldest."""
    order = Trajectories.closing_order
    patch.setattr(Trajectories, "closing_order", lambda kept, slots: tuple(-numbers for numbers in order(kept, slots)))


@found_by(REFERENCE)
def collected_parts_of_episodes(patch: Patch) -> None:
    """Batches of whole episodes hold the beginnings of others."""
    patch.setattr(Harvest, "of_episodes", lambda harvest, eps_ids: harvest.all_closed())


@found_by(REFERENCE)
def collected_untrained_not_counted(patch: Patch) -> None:
    """What policies that do not learn decided is not counted."""
    batch_of = delivery.MultiAgentBatch

    def count(batches: Any, *, agent_steps: int, **what: Any) -> Any:
        return batch_of(batches, agent_steps=sum(map(len, batches.values())), **what)

    patch.setattr(delivery, "MultiAgentBatch", count)


@found_by(AT_FAULT)
def collected_version_of_the_batch(patch: Patch) -> None:
    """A row carries the version that its policy has when the batch is made."""
    make = Harvest.make

    def stamp(harvest: Harvest, *what: Any) -> Any:
        for role in harvest._roles:
            if "policy_version" in role.trajectories._answers:
                role.trajectories._answers["policy_version"].leaves[0][...] = role.policy.version
        return make(harvest, *what)

    patch.setattr(Harvest, "make", stamp)


# --- episodes that are lost


@found_by(LOST)
def collected_handed_steps_lost_too(patch: Patch) -> None:
    """Env steps that a batch has counted are counted as lost with their episode, too."""
    lose = Episodes.lose

    def count(episodes: Episodes, env_ids: Any) -> int:
        lose(episodes, env_ids)
        return int(episodes.length_N[env_ids].sum())

    patch.setattr(Episodes, "lose", count)


@found_by(LOST)
def collected_rows_of_lost_episodes(patch: Patch) -> None:
    """What is stored of a lost episode still comes into batches."""
    lose = Loop._lose

    def keep(loop: Loop, arrival: Arrival) -> None:
        with ExitStack() as stack:
            for role in loop._roles:
                stack.enter_context(during(role.trajectories, "of_episodes", lambda eps_ids: np.zeros(0, np.int64)))
            lose(loop, arrival)

    patch.setattr(Loop, "_lose", keep)
