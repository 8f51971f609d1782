"""Connectors for texts: `Template` and `History`, by agent and episode, in files and in collectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

import marlvec
from marlvec import connectors as c
from marlvec.connectors import AgentPipeline, History, Rows, Template
from marlvec.errors import ArgumentError, ContractError, UnsupportedSpaceError
from marlvec.spaces import AnyText
from tests.vector.support.reference import refused

TEXT = AnyText(100)
BOTH = spaces.Dict({"heard": TEXT, "place": spaces.Box(-1, 1, (2,)), "seen": spaces.Text(5)})


def chain(*pieces: Any, space: Any = TEXT) -> AgentPipeline:
    pipeline = AgentPipeline(pieces)
    pipeline.bind(space, ("a", "b"))
    return pipeline


def rows(*said: tuple[int, int, Any], first: bool = False) -> Rows:
    """One call: (env, agent, observation) each."""
    n = len(said)
    obs = np.full(n, None, object)
    obs[:] = [text for _, _, text in said]
    return Rows(
        env_id=np.array([env for env, _, _ in said], int),
        agent_index=np.array([agent for _, agent, _ in said], int),
        obs=obs,
        first=np.full(n, first),
    )


def seen(pipeline: AgentPipeline, *said: tuple[int, int, Any], first: bool = False) -> list[Any]:
    obs = pipeline(rows(*said, first=first)).obs
    assert obs.dtype == object
    found: list[Any] = obs.tolist()
    return found


# --- Template


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("<user>{obs}</user>", "hi", "<user>hi</user>"),
        ("{obs}", "", ""),
        ('{"role": "user", "text": "{obs}"}', "{obs}", '{"role": "user", "text": "{obs}"}'),
        ("{obs} {0} {{obs}}\n", "a\nb", "a\nb {0} {a\nb}\n"),
        ("☃{obs}", "\ud800", "☃\ud800"),
    ],
)
def test_a_template_is_put_around_each_text(template: str, text: str, expected: str) -> None:
    assert seen(chain(Template(template)), (0, 0, text), (3, 1, None)) == [expected, None]


def test_its_space_is_as_long_as_its_longest_text() -> None:
    piece = Template("<{obs}|{obs}>")
    assert piece.output_space(AnyText(7)) == AnyText(17)
    after = piece.output_space(BOTH)
    assert (after["heard"], after["place"], after["seen"]) == (AnyText(203), BOTH["place"], AnyText(13))
    assert Template("{obs}.", keys=["seen"]).output_space(BOTH)["heard"] == TEXT


# --- History


class Reference:
    """`History` in plain words."""

    def __init__(self, keep: int | None, max_chars: int | None, separator: str) -> None:
        self.keep, self.max_chars, self.separator, self.all = keep, max_chars, separator, {}  # type: Any

    def see(self, env: int, agent: int, text: str | None, first: bool) -> str | None:
        texts = self.all.setdefault((env, agent), [])
        if first:
            texts.clear()
        if text is None:
            return None
        texts.append(text)
        for count in range(len(texts) if self.keep is None else min(self.keep, len(texts)), 0, -1):
            joined = self.separator.join(texts[-count:])
            if self.max_chars is None or len(joined) <= self.max_chars:
                return joined
        return text[-self.max_chars :] if self.max_chars else text


calls = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=4, unique=True),
        st.lists(st.none() | st.text("ab\n", max_size=4), min_size=4, max_size=4),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
)


@given(
    keep=st.none() | st.integers(1, 4),
    max_chars=st.none() | st.integers(1, 9),
    separator=st.sampled_from(["", "\n", "--"]),
    calls=calls,
)
def test_a_history_is_that_of_the_agent_in_its_episode(
    keep: int | None, max_chars: int | None, separator: str, calls: Any
) -> None:
    """Also when it is saved and loaded between two calls."""
    if keep is None and max_chars is None:
        return
    pipeline = chain(History(keep=keep, max_chars=max_chars, separator=separator))
    reference = Reference(keep, max_chars, separator)
    for pairs, texts, first, moves in calls:
        said = [(env, agent, text) for (env, agent), text in zip(pairs, texts, strict=False)]
        found = seen(pipeline, *said, first=first)
        assert found == [reference.see(*one, first) for one in said]
        assert all(text is None or text in pipeline.output_space(TEXT) for text in found)
        if moves:
            state = pipeline.state_dict()
            pipeline = chain(History(keep=keep, max_chars=max_chars, separator=separator))
            pipeline.load_state_dict(state)


def test_a_reset_forgets_these_envs() -> None:
    pipeline = chain(History(keep=3))
    assert seen(pipeline, (0, 0, "a"), (1, 0, "b"), (2, 1, "c")) == ["a", "b", "c"]
    pipeline.reset([1, 7])
    assert seen(pipeline, (0, 0, "a"), (1, 0, "b"), (2, 1, "c")) == ["aa", "b", "cc"]
    pipeline.reset()
    assert seen(pipeline, (0, 0, "a")) == ["a"]


def test_another_space_forgets_and_an_equal_one_does_not() -> None:
    piece = History(keep=3)
    pipeline = chain(piece)
    seen(pipeline, (0, 0, "a"))
    pipeline.bind(AnyText(100), ("a", "b"))
    assert seen(pipeline, (0, 0, "b")) == ["ab"]
    pipeline.bind(AnyText(90), ("a", "b"))
    assert seen(pipeline, (0, 0, "c")) == ["c"]


def test_leaves_have_histories_of_their_own() -> None:
    pipeline = chain(History(keep=2, separator=" "), Template("[{obs}]", keys=["heard"]), space=BOTH)
    for heard, saw, expected in (("a", "x", ("[a]", "x")), ("b", None, ("[a b]", None)), ("c", "y", ("[b c]", "x y"))):
        texts = [np.array([text], object) for text in (heard, saw)]
        obs = {"heard": texts[0], "place": np.zeros((1, 2), np.float32), "seen": texts[1]}
        after = pipeline(Rows(env_id=np.zeros(1, int), agent_index=np.zeros(1, int), obs=obs)).obs
        assert (after["heard"][0], after["seen"][0]) == expected
        assert after["place"].shape == (1, 2)


@pytest.mark.parametrize("kind", ["<U3", np.dtypes.StringDType()])
def test_texts_of_numpys_own_kinds_become_objects(kind: Any) -> None:
    for piece, expected in ((Template("<{obs}>"), ["<ab>", "<abc>"]), (History(keep=2), ["ab", "abc"])):
        given_rows = rows((0, 0, "ab"), (0, 1, "abc"))
        after = chain(piece)(given_rows.replace(obs=given_rows.obs.astype(kind))).obs
        assert after.dtype == object
        assert after.tolist() == expected


def test_a_file_has_the_histories(tmp_path: Path) -> None:
    pipeline = chain(History(keep=3, separator="\n"), Template("<{obs}>"))
    seen(pipeline, (0, 0, 'a "quoted" text\n☃'), (5, 1, ""))
    pipeline.save(tmp_path / "chain.npz")
    again = AgentPipeline.load(tmp_path / "chain.npz")
    assert repr(again) == repr(pipeline)
    for one in (pipeline, again):
        assert seen(one, (0, 0, "b"), (5, 1, "c")) == ['<a "quoted" text\n☃\nb>', "<\nc>"]


def test_what_is_wrong_is_said() -> None:
    for bad in ("no place", "", 3, None):
        refused(ArgumentError, "template: expected a text with {obs} in it", Template, bad)
    refused(ArgumentError, "expected keep=, max_chars= or both, got neither", History)
    refused(ArgumentError, "keep must be a whole number of at least 1, or None, got 0", History, keep=0)
    refused(ArgumentError, "max_chars must be a whole number of at least 1, or None, got 1.5", History, max_chars=1.5)
    refused(ArgumentError, "separator: expected a text, got 3", History, keep=1, separator=3)
    for piece in (Template("{obs}"), History(keep=1)):
        refused(UnsupportedSpaceError, "works on texts", chain, piece, space=BOTH["place"])
        refused(ContractError, "expected texts in obs, got int in row 1", chain(piece), rows((0, 0, "a"), (0, 1, 3)))
    pipeline = chain(History(keep=2))
    seen(pipeline, (0, 0, "a"))
    state = pipeline[0].state_dict()
    for wrong in (
        {**state, "texts": [[["a"], ["b"]]]},
        {**state, "texts": [[[3]]]},
        {**state, "texts": []},
        {**state, "texts": [["a"]]},
        {"texts": state["texts"]},
        {**state, "env_id": np.zeros(2, np.int64), "agent_index": np.zeros(2, np.int64), "texts": [[["a"]]] * 2},
        {**state, "env_id": np.zeros(1)},
    ):
        with pytest.raises(ArgumentError, match="History"):
            pipeline[0].load_state_dict(wrong)
    assert seen(pipeline, (0, 0, "b")) == ["ab"]


# --- In a collector


class Numbers(marlvec.MultiAgentEnv):
    """Two who hear numbers in words, in turns; a few steps an episode."""

    agents = ("ann", "bob")
    observation_spaces = (AnyText(50),) * 2
    action_spaces = (AnyText(50, examples=("yes", "no way", "")),) * 2

    def reset(self, slot: Any, *, seed: int | None = None, options: Any = None) -> None:
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.t, self.length = 0, int(self.rng.integers(3, 9))
        slot.alive[0] = slot.alive[1] = True
        self.turn(slot)

    def turn(self, slot: Any) -> None:
        slot.acting[self.t % 2], slot.acting[1 - self.t % 2] = True, False
        slot.write_obs(self.t % 2, f"{self.t}:{self.rng.integers(1000)};")

    def step(self, slot: Any) -> None:
        self.t += 1
        self.turn(slot)
        if self.t == self.length:
            self.cut_short(slot)

    def get_state(self) -> Any:
        return {"t": self.t, "length": self.length, "rng": self.rng.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.t, self.length, self.rng = state["t"], state["length"], np.random.default_rng()
        self.rng.bit_generator.state = state["rng"]


def collector(envs: Any) -> Any:
    return marlvec.Collector(
        envs,
        marlvec.RandomPolicy(),
        agent_connectors=[History(keep=3, separator=" "), Template("<{obs}>")],
        batch_mode="truncate",
        seed=0,
    )


@pytest.mark.parametrize("backend", ["sync", "async"])
def test_rows_of_a_collector_are_an_agents_history(backend: str) -> None:
    with marlvec.make(Numbers, 3, backend=backend) as envs:
        batch = collector(envs).collect(env_steps=60)["main"]
    assert batch.obs.dtype == object
    count = 0
    for episode in batch.split_by_episode():
        for agent in (0, 1):
            mine = episode.take(np.flatnonzero(episode.agent_index == agent))
            last = [text[1:-1].split()[-1] for text in mine.obs]
            for k, text in enumerate(mine.obs):
                if mine.t[0] == 0:
                    assert text == f"<{' '.join(last[max(0, k - 2) : k + 1])}>"
                    count += 1
    assert count > 30


def test_a_checkpoint_goes_on_in_the_middle_of_a_history(tmp_path: Path) -> None:
    with marlvec.make(Numbers, 3, backend="sync") as envs:
        first = collector(envs)
        first.collect(env_steps=17)
        marlvec.save_checkpoint(tmp_path / "run", collector=first)
        expected = [first.collect(env_steps=11)["main"].obs.tolist() for _ in range(3)]
    with marlvec.make(Numbers, 3, backend="sync") as envs:
        again = collector(envs)
        marlvec.load_checkpoint(tmp_path / "run", collector=again)
        assert [again.collect(env_steps=11)["main"].obs.tolist() for _ in range(3)] == expected
        assert any(text.count(" ") == 2 for text in expected[0])


@c.agent_connector
def louder(rows: Rows) -> Rows:
    return rows.replace(obs=np.array([f"{text}!" for text in rows.obs]))  # <U6, <U7, …


@c.agent_connector
def strings(rows: Rows) -> Rows:
    return rows.replace(obs=np.array([f"{text}!" for text in rows.obs], np.dtypes.StringDType()))


class Mumbles(marlvec.Policy):
    """Says longer and longer words, in one of numpy's kinds of texts, and notes them."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def act(self, rows: Rows) -> Any:
        said = np.array(["x" * (1 + t % 5) for t in rows.t.tolist()])
        said = said.tolist() if self.kind is list else said.astype(self.kind)
        return said, {"note": said, "more": {"in": said}}


@pytest.mark.parametrize(
    "kind", [str, np.dtypes.StringDType(), object, list], ids=["U", "StringDType", "object", "list"]
)
@pytest.mark.parametrize("piece", [louder, strings], ids=["U", "StringDType"])
def test_texts_of_connectors_and_policies_become_objects_at_the_border(kind: Any, piece: Any) -> None:
    if kind is object:
        kind = np.dtype(object)
    with marlvec.make(Numbers, 3, backend="sync") as envs:
        one = marlvec.Collector(envs, Mumbles(kind), agent_connectors=[piece], seed=0)
        for batch in (one.collect(env_steps=20)["main"] for _ in range(2)):
            for column in (batch.obs, batch.next_obs, batch.actions, batch["note"], batch["more"]["in"]):
                assert column.dtype == object
                assert {type(text) for text in column} == {str}
            assert all(text.endswith(";!") for text in batch.obs)
            assert batch["note"].tolist() == ["x" * (1 + t % 5) for t in batch.t.tolist()] == batch.actions.tolist()
