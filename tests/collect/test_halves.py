"""Rounds go in halves where that is quicker, by the clock of calls alone."""

from __future__ import annotations

import pytest

from marlvec.collect.halves import Halves

N = 16


class Machine:
    """Makes rounds, at so many seconds each in halves and as a whole, and counts the rounds of either kind."""

    def __init__(self, in_halves: float, whole: float) -> None:
        self.seconds = {True: in_halves, False: whole}
        self.made = {True: 0, False: 0}
        self.now = 0.0
        self.halves = Halves(N, lambda: self.now)

    def run(self, rounds: int, a_call: int = 8) -> dict[bool, int]:
        """Rounds of either kind, in calls of so many, with a second of somebody else's between two calls."""
        before = dict(self.made)
        for k in range(rounds):
            if k % a_call == 0:
                self.now += 1.0
                self.halves.begin_call()
            way = self.halves.pay
            self.made[way] += 1
            for _ in range(2):
                self.now += self.seconds[way] / 2
                self.halves.note(N // 2)
        return {way: self.made[way] - before[way] for way in (True, False)}


@pytest.mark.parametrize(("in_halves", "whole"), [(1.0, 1.1), (1.1, 1.0), (1.0, 3.0), (3.0, 1.0)])
def test_what_is_quicker_is_kept(in_halves: float, whole: float) -> None:
    machine = Machine(in_halves, whole)
    assert machine.halves.pay
    machine.run(400)
    better = in_halves < whole
    assert machine.halves.pay == better
    made = machine.run(20_000)
    assert made[not better] < (800 if max(in_halves, whole) < 1.25 else 300)  # it looks again, and is soon back


def test_what_becomes_quicker_is_found() -> None:
    machine = Machine(1.0, 2.0)
    machine.run(1000)
    assert machine.halves.pay
    machine.seconds = {True: 2.0, False: 1.0}
    machine.run(5000)
    assert not machine.halves.pay
    assert machine.run(2000)[True] < 200


def test_time_between_calls_is_nobodys() -> None:
    machine = Machine(1.0, 1.05)
    machine.run(400, a_call=1)
    assert machine.halves.pay
    machine = Machine(1.05, 1.0)
    machine.run(400, a_call=1)
    assert not machine.halves.pay
