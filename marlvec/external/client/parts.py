"""What a client is made of, in one place: imported when there is one, since it needs libraries that are extras."""

from __future__ import annotations

from marlvec.external.client.client_episodes import Runs
from marlvec.external.client.env_form import Form
from marlvec.external.client.request_channel import Caller

__all__ = ["Caller", "Form", "Runs"]
