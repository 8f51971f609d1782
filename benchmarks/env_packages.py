"""Try packages of multi-agent envs one after the other, and write docs/packages.md from what they did.

``python -m benchmarks.env_packages`` runs every package of ``env_packages.toml`` that has no result yet, each at its
pinned version in a virtual environment of its own under the temp folder; ``python -m benchmarks.env_packages lbforaging
rware`` runs these two anew; ``--page`` only writes the page. Results are kept in ``env_packages.json``, a package at a
time, so that a run that was stopped continues. The environments see the packages of the Python that runs the command,
which saves downloads, unless a package needs another Python.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "env_packages.json"
PAGE = ROOT / "docs" / "packages.md"
PLACE = Path(tempfile.gettempdir()) / "marlvec-env-packages"
INSTALL_SECONDS, RUN_SECONDS = 300, 420
REPOSITORY = "https://github.com/marlvec/marlvec"
OTHER_PYTHONS = (
    "gymnasium",
    "pettingzoo",
    "numpy",
    "cloudpickle",
    "mpe2",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)  # for envs of another Python


def entries() -> dict[str, dict[str, Any]]:
    """Return the list of packages, by name."""
    return tomllib.loads((HERE / "env_packages.toml").read_text(encoding="utf-8"))


def results() -> dict[str, dict[str, Any]]:
    """Return what was found, by name."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def save(found: Mapping[str, Any]) -> None:
    """Write the results, a package a line, in the order of the list."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(found[name], sort_keys=True, ensure_ascii=False)}"
        for name in entries()
        if name in found
    ]
    whole = "{\n" + ",\n".join(lines) + "\n}\n"
    twin = RESULTS.with_suffix(".part")
    twin.write_text(whole, encoding="utf-8")
    twin.replace(RESULTS)


# --- Running


def call(command: Sequence[str], seconds: float, log: Path, **env: str) -> str:
    """Run a command; return an empty text, or why it did not end well."""
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "MPLBACKEND": "Agg", **env},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers that it left
    return "" if code == 0 else f"ended with {code}: {last_words(log)}"


def last_words(log: Path) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if clashes := [line for line in lines if " depends on " in line]:  # of pip, which says so before its last line
        return "; ".join(dict.fromkeys(clashes))[:300]
    named = [line for line in lines if "rror" in line and "note:" not in line and "subprocess-exited" not in line]
    return (named or lines or ["no output"])[-1].replace(str(Path.home()), "~")[:300]


def build_place(name: str, entry: Mapping[str, Any]) -> tuple[Path, str]:
    """Make the virtual environment of a package and install it; return its Python, and why this failed."""
    place = PLACE / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    own = entry.get("python")
    base = python_of(own) if own else sys.executable
    if base is None:
        return Path(), f"needs Python {own}, which this machine has not"
    subprocess.run([base, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    python = place / "venv" / "bin" / "python"
    needs = [f"{name}=={entry['version']}", *entry.get("with", ())]
    if own or entry.get("alone"):
        needs += OTHER_PYTHONS
    else:
        inside = next((place / "venv" / "lib").iterdir()) / "site-packages"
        (inside / "base.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    if entry.get("installed"):
        return python, ""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    # No package may replace what marlvec needs by an older version: then it "cannot be installed beside marlvec".
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (place / "constraints.txt").write_text("\n".join(about) + "\n", encoding="utf-8")
    pip += ["--constraint", str(place / "constraints.txt")]
    # The flag --no-deps is for the package alone; what it needs then is in `with`.
    flags = entry.get("flags", ())
    rounds = [[*flags, needs[0]], needs[1:]] if "--no-deps" in flags else [[*flags, *needs]]
    for wanted in filter(None, rounds):
        if problem := call([*pip, *wanted], entry.get("install_seconds", INSTALL_SECONDS), place / "install.log"):
            return python, problem
    return python, ""


def python_of(version: str) -> str | None:
    """Return an interpreter of this version, on the path or of pyenv; None if there is none."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def run(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Install one package and run it; return its result."""
    result: dict[str, Any] = {"version": entry["version"], "date": time.strftime("%Y-%m-%d")}
    if "cannot" in entry:
        return {**result, "status": "not run", "why": entry["cannot"]}
    place = PLACE / name
    python, problem = build_place(name, entry)
    result["python"] = entry.get("python", f"{sys.version_info[0]}.{sys.version_info[1]}")
    if problem:
        return {**result, "status": "not installed", "why": problem}
    question, answer = place / "entry.json", place / "result.json"
    question.write_text(json.dumps({"name": name, **entry}), encoding="utf-8")
    # By its path, not its name: some wheels bring a top-level package `benchmarks`.
    probe = f"import runpy; runpy.run_path({str(HERE / 'env_packages_probe.py')!r}, run_name='__main__')"
    command = [str(python), "-W", "ignore", "-c", probe, str(question), str(answer)]
    problem = call(command, entry.get("run_seconds", RUN_SECONDS), place / "run.log", PYTHONPATH=str(ROOT))
    found = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    result |= found
    if tests := entry.get("tests"):
        pytest = [str(python), "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", *tests]
        log = place / "tests.log"
        failed = call(pytest, entry.get("run_seconds", RUN_SECONDS), log, PYTHONPATH=str(ROOT), CI="1")
        result["tests"] = failed or next(line for line in reversed(log.read_text().splitlines()) if "passed" in line)
    return {**result, "status": status_of(result, problem), **({"why": problem} if problem else {})}


