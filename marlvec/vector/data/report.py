"""`Report`: results of a call that are not in the buffers: infos, answers, failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from marlvec.envs.spec import Info
from marlvec.errors import Failure
from marlvec.vector.data.infos import InfoColumns

__all__ = ["Report"]


@dataclass(slots=True)
class Report:
    """Results of one call that are not in the buffers; all tables are by env index."""

    # non-empty infos; after a same-step autoreset, those of the reset
    infos: dict[int, Info] = field(default_factory=dict)
    # of the last step of an episode, if a same-step autoreset followed
    final_infos: dict[int, Info] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)  # at most one per env
    answers: dict[int, Any] = field(default_factory=dict)  # of control commands
    warnings: list[str] = field(default_factory=list)  # texts of `ContractWarning` from worker processes
    faults: dict[int, Failure] = field(default_factory=dict)  # of envs that lost their episode; only in the parent
    columns: InfoColumns | None = None  # infos as arrays, only from a pool
    final_columns: InfoColumns | None = None

    def __bool__(self) -> bool:
        has_more = self.infos or self.final_infos or self.failures or self.answers or self.warnings or self.faults
        return bool(has_more) or self.columns is not None

    def update(self, other: Report) -> None:
        """Add another shard's report."""
        self.infos.update(other.infos)
        self.final_infos.update(other.final_infos)
        self.failures.extend(other.failures)
        self.answers.update(other.answers)
        self.warnings.extend(other.warnings)
        self.faults.update(other.faults)
        if other.columns is not None:
            self.columns, self.final_columns = other.columns, other.final_columns

    def shifted(self, first: int) -> Report:
        """Return this report with global env indices; local env 0 has ``first``. Failures have global ones already."""
        if not first:
            return self
        tables = (self.infos, self.final_infos, self.answers)
        infos, final_infos, answers = ({first + i: found for i, found in table.items()} for table in tables)
        return Report(infos, final_infos, self.failures, answers, self.warnings)
