"""Defects of external envs: the exchange of rows, sessions, the protocol."""

from __future__ import annotations

from typing import Any

from marlvec.external.episode import ExternalEpisode
from marlvec.external.exchange import RowExchange
from marlvec.external.messages import MessageStream
from marlvec.external.session import Session, WeightStore
from marlvec.external.vector_env import SlotEnv
from tests.defects.registry import Patch, found_by

EXCHANGE, THREAD = "tests/external/test_exchange.py", "tests/external/test_thread.py"
CLIENT, SESSION = "tests/external/test_client.py", "tests/external/test_session.py"


@found_by(EXCHANGE, THREAD)
def external_rewards_between_turns_lost(patch: Patch) -> None:
    """Of the rewards that an agent is given between two turns the last alone counts."""
    note = ExternalEpisode._note

    def last_alone(episode: ExternalEpisode, given: Any, new_infos: Any, ended: Any = None) -> None:
        for a in given:
            episode._rewards.pop(a, None)
        note(episode, given, new_infos, ended)

    patch.setattr(ExternalEpisode, "_note", last_alone)


@found_by(EXCHANGE, THREAD)
def external_final_obs_dropped(patch: Patch) -> None:
    """The final observation of an agent that ends is dropped."""
    endings = ExternalEpisode._endings

    def without(episode: ExternalEpisode, *given: Any) -> Any:
        return {a: (None, over, cut) for a, (_, over, cut) in endings(episode, *given).items()}

    patch.setattr(ExternalEpisode, "_endings", without)


@found_by(EXCHANGE, THREAD)
def external_truncated_is_terminated(patch: Patch) -> None:
    """An episode that was cut off counts as one that was over."""
    write = SlotEnv._write

    def over(env: SlotEnv, slot: Any) -> Any:
        infos = write(env, slot)
        for a in env.row.ended:
            slot.terminated[a], slot.truncated[a] = True, False
        return infos

    patch.setattr(SlotEnv, "_write", over)


@found_by(EXCHANGE)
def external_rows_of_lost_episodes_stay(patch: Patch) -> None:
    """Rows of an episode that was given up are handed out all the same."""
    patch.setattr(RowExchange, "_drop_rows", lambda exchange, place, episode: episode.forget())


@found_by(EXCHANGE, THREAD)
def external_place_stays_taken(patch: Patch) -> None:
    """Nobody who waits for a free env hears that an episode has ended."""

    def leave(exchange: RowExchange, i: int) -> None:
        exchange.places[i].episode = None

    patch.setattr(RowExchange, "leave", leave)


@found_by(SESSION, CLIENT)
def external_message_read_twice(patch: Patch) -> None:
    """A message that comes again after a connection broke is taken for a new one."""
    take = MessageStream.take

    def again(stream: MessageStream, message: Any) -> bool:
        is_new = take(stream, message)
        return is_new or bool(message.number)

    patch.setattr(MessageStream, "take", again)


@found_by(SESSION, CLIENT)
def external_unconfirmed_messages_forgotten(patch: Patch) -> None:
    """What was on its way when a connection broke is not sent again."""

    def nothing(stream: MessageStream, received: int) -> list[bytes]:
        stream.acknowledge(received)
        return []

    patch.setattr(MessageStream, "missing", nothing)


@found_by(CLIENT, SESSION)
def external_answer_to_another_episode(patch: Patch) -> None:
    """Actions are sent to the oldest episode of a session, whichever asked."""
    answer = Session._answer

    def to_the_oldest(session: Session, number: int, actions: Any) -> None:
        answer(session, min([number, *session._running]), actions)

    patch.setattr(Session, "_answer", to_the_oldest)


@found_by(CLIENT)
def external_weights_never_change(patch: Patch) -> None:
    """Clients that ask for weights get the first version."""
    patch.setattr(WeightStore, "newest", lambda store: store._packages[0] if store._packages else None)
