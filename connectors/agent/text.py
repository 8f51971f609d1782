"""Texts that agents observe: `Template` puts words around them, `History` joins an agent's last ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Space, Text
from numpy.typing import NDArray

from marlvec.connectors.connector import EnvIds, PositiveInt, State
from marlvec.connectors.leafwise import LeafPlan, LeafwiseObs
from marlvec.connectors.rows import Rows
from marlvec.errors import ArgumentError, ContractError
from marlvec.serialization.saved import array_field, check_fields
from marlvec.spaces import AnyText, Leaf

_PLACE = "{obs}"
_KIND, _ADVICE = "texts (AnyText, Text)", "take it out of this pipeline, or convert the observations to texts before it"


@dataclass(eq=False, repr=False)
class Template(LeafwiseObs):
    """Puts a text around each text that an agent observes: ``Template("<user>{obs}</user>")``.

    Every ``{obs}`` in the template becomes the observation; all other characters stay as they are, braces too. None,
    a missing text, stays None.

    Args:
        template: The text; ``{obs}`` is in it at least once.
        keys: Paths of the leaves; None: every text.

    Raises:
        ArgumentError: ``{obs}`` is not in the template; in `bind`: a path does not exist.
        UnsupportedSpaceError: In `bind`: no leaf is a text, at all or below one of ``keys``.
    """

    template: str

    _kind, _advice = _KIND, _ADVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.template, str) or _PLACE not in self.template:
            raise ArgumentError(f"template: expected a text with {_PLACE} in it, got {self.template!r}")

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        length = _longest(leaf)
        if length is None:
            return None
        parts = self.template.split(_PLACE)
        space = AnyText(sum(map(len, parts)) + length * (len(parts) - 1))
        return LeafPlan(space, partial(_each, lambda text: text.join(parts)))


@dataclass(eq=False, repr=False)
class History(LeafwiseObs):
    """Joins the last texts that an agent observed in its episode, oldest first: a prompt with what was said before.

    For envs that observe what is new, such as ``make("textarena/…", history="new")``. A missing text, None, stays None
    and is not part of the history.

    Args:
        keep: How many texts, with the present one; None: all of the episode.
        max_chars: The longest result, in characters. Whole texts are left out, oldest first; a present text that is
            longer by itself keeps its end. None: no limit but that of ``keep``.
        separator: Put between two texts.
        keys: Paths of the leaves; None: every text.

    Raises:
        ArgumentError: Both ``keep`` and ``max_chars`` are None, or one is below 1; in `bind`: a path does not exist.
        UnsupportedSpaceError: In `bind`: no leaf is a text, at all or below one of ``keys``.
    """

    _: KW_ONLY
    keep: PositiveInt | None = None
    max_chars: PositiveInt | None = None
    separator: str = ""

    _kind, _advice = _KIND, _ADVICE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is None and self.max_chars is None:
            raise ArgumentError("History: expected keep=, max_chars= or both, got neither: a text would grow for ever")
        if not isinstance(self.separator, str):
            raise ArgumentError(f"separator: expected a text, got {self.separator!r}")
        # (env_id, agent_index) → per text leaf the texts of the running episode, oldest first
        self._texts: dict[tuple[int, int], list[list[str]]] = {}

    def __call__(self, rows: Rows) -> Rows:
        tree, places = self._tree, [i for i, _ in self._work]
        leaves = tree.flatten(rows.obs)
        columns = [_as_texts(leaves[i]) for i in places]
        first = rows.first.tolist() if "first" in rows else [False] * len(rows)
        pairs = zip(rows.env_id.tolist(), rows.agent_index.tolist(), strict=True)
        out = [np.full(len(rows), None, np.object_) for _ in places]
        for row, pair in enumerate(pairs):
            if first[row] or pair not in self._texts:
                self._texts[pair] = [[] for _ in places]
            for texts, column, joined in zip(self._texts[pair], columns, out, strict=True):
                if (text := column[row]) is not None:
                    texts.append(text)
                    del texts[: self._surplus(texts)]
                    joined[row] = self._join(texts)
        for i, joined in zip(places, out, strict=True):
            leaves[i] = joined
        return rows.replace(obs=tree.unflatten(leaves))

    def setup(self, space: Space[Any]) -> None:
        before = vars(self).get("_tree")
        super().setup(space)
        if before is not None and before.space != self._tree.space:
            self._texts = {}

    def reset(self, env_ids: EnvIds | None = None) -> None:
        gone = None if env_ids is None else set(np.asarray(env_ids, np.int64).tolist())
        self._texts = {} if gone is None else {pair: kept for pair, kept in self._texts.items() if pair[0] not in gone}

    def state_dict(self) -> State:
        pairs = np.array(list(self._texts), np.int64).reshape(-1, 2)
        texts = [[list(texts) for texts in of_leaf] for of_leaf in self._texts.values()]
        return {"texts": texts, "env_id": pairs[:, 0].copy(), "agent_index": pairs[:, 1].copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        leaf_num = len(self._work) if "_work" in vars(self) else None
        if leaf_num is None:
            raise self._not_set_up()
        check_fields(state, ["texts", "env_id", "agent_index"], self.name)
        columns = [array_field(state, name, np.int64, (None,), self.name) for name in ("env_id", "agent_index")]
        pairs, texts = list(zip(*(column.tolist() for column in columns), strict=True)), state["texts"]
        if not isinstance(texts, list) or len(texts) != len(pairs) or len(set(pairs)) != len(pairs):
            raise ArgumentError(
                f"{self.name}: texts: expected a list for each of {len(pairs)} agents, got {texts!r:.100}"
            )
        for of_leaf in texts:
            fits = isinstance(of_leaf, list) and len(of_leaf) == leaf_num
            if not fits or not all(isinstance(kept, list) and all(map(_is_text, kept)) for kept in of_leaf):
                raise ArgumentError(
                    f"{self.name}: texts: expected a list of texts for each of {leaf_num} leaves, got {of_leaf!r:.100}"
                )
        self._texts = {pair: [list(kept) for kept in of_leaf] for pair, of_leaf in zip(pairs, texts, strict=True)}

    def _surplus(self, texts: Sequence[str]) -> int:
        """Return how many of the oldest texts are left out."""
        count = 0 if self.keep is None else max(0, len(texts) - self.keep)
        if self.max_chars is not None:
            between = len(self.separator)
            length = sum(map(len, texts[count:])) + between * (len(texts) - count - 1)
            while length > self.max_chars and count < len(texts) - 1:
                length -= len(texts[count]) + between
                count += 1
        return count

    def _join(self, texts: Sequence[str]) -> str:
        joined = self.separator.join(texts)
        return joined if self.max_chars is None else joined[-self.max_chars :]

    def _plan(self, leaf: Leaf) -> LeafPlan | None:
        length = _longest(leaf)
        if length is None:
            return None
        if self.keep is not None:
            length = self.keep * length + (self.keep - 1) * len(self.separator)
        elif self.max_chars is not None:
            length = self.max_chars
        return LeafPlan(AnyText(length if self.max_chars is None else min(length, self.max_chars)), _unused)


def _longest(leaf: Leaf) -> int | None:
    """Return the length of a leaf's longest text; None if it is no text."""
    return int(leaf.space.max_length) if isinstance(leaf.space, (AnyText, Text)) else None


def _as_texts(column: Any) -> list[str | None]:
    """Return a column of texts, of dtype object, ``<U`` or StringDType, as a list; a missing text is None."""
    texts: list[Any] = np.asarray(column).tolist()
    for row, text in enumerate(texts):
        if text is not None and not _is_text(text):
            raise ContractError(f"expected texts in obs, got {type(text).__name__} in row {row}")
    return texts


def _each(change: Callable[[str], str], column: Any) -> NDArray[Any]:
    texts = _as_texts(column)
    out = np.full(len(texts), None, np.object_)
    out[:] = [None if text is None else change(text) for text in texts]
    return out


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _unused(column: Any) -> Any:
    return column
