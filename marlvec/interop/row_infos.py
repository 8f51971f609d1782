"""What envs say of themselves, as one dict per agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marlvec.envs.spec import COMMON, Info
from marlvec.vector.data.infos import AGENTS, infos_to_list

__all__ = ["merged", "said"]


def merged(own: Mapping[str, Any], common: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """One agent's info: its own, what is said to all, and what a view adds.

    Args:
        own: The agent's own. On a clash with what is said to all, the agent's word stays.
        common: What the env says as a whole; what gave way stands under ``"__common__"``.
        ours: The view's, which stay; what gave way of the agent's own stands under ``"__agents__"``.
    """
    if not own and not common:
        return dict(ours)
    out = {**common, **own, **ours}
    if clash := {key: value for key, value in common.items() if key in own or key in ours}:
        out[COMMON] = clash
    if aside := {key: value for key, value in own.items() if key in ours}:
        out[AGENTS] = aside
    return out


def said(infos: Mapping[str, Any], agents: Sequence[str], env_num: int) -> tuple[list[Info], list[Info]]:
    """What envs said, taken apart at the ends of same-step episodes.

    Args:
        infos: Those of a `VectorEnv`.
        agents: The agents' names.
        env_num: N.

    Returns:
        Per env ``{agent: {key: value}, "__common__": {key: value}}`` of the step, and of the reset after it, which is
        empty where there was none.
    """
    now = infos_to_list(infos, agents, env_num)
    first: list[Info] = [{} for _ in range(env_num)]
    over = np.zeros(env_num, np.bool_)
    for key in ("_final_observation", "_final_info", "fault"):
        if key in infos:
            over |= infos[key]
    if over.any():
        last = infos_to_list(infos.get("final_info", {}), agents, env_num)
        for i in np.flatnonzero(over).tolist():
            now[i], first[i] = last[i], now[i]
    return now, first
