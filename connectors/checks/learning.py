"""What is learnt from data: only in training, joined as if all had been seen by one."""

from __future__ import annotations

import copy

from marlvec.connectors.chain import with_inner
from marlvec.connectors.checks.difference import nearly
from marlvec.connectors.checks.player import Player
from marlvec.connectors.checks.trial import Trial

__all__ = ["check_merge", "check_mode"]

_HALFWAY = 6


def check_mode(trial: Trial) -> None:
    """train() and eval() switch, and return the connector; in eval nothing is learnt."""
    player = trial.player(training=True)
    for name, training in (("eval", False), ("train", True), ("eval", False)):
        with trial.report.asking(f"{name}()"):
            returned = getattr(player.piece, name)()
        if returned is not player.piece:
            trial.report.broken(f"what {name}() returns", "the connector itself", type(returned).__name__)
        if wrong := [piece for piece in with_inner(player.piece) if piece.training is not training]:
            trial.report.broken(f"training of {wrong[0].name} after {name}()", str(training), str(wrong[0].training))
    learnt = copy.deepcopy(trial.merged(player.piece))
    for moment in trial.moments():
        player.see(moment)
    trial.report.same(
        learnt, trial.merged(player.piece), "what was learnt, after a story in eval", "freeze it in eval()"
    )


def check_merge(trial: Trial) -> None:
    """Merged states of two that saw different envs are what one learns that sees all; running episodes go on."""
    pair = [Player(trial.report, trial.piece().train()) for _ in range(2)]
    both = Player(trial.report, trial.piece().train())
    for moment in trial.moments()[:_HALFWAY]:
        both.see(moment)
        for i, player in enumerate(pair):
            player.see(moment.of_envs(tuple(range(i, trial.num_envs, 2))))
    pieces = [player.piece for player in pair]
    merged, turned = trial.merged(*pieces), trial.merged(*reversed(pieces))
    if differs := nearly(merged, turned):
        trial.report.broken(f"the merged state in another order, {differs}", differs.expected, differs.got)
    pooled = trial.first_learnt(both.piece, trial.merged(both.piece))
    if differs := nearly(pooled, trial.first_learnt(both.piece, merged)):
        hint = "merge_states() joins what was learnt as if one had seen it all, and nothing else"
        trial.report.broken(f"what two have learnt, merged, {differs}", differs.expected, differs.got, hint)
    if not trial.learns:
        return
    one, two = pair
    one.piece.eval(), two.piece.eval()
    plain = Player(trial.report, copy.deepcopy(one.piece))
    trial.load(plain.piece, trial.merged(one.piece))
    for k, moment in enumerate(trial.moments()[_HALFWAY:]):
        mine = moment.of_envs(tuple(range(0, trial.num_envs, 2)))
        hint = "loading a merged state leaves running episodes alone"
        trial.report.compare(
            one.see(mine), plain.see(mine), _HALFWAY + k, "after loading its own merged state", hint, near=True
        )
