"""Write the pages of env families, docs/families/, with a frame of each env, from the envs themselves.

Run ``python benchmarks/env_pages.py`` with the extras of ``make test``; ``python benchmarks/env_pages.py mpe`` writes
one family, and ``.venv-interop/overcooked/bin/python benchmarks/env_pages.py overcooked`` the one that is installed
elsewhere. Titles, introductions and what rewards are for come from ``env_pages.toml``. Without a display pyglet draws
through EGL.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import time
import tomllib
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # before pygame is imported
if "DISPLAY" not in os.environ:
    os.environ.setdefault("PYGLET_HEADLESS", "1")  # before pyglet is imported

import numpy as np
from PIL import Image

import marlvec
from marlvec.errors import ArgumentError, EnvRaised
from marlvec.native.catalog import native_entry

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
FAMILIES = tomllib.loads((HERE / "env_pages.toml").read_text(encoding="utf-8"))
FRAMES = DOCS / "img" / "envs"
WIDTH = 144  # pixels of a frame
STEPS = 12  # random ones before a frame is taken
SECONDS = 0.4  # of processor time that a speed is measured over


def name_of(env_id: str) -> str:
    """Return the id without its front."""
    return env_id.rpartition("/")[2]


def frame(env_id: str) -> str | None:
    """Take a frame, and say which file it is in, or an older one where there is no display; None: there is none."""
    path = FRAMES / f"{name_of(env_id)}.png"
    try:
        with marlvec.make(env_id, num_envs=1, backend="sync", render_mode="rgb_array") as envs:
            envs.reset(seed=0)
            for _ in range(STEPS):
                envs.step(envs.random_action())
            picture = Image.fromarray(np.asarray(envs.render()[0], np.uint8))
    except (ArgumentError, EnvRaised):
        return path.name if path.exists() else None
    picture.thumbnail((WIDTH, 2 * WIDTH))
    FRAMES.mkdir(parents=True, exist_ok=True)
    picture.quantize(64).save(path, optimize=True)
    return path.name


def speed(env_id: str, num_envs: int, backend: str) -> float:
    """Microseconds of processor time an env step, autoreset included."""
    with marlvec.make(env_id, num_envs=num_envs, backend=backend) as envs:
        envs.reset(seed=0)
        found = []
        for _ in range(3):  # compiled envs compile in their first steps, and where their first episodes end
            steps, spent = 0, 0.0
            while spent < SECONDS:
                actions = envs.random_action()
                began = time.process_time()
                envs.step(actions)
                spent, steps = spent + time.process_time() - began, steps + num_envs
            found.append(spent / steps * 1e6)
    return min(found)


def arguments_of(env_id: str) -> str:
    """Keyword arguments of the env, with their defaults."""
    family, _, name = env_id.rpartition("/")
    if not family.startswith(("mpe", "pettingzoo")):
        return ""
    module = importlib.import_module(f"mpe2.{name}" if family == "mpe" else f"{family.replace('/', '.')}.{name}")
    taken = {"render_mode", "self", "env_name", "kwargs", "render_fps", "screen_height", "screen_width"}
    found = inspect.signature(module.raw_env).parameters.values()
    return ", ".join(
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in found
        if p.name not in taken and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    )


def short(space: Any) -> str:
    """Return a space as it fits a cell."""
    text = re.sub(r"Box\(0, 255, (\(.*\)), uint8\)", r"uint8 \1", str(space).replace("-inf, inf, ", ""))
    return text if len(text) < 60 else f"{type(space).__name__}{getattr(space, 'shape', '')}"


def row(env_id: str, rewards: str) -> tuple[str, str]:
    """Return an env's row of the table, and its arguments."""
    picture = frame(env_id)
    with marlvec.make(env_id, num_envs=1, backend="sync") as envs:
        groups = envs.spec.groups
        kinds = Counter(name.rpartition("_")[0] or name for name in envs.agents)
        agents = ", ".join(kind if count == 1 else f"{count} × {kind}" for kind, count in kinds.items())
        observations = "; ".join(dict.fromkeys(short(g.observation_space) for g in groups))
        actions = "; ".join(dict.fromkeys(short(g.action_space) for g in groups))
    costs = f"{speed(env_id, 4, 'sync'):,.0f}"
    if native_entry(env_id) is not None:
        costs += f"; compiled {speed(env_id, 1024, 'native'):.2g}"
    shown = "" if picture is None else f"![{name_of(env_id)}](../img/envs/{picture})"
    cells = (shown, f"`{name_of(env_id)}`", agents, f"{observations} → {actions}", rewards, costs)
    return f"| {' | '.join(cells)} |", arguments_of(env_id)


def write(family: str) -> None:
    """Write the page of a family."""
    own = FAMILIES[family]
    rows = {env_id: row(env_id, rewards) for env_id, rewards in own["rewards"].items()}
    compiled = any("compiled" in line for line, _ in rows.values())
    lines = [
        f"# {own['title']}",
        "",
        own["introduction"],
        "",
        "| | env | agents | observation → action | rewards | µs a step |",
        "| --- | --- | --- | --- | --- | --- |",
        *(line for line, _ in rows.values()),
        "",
        "µs are a step's processor time, with random actions."
        + (' *Compiled*: `backend="native"`, 1,024 envs.' if compiled else ""),
        "",
    ]
    common = {arguments for _, arguments in rows.values()}
    if len(common) == 1 and "" not in common:
        lines += ["## Arguments of make()", "", f"All of them take `{common.pop()}`.", ""]
    elif any(common):
        lines += ["## Arguments of make()", ""]
        lines += [f"- `{name_of(env_id)}`: `{found}`" for env_id, (_, found) in rows.items() if found]
        lines.append("")
    lines.append(f"`python benchmarks/env_pages.py {family}` writes this page.")
    (DOCS / "families" / f"{family}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write the pages that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    warnings.simplefilter("ignore")
    for family in parser.parse_args().family:
        if (package := FAMILIES[family].get("package")) and importlib.util.find_spec(package) is None:
            print(f"{package} is not installed: docs/families/{family}.md stays as it is")
            continue
        write(family)
        print(f"docs/families/{family}.md")


if __name__ == "__main__":
    main()
