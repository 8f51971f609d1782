"""What a server is made of, in one place: imported when there is one, since it needs libraries that are extras."""

from __future__ import annotations

from marlvec.errors import MissingExtraError

try:
    import websockets.server  # noqa: F401  # only to say here what is missing, once for all parts
except ImportError as error:
    raise MissingExtraError(
        f"external envs over a socket need websockets, which cannot be imported ({error}); "
        f"install it with: pip install 'marlvec[external]'"
    ) from error

from marlvec.external.serving.binding import bind
from marlvec.external.serving.gate import Gate
from marlvec.external.serving.house import House
from marlvec.external.serving.loop import Loop
from marlvec.external.serving.readers import Readers
from marlvec.external.serving.weights import Weights

__all__ = ["Gate", "House", "Loop", "Readers", "Weights", "bind"]