def status_of(result: Mapping[str, Any], problem: str) -> str:
    """Return one word or two for what came of a package."""
    if "raises" in result:
        return "raises"
    if "refused" in result:
        return "refused"
    equal = result.get("equal", {})
    if equal and all(isinstance(row, str) and "ContractError" in row for row in equal.values()):
        return "refused"
    if equal and all(isinstance(row, str) and row.startswith("EnvRaised") for row in equal.values()):
        return "raises"
    if any(isinstance(row, str) for row in equal.values()):
        return "differs"
    if equal or " passed" in result.get("tests", ""):
        return "equal"
    return "stopped" if problem else "runs"


# --- The page

HEAD = """# Packages that were tried

For those who have an env of one of these packages, and ask whether it works here and what to watch for. Each was
installed at this version in a virtual environment of its own, and played by a plain loop and by `make()`: observations,
rewards, flags, masks and final observations of 4 envs were compared bit for bit. Traps are the env's own, also without
marlvec (copies: by pickle and deepcopy); [findings](REPO/tree/main/findings) has scripts that show some. µs are a
step's processor time with `backend="sync"`, on a shared machine: take their size, not their digits.

`python -m benchmarks.env_packages NAME` repeats a row. Dates, versions and full texts are in
[env_packages.json](REPO/blob/main/benchmarks/env_packages.json).

""".replace("REPO", REPOSITORY)
EQUAL = """<div class="calls" markdown>

## Played like a plain loop

Unless a row says otherwise, 200 steps are equal with `"sync"` and `"async"`, in all three autoreset modes, and
`check_env` finds nothing.

| package | API | in marlvec | what to watch for | µs |
| --- | --- | --- | --- | --- |
"""
OTHER = """
## Refused, or not run

| package | what came of it |
| --- | --- |
"""


