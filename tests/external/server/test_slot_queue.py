"""Slots go round the clients, whatever one of them begins and abandons. Counted in events, not in seconds."""

from __future__ import annotations

from typing import Any

import pytest

from marlvec.errors import EpisodesFull
from marlvec.external.messages import Type
from marlvec.external.session import SlotQueue
from tests.external.helpers.served import Raw, Served, served
from tests.external.server.test_socket_faults import masked
from tests.waiting import until

ANY: Any = None


def serve(queue: SlotQueue, free: list[int], slots: dict[tuple[Any, int], int | None]) -> tuple[Any, int] | None:
    """Give the next one a slot."""
    turn = queue.first(free)
    if turn is not None:
        queue.remove(*turn, slots[turn], served=True)
    return turn


def test_clients_have_their_turn_and_their_episodes_come_in_order() -> None:
    queue, slots = SlotQueue(), {}
    for who, number in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 7), ("b", 2)]:
        queue.add(who, number, None)  # type: ignore[arg-type]
        slots[who, number] = None
    assert len(queue) == 6
    order = [serve(queue, [0], slots) for _ in range(6)]
    assert order == [("a", 1), ("b", 1), ("c", 7), ("a", 2), ("b", 2), ("a", 3)]
    assert not queue
    assert queue.first([0]) is None


def test_who_wants_a_certain_slot_keeps_nobody_from_another() -> None:
    queue = SlotQueue()
    slots: dict[tuple[Any, int], int | None] = {("a", 1): 0, ("a", 2): 1, ("b", 1): None, ("c", 1): 1}
    for (who, number), slot in slots.items():
        queue.add(who, number, slot)
    assert queue.first([]) is None
    assert queue.first([2]) == ("b", 1)
    assert [serve(queue, [1], slots) for _ in range(4)] == [("a", 2), ("b", 1), ("c", 1), None]
    assert serve(queue, [1, 0], slots) == ("a", 1)
    assert len(queue) == 0


def test_who_does_not_wait_any_more_is_gone_at_once() -> None:
    queue = SlotQueue()
    for number in range(10_000):
        queue.add("a", number, number % 3 or None)  # type: ignore[arg-type]
        queue.remove("a", number, number % 3 or None)  # type: ignore[arg-type]
    assert len(queue) == 0
    assert not queue


def queued(there: Served) -> int:
    return len(there.server._loop.session_manager._queue)


@pytest.mark.fault("G9")
@pytest.mark.parametrize("holds", [True, False])
def test_who_begins_and_abandons_all_the_time_keeps_nobody_out(holds: bool) -> None:
    """Each round is one piece of bytes: its episode is abandoned, and the next begins, before anybody else is heard."""
    with served(1) as there, Raw(there.url) as greedy, Raw(there.url) as patient:
        (greedy if holds else patient).begin()
        if not holds:
            greedy.send(Type.BEGIN, episode=1, training=True)
            until(lambda: queued(there) == 1)
        number = patient.send(Type.BEGIN, episode=2, training=True)
        until(lambda: queued(there) == 2 - holds)
        for episode in range(1, 41):
            abandon = masked(greedy.data(Type.ABANDON, episode=episode, reason="on a whim"))
            begin = masked(greedy.data(Type.BEGIN, episode=episode + 1, training=True))
            greedy.sock.sendall(abandon + begin)
        until(lambda: greedy.get().fields["re"] == greedy.number - 1)  # all but the last one are answered
        assert queued(there) <= 2
        if not holds:
            assert patient.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
            # The greedy one's turn went with each episode that it abandoned: the patient one is before it.
        reply = patient.get()
        assert (reply.type, reply.fields["re"]) == (Type.OK, number)
        patient.step(3, episode=2)
        begun = [m for m in greedy.inbox if m.type is Type.OK]
        assert begun == []
        assert patient.ask(Type.END, episode=2, obs={}, truncated=False).type is Type.OK
        assert greedy.get().fields["re"] == greedy.number  # and then it is served
        assert queued(there) == 0


@pytest.mark.fault("G9")
def test_slots_go_round_the_clients() -> None:
    """One asks for twenty, and then two others for two each: they do not wait for all of the twenty."""
    with served(1, episodes=32) as there, Raw(there.url) as holder:
        holder.begin()
        with Raw(there.url) as many, Raw(there.url) as one, Raw(there.url) as other:
            begun: list[str] = []
            waiting = 0
            for raw, count in ((many, 20), (one, 2), (other, 2)):
                for episode in range(1, count + 1):
                    raw.send(Type.BEGIN, episode=episode, training=True)
                    waiting += 1
                until(lambda: queued(there) == waiting)  # noqa: B023
            assert holder.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
            left = {"many": (many, 20), "one": (one, 2), "other": (other, 2)}
            numbers = dict.fromkeys(left, 0)
            for name in ("many", "one", "other", "many", "one", "other", "many", "many"):
                raw, _ = left[name]
                numbers[name] += 1
                assert raw.get().type is Type.OK
                begun.append(name)
                assert raw.ask(Type.END, episode=numbers[name], obs={}, truncated=False).type is Type.OK
            assert many.get().type is Type.OK


@pytest.mark.fault("G9")
def test_who_waits_for_a_slot_of_its_own_keeps_nobody_from_the_others() -> None:
    with served(2) as there, Raw(there.url) as holder, Raw(there.url) as picky, Raw(there.url) as modest:
        assert holder.ask(Type.BEGIN, episode=1, training=True, slot=0).type is Type.OK
        picky.send(Type.BEGIN, episode=1, training=True, slot=0)
        until(lambda: queued(there) == 1)
        for episode in range(1, 5):
            modest.begin(episode)
            modest.step(1, episode)
            assert modest.ask(Type.END, episode=episode, obs={}, truncated=False).type is Type.OK
        assert holder.ask(Type.END, episode=1, obs={}, truncated=False).type is Type.OK
        assert picky.get().type is Type.OK
        with pytest.raises(EpisodesFull):
            there.envs.gateway.begin(env_id=0)
