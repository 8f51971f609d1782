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
    """Results of one call that are not in the buffers.

    Attributes:
        infos: Non-empty infos by env index; after a same-step autoreset, infos of the reset.
        final_infos: By env index, infos of the last step of an episode, if a same-step autoreset followed.
        failures: Failures, at most one per env.
        answers: Answers of control commands by env index.
        warnings: Texts of `ContractWarning` from envs in worker processes.
        faults: Failures of envs that lost their episode; only in the parent, see `marlvec.vector.faults.recovery`.
        columns: Infos in the form of arrays, see `marlvec.vector.data.infos`; only from a pool, else None.
        final_columns: ``final_infos`` in the form of arrays; only from a pool, else None.
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
