"""The slow reference for batches: a list of rows, each a dict of plain Python values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from marlvec.collect import SampleBatch
from marlvec.trees import map_tree

Row = dict[str, Any]

IDS = ("t", "eps_id", "unroll_id", "env_id", "agent_index")


def batch_of(rows: list[Row]) -> SampleBatch:
    """Batch of these rows, with the dtypes that `row` means."""

    def column(values: list[Any]) -> Any:
        return np.array(values)

    n = len(rows)
    infos = np.empty(n, object)
    infos[:] = [row["infos"] for row in rows]
    images = np.array([row["obs"]["image"] for row in rows], np.float32).reshape(n, 2, 3)
    pair = (np.array([row["obs"]["pair"][0] for row in rows], np.int8), column([row["obs"]["pair"][1] for row in rows]))
    return SampleBatch(
        {
            "obs": {"image": images, "pair": (pair[0], pair[1].astype(np.bool_))},
            "rewards": np.array([row["rewards"] for row in rows], np.float64),
            "infos": infos,
            "name": np.array([row["name"] for row in rows], "U8"),
            **{name: np.array([row[name] for row in rows], np.int64) for name in IDS},
        }
    )


def rows_of(batch: SampleBatch) -> list[Row]:
    """What the batch holds, row by row."""
    return [{k: map_tree(lambda leaf: _plain(leaf[i]), v) for k, v in batch.items()} for i in range(len(batch))]  # noqa: B023  (called at once)


def row(number: int, **ids: int) -> Row:
    """A row of which every column tells its number."""
    return {
        "obs": {"image": [[number, 1, 2], [3, 4, -number]], "pair": (number % 128, number % 3 == 0)},
        "rewards": number / 7,
        "infos": {"number": number},
        "name": f"row {number}",
        **ids,
    }


@st.composite
def row_lists(draw: st.DrawFn, first_number: int = 0, min_size: int = 0) -> list[Row]:
    """Rows as a collector orders them: by env, agent and time, cut anywhere at both ends."""
    rows: list[Row] = []
    num_envs, unroll = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    lengths = st.lists(st.integers(0, 4), max_size=3)
    for env in range(num_envs):
        for agent in range(draw(st.integers(1, 3))):
            start = draw(st.integers(0, 3))  # in the middle of an episode
            for number, length in enumerate(draw(lengths)):
                ids = {"eps_id": number * num_envs + env, "unroll_id": unroll, "env_id": env, "agent_index": agent}
                rows += [row(first_number + len(rows) + t, t=start + t, **ids) for t in range(length)]
                unroll, start = unroll + (length > 0), 0
    while len(rows) < min_size:
        unroll += 1
        ids = {"eps_id": 99, "unroll_id": unroll, "env_id": 99, "agent_index": len(rows), "t": 0}
        rows.append(row(first_number + len(rows), **ids))
    return rows


def fragments_of(rows: list[Row]) -> list[list[Row]]:
    """Stretches of one agent's decisions in one episode."""
    found: list[list[Row]] = []
    for r in rows:
        last = found[-1][-1] if found else None
        same = last is not None and all(r[name] == last[name] for name in IDS if name != "t")
        if same and last is not None and r["t"] > last["t"]:
            found[-1].append(r)
        else:
            found.append([r])
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
