"""What a client is made of, in one place: imported when there is one, since it needs libraries that are extras."""

from __future__ import annotations

from marlvec.external.dialling.caller import Caller
from marlvec.external.dialling.form import Form
from marlvec.external.dialling.runs import Runs

__all__ = ["Caller", "Form", "Runs"]
