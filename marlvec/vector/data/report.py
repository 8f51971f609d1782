"""`Report`: what a call brings back besides numbers: infos, answers, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from marlvec.envs.spec import Info
from marlvec.errors import Failure
from marlvec.vector.data.infos import InfoColumns

__all__ = ["Report"]


@dataclass(slots=True)
class Report:
    """What one call leaves behind apart from numbers in the buffers.

    Attributes:
        infos: Non-empty infos by env index; after a same-step autoreset those of the reset.
        final_infos: Infos of the last step of episodes that a same-step autoreset ended.
        failures: What went wrong, at most one per env.
        answers: What control commands returned.
        warnings: Texts of `ContractWarning`, of envs in worker processes.
        faults: Envs that lost their episode, and to what; only in the parent, see `marlvec.vector.faults.recovery`.
        columns: Infos that came as arrays, see `marlvec.vector.data.infos`; None but from a pool.
        final_columns: Likewise, as ``final_infos``.
    """

    infos: dict[int, Info] = field(default_factory=dict)
    final_infos: dict[int, Info] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    faults: dict[int, Failure] = field(default_factory=dict)
    columns: InfoColumns | None = None
    final_columns: InfoColumns | None = None

    def __bool__(self) -> bool:
        has_more = self.infos or self.final_infos or self.failures or self.answers or self.warnings or self.faults
        return bool(has_more) or self.columns is not None

    def update(self, other: Report) -> None:
        """Take in another shard's report."""
        self.infos.update(other.infos)
        self.final_infos.update(other.final_infos)
        self.failures.extend(other.failures)
        self.answers.update(other.answers)
        self.warnings.extend(other.warnings)
        self.faults.update(other.faults)
        if other.columns is not None:
            self.columns, self.final_columns = other.columns, other.final_columns

    def shifted(self, first: int) -> Report:
        """The same with global env indices, ``first`` being that of local env 0; failures have them already."""
        if not first:
            return self
        tables = (self.infos, self.final_infos, self.answers)
        infos, final_infos, answers = ({first + i: found for i, found in table.items()} for table in tables)
        return Report(infos, final_infos, self.failures, answers, self.warnings)
