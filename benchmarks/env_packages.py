"""Try packages of multi-agent envs one after the other, and write docs/packages.md from what they did.

``python -m benchmarks.env_packages`` runs every package of ``env_packages.toml`` that has no result yet, each at its
pinned version in a virtual environment of its own under the temp folder; ``python -m benchmarks.env_packages lbforaging
rware`` runs these two anew; ``--page`` only writes the page. Results are kept in ``env_packages.json``, one package at a
time, so that a run which was stopped goes on. The environments see the packages of the Python that runs the command,
which saves downloads, unless a package needs another Python.
"""

from __future__ import annotations

import argparse
import json
import os
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
INSTALL_SECONDS, RUN_SECONDS = 600, 420
FINDINGS = "https://github.com/marlvec/marlvec/blob/main/findings/"
OTHER_PYTHONS = "gymnasium", "pettingzoo", "numpy", "cloudpickle", "mpe2", "pytest"  # for envs of another Python


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
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    # Flags such as --no-deps are for the package; what it needs then is in `with`.
    rounds = [[*entry["flags"], needs[0]], needs[1:]] if "--no-deps" in entry.get("flags", ()) else [[*entry.get("flags", ()), *needs]]
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
    (place / "entry.json").write_text(json.dumps({"name": name, **entry}), encoding="utf-8")
    answer = place / "result.json"
    command = [str(python), "-W", "ignore", "-m", "benchmarks.env_packages_probe", str(place / "entry.json"), str(answer)]
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
    if any(isinstance(row, str) for row in equal.values()):
        return "differs"
    if equal or " passed" in result.get("tests", ""):
        return "equal"
    return "stopped" if problem else "runs"


# --- The page


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
    if "page" in globals():
        PAGE.write_text(page(known, results()), encoding="utf-8")


if __name__ == "__main__":
    main()
