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

from marlvec.external.server.request_filter import Gate
from marlvec.external.server.session_manager import House
from marlvec.external.server.socket_loop import Loop, bind
from marlvec.external.server.value_readers import Readers
from marlvec.external.server.weight_store import Weights

__all__ = ["Gate", "House", "Loop", "Readers", "Weights", "bind"]
