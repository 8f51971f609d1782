from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marlvec.connectors.learner.batches import regroup
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError

TABLES = st.dictionaries(
    st.tuples(st.sampled_from(["p", "q", "r"]), st.integers(0, 3)), st.sampled_from(["a", "b", "c"])
)
BATCHES = st.dictionaries(st.sampled_from(["p", "q", "r"]), st.lists(st.integers(0, 3), max_size=8))


@given(agents=BATCHES, table=TABLES)
def test_every_row_goes_where_the_mapping_says(agents: dict[str, list[int]], table: dict[tuple[str, int], str]) -> None:
    asked = []

    def mapping(policy_id: str, agent_index: int) -> str:
        asked.append((policy_id, agent_index))
        return table.get((policy_id, agent_index), "rest")

    batch, want, number = {}, {}, 0
    for policy_id, of in agents.items():
        batch[policy_id] = Rows(agent_index=np.array(of, np.int64), number=number + np.arange(len(of)))
        for agent in of:
            want.setdefault(table.get((policy_id, agent), "rest"), []).append((agent, number))
            number += 1
    got = regroup(batch, mapping)
    assert list(got) == list(want)
    for module_id, rows in got.items():
        assert list(zip(rows["agent_index"].tolist(), rows["number"].tolist(), strict=True)) == want[module_id]
    assert sorted(asked) == sorted({(policy_id, agent) for policy_id, of in agents.items() for agent in of})


def test_by_policy() -> None:
    batch = {"p": Rows(x=np.arange(2)), "q": Rows(x=np.arange(3)), "empty": Rows(x=np.arange(0))}
    got = regroup(batch, {"p": "shared", "q": "shared"})
    assert {name: rows["x"].tolist() for name, rows in got.items()} == {"shared": [0, 1, 0, 1, 2]}
    assert regroup(batch, {"p": "p", "q": "q"})["p"] is batch["p"]


def test_refusals() -> None:
    batch = {"p": Rows(x=np.zeros((2, 3))), "q": Rows(x=np.zeros((2, 4)))}
    with pytest.raises(KeyError, match=r"no module for policy 'q'; the mapping has \['p'\]"):
        regroup(batch, {"p": "m"})
    with pytest.raises(ArgumentError, match="column 'x' cannot be concatenated") as caught:
        regroup(batch, {"p": "m", "q": "m"})
    assert caught.value.__notes__ == ["module 'm' gets rows of the policies ['p', 'q']"]
    with pytest.raises(ContractError, match="expected a column 'agent_index'"):
        regroup(batch, lambda policy_id, agent_index: "m")