def page(known: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the page of these results."""
    good = [name for name in known if found.get(name, {}).get("status") in ("equal", "differs", "runs")]
    rest = [name for name in known if name in found and name not in good]
    text = HEAD + EQUAL
    for name in good:
        entry, result = known[name], found[name]
        cells = (
            title(name, entry, result),
            result.get("api", ""),
            code(entry["line"]),
            remarks(entry, result),
            f"{result['us a step']:,.0f}" if "us a step" in result else "",
        )
        text += f"| {' | '.join(cells)} |\n"
    text += OTHER
    for name in rest:
        entry, result = known[name], found[name]
        cells = (title(name, entry, result), " ".join(filter(None, (why(result), entry.get("note", "")))))
        text += f"| {' | '.join(cells)} |\n"
    return f"{text}\n</div>\n"


def title(name: str, entry: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return a package's name and version, with a link to its findings."""
    python = f", Python {result['python']}" if "python" in entry else ""
    links = " ".join(f"[finding]({REPOSITORY}/blob/main/findings/{one}.sh)" for one in entry.get("findings", ()))
    return f"{name} {result['version']}{python} {links}".strip()


def code(line: str) -> str:
    """Return a line as code in a cell of a table; words with code in them are left alone."""
    return line if "`" in line else "`" + line.replace("|", "\\|") + "`"


def remarks(entry: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return what a row says about a package beyond "equal, and no findings"."""
    equal, checks = equal_words(result).replace("yes, ", "equal over "), check_words(result)
    words = [
        "" if equal == "yes" else f"{equal[0].upper()}{equal[1:]}.",
        f"`check_env`: {checks}." if checks not in ("", "nothing") else "",
        trap_words(entry, result),
    ]
    return " ".join(filter(None, words))


def equal_words(result: Mapping[str, Any]) -> str:
    """Return in which modes the rows were those of a plain loop."""
    equal = result.get("equal", {})
    if not equal:
        return f"tests of whole episodes: {tests_words(result)}" if "tests" in result else "runs; not compared"
    bad = {key: value for key, value in equal.items() if isinstance(value, str)}
    steps = {value["steps"] for value in equal.values() if not isinstance(value, str)}
    if not bad:
        asked = "yes" if steps == {200} else f"yes, {min(steps)} steps or more"
        return asked if len(equal) == 6 else f"{asked}, only {', '.join(sorted(equal))}"
    if result.get("traps", {}).get("seed repeats in a new env") is False:
        return "no two envs of one seed are alike"
    first = next(iter(bad.items()))
    return f"{len(equal) - len(bad)} of {len(equal)}; {first[0]}: {cell(first[1], 160)}"


def tests_words(result: Mapping[str, Any]) -> str:
    """Return what pytest said last, without its times."""
    words = result["tests"].strip("= ").partition(" in ")[0]
    return cell(words, 120)


def check_words(result: Mapping[str, Any]) -> str:
    """Return what `check_env` found, a few words each."""
    if "check_env error" in result:
        return f"raises: {cell(result['check_env error'], 90)}"
    if "check_env" not in result:
        return ""
    names = dict.fromkeys(line.partition(":")[0] for line in result["check_env"])
    return ", ".join(names) or "nothing"


def trap_words(entry: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the traps of a package in words: measured ones, then the note of the list."""
    traps = result.get("traps", {})
    used = traps.get("seeds that begin otherwise in a used env", 0)
    copies = {how: traps[how] for how in ("pickle", "deepcopy") if traps.get(how, "right") != "right"}
    ends = traps.get("ends", [])
    traps_error = result.get("traps error", "").partition(":")[0]
    words = [
        f"a plain loop raises {traps_error}" if traps_error else "",
        "a seed does not repeat its episode" if traps.get("seed repeats in a new env") is False else "",
        f"{used} of 12 seeds begin another episode in an env that has played" if used else "",
        "begins always alike" if traps.get("resets without a seed differ") is False else "",
        "resets without a seed do not repeat" if traps.get("resets without a seed repeat") is False else "",
        "returned arrays change later" if traps.get("arrays change later") else "",
        "observations outside their space" if traps.get("outside") else "",
        f"dtype: {traps['other dtype']}" if traps.get("other dtype") else "",
        "both flags at once" if any("+" in end for end in ends) else "",
        "draws from the process's generators" if traps.get("global random") else "",
        copy_words(copies),
    ]
    text = "; ".join(filter(None, words))
    text = f"{text[0].upper()}{text[1:]}." if text else ""
    return " ".join(filter(None, (cell(text, 400), entry.get("note", ""))))


def copy_words(copies: Mapping[str, str]) -> str:
    """Return what is wrong with copies of an env, by pickle and by deepcopy."""
    short, wrong = "copies lose the state", {}
    for how, what in copies.items():
        wrong.setdefault(short if what == "another state" else what, []).append(how)
    return "; ".join(
        short if (what, len(ways)) == (short, 2) else f"{what} ({', '.join(ways)})" for what, ways in wrong.items()
    )


def why(result: Mapping[str, Any]) -> str:
    """Return why a package is in the second table."""
    status = result["status"]
    if status == "not run":
        return f"Not run: {result['why']}."
    if status == "not installed":
        reason = result["why"].partition(": ")[2] or result["why"]
        return f"Cannot be installed beside marlvec: {cell(reason, 220).rstrip('.')}."
    first = next(iter(result.get("equal", {}).values()), "")
    text = result.get("raises") or result.get("refused") or result.get("why") or first
    before, got, _ = text.partition("Got an object of type ")
    text = "in none of the forms that marlvec takes." if got else _of_one_env(before)
    head = {
        "raises": "Its constructor raises" if "raises" in result else "Raises",
        "refused": "Refused",
        "stopped": "Stopped",
    }[status]
    words = cell(text, 130)
    return f"{head}: {words}{'' if words.endswith(('.', '…')) else '.'}"


def _of_one_env(text: str) -> str:
    """Return the text of marlvec's error about env 0, without its class and without the other envs' texts."""
    one = re.split(r"\s+env 1[, ]", text)[0]
    return re.sub(r"^Env(ContractError|Raised): env 0(, __init__\(\):|,| raised in) ", "", one)


def cell(text: str, size: int) -> str:
    """Return a text as it may stand in a cell of a table: one line, cut, no signs of Markdown's or HTML's."""
    flat = " ".join(text.split())
    flat = flat if len(flat) <= size else flat[: size - 1] + "…"
    return flat.replace("|", "\\|").replace("<", "&lt;").replace("{", "&#123;").replace("*", "\\*").replace("_", "\\_")


def main() -> None:
    """Run packages, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", action="store_true", help="only write the page")
    given = parser.parse_args()
    known, found = entries(), results()
    if unknown := set(given.names) - known.keys():
        parser.error(f"not in env_packages.toml: {', '.join(sorted(unknown))}")
    wanted = given.names or [name for name in known if found.get(name, {}).get("version") != known[name]["version"]]
    for name in () if given.page else wanted:
        start = time.monotonic()
        result = run(name, known[name])
        found = {**results(), name: result}
        save(found)
        print(f"{name}: {result['status']}, {time.monotonic() - start:.0f} s {result.get('why', '')}", flush=True)
        shutil.rmtree(PLACE / name / "venv", ignore_errors=True)
    PAGE.write_text(page(known, results()), encoding="utf-8")


if __name__ == "__main__":
    main()
