"""What a client's message says to its episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from marlvec.errors import RefusedError
from marlvec.external.episode import Episode
from marlvec.external.serving.readers import Readers
from marlvec.external.wire.schema import Message, Type

__all__ = ["TOLD", "tell"]

TOLD = frozenset({Type.STEP, Type.LOG, Type.RETURNS, Type.LEAVE, Type.END})
"""Messages that say something to an episode."""


def tell(episode: Episode, message: Message, readers: Readers, answer: Callable[[dict[str, Any]], None]) -> None:
    """Say it.

    Args:
        episode: To whom.
        message: One of `TOLD`.
        readers: What reads values.
        answer: Is told the actions, where some are asked for.

    Raises:
        ProtocolError: There is an array in it that is none.
        RefusedError: An agent is unknown, or does not belong there.
        MarlvecError: As the episode's own calls; nothing was said then.
    """
    fields, outcome = message.fields, readers.outcome(message.fields)
    if message.type is Type.RETURNS:
        episode.log_returns(**outcome)
        return
    obs = readers.obs(fields["obs"])
    if message.type is Type.END:
        episode.end(obs, truncated=fields["truncated"], **outcome)
    elif message.type is Type.LEAVE:
        terminated, truncated = set(fields["terminated"]), set(fields["truncated"])
        gone = dict.fromkeys([*fields["terminated"], *fields["truncated"]])
        if stray := [name for name in obs if name not in gone]:
            raise RefusedError(f"last observations of {stray}, who do not leave", "value")
        episode.end_agents(
            {**gone, **obs},
            terminated={name: name in terminated for name in gone},
            truncated={name: name in truncated for name in gone},
            **outcome,
        )
    else:
        masks = readers.masks(fields.get("masks"))
        if message.type is Type.STEP:
            episode.ask(obs, answer=answer, masks=masks, **outcome)
        else:
            episode.log_action(obs, readers.actions(fields["actions"]), masks=masks, **outcome)
