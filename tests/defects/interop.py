"""Defects of views for other libraries."""

from __future__ import annotations

from typing import Any

from marlvec.interop.rows import RowDriver
from tests.defects.registry import Patch, after, found_by

VIEWS = "tests/interop/test_row_views.py"


@found_by(VIEWS, "tests/interop/test_sb3.py")
def view_truncated_is_terminated(patch: Patch) -> None:
    """Views of rows say of a row that was cut off that it was over."""

    def never(step: Any, *_: Any) -> None:
        step.terminated[...] |= step.truncated

    after(patch, RowDriver, "recv", never)


@found_by(VIEWS)
def view_mask_of_the_step_before(patch: Patch) -> None:
    """Masks of views are those of the observations before."""
    note = RowDriver._note

    def late(driver: RowDriver, result: Any) -> None:
        before = driver._mask
        note(driver, result)
        if before is not None:
            driver._mask = before

    patch.setattr(RowDriver, "_note", late)


@found_by(VIEWS)
def view_final_obs_of_the_next_episode(patch: Patch) -> None:
    """The last observation of an episode is the first of the next one."""
    end = RowDriver._end

    def next_one(driver: RowDriver, result: Any, ended: Any, ours: Any) -> None:
        class Now:
            final_leaves = result.obs_leaves

            def __getattr__(self, name: str) -> Any:
                return getattr(result, name)

        end(driver, Now(), ended, ours)  # type: ignore[arg-type]  # all but that is the result

    patch.setattr(RowDriver, "_end", next_one)


@found_by(VIEWS)
def view_return_of_the_run(patch: Patch) -> None:
    """The return of an episode goes on from that of the one before."""
    end = RowDriver._end

    def keep(driver: RowDriver, *what: Any) -> None:
        returns = driver._sums._returns.copy()
        end(driver, *what)
        driver._sums._returns[:] = returns

    patch.setattr(RowDriver, "_end", keep)
