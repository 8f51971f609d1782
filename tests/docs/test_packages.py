"""docs/packages.md is what the results in benchmarks/env_packages.json say; scripts in findings/ have their form."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from benchmarks.env_packages import PAGE, cell, entries, equal_words, page, remarks, results, status_of, trap_words

ROOT = Path(__file__).parents[2]
FINDINGS = sorted((ROOT / "findings").glob("*.sh"))
HEAD = re.compile(
    r"#!/usr/bin/env bash\n# Versions: .*Python \d.*seen (\d{4}-\d\d-\d\d)\.\n# Guess: (.+\n)(#   .+\n)*"
    r"# Behaviour: (.+\n)(#   .+\n)*# Output seen: (.+\n)(#   .+\n)*set -euo pipefail\n"
)


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(entries(), results()), "python -m benchmarks.env_packages --page"


def test_results_are_of_the_versions_in_the_list_and_say_why_where_nothing_ran() -> None:
    known, found = entries(), results()
    assert found.keys() <= known.keys()
    assert len(found) >= 45
    for name, result in found.items():
        assert result["version"] == known[name]["version"], name
        if result["status"] in ("not run", "not installed", "stopped"):
            assert result["why"], name
    assert sum(result["status"] == "equal" for result in found.values()) >= 30


def test_findings_that_packages_name_are_there() -> None:
    named = {finding for entry in entries().values() for finding in entry.get("findings", ())}
    assert named <= {path.stem for path in FINDINGS}


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_a_finding_says_versions_guess_behaviour_output_and_date(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert HEAD.match(text), "its head"
    assert os.access(path, os.X_OK)
    assert "assert " in text
    assert 'VENV="$(mktemp -d)"' in text
    installed = text.partition("pip install --quiet ")[2].partition("\n")[0].split()
    assert installed
    assert all("==" in package for package in installed)
    assert "marlvec" not in re.sub("^#.*", "", text, flags=re.M)


def test_words_of_results() -> None:
    same = {f"{backend} {mode}": {"steps": 200, "ends": 3} for backend in ("sync", "async") for mode in "abc"}
    assert equal_words({"equal": same}) == "yes"
    assert equal_words({"equal": {**same, "sync a": {"steps": 60, "ends": 0}}}) == "yes, 60 steps or more"
    assert equal_words({"equal": {**same, "sync a": "step 3: reward"}}) == "5 of 6; sync a: step 3: reward"
    odd = {"equal": {**same, "sync a": "step 3: reward"}, "traps": {"seed repeats in a new env": False}}
    assert equal_words(odd) == "no two envs of one seed are alike"
    assert equal_words({"tests": "== 28 passed in 4.3s =="}) == "tests of whole episodes: 28 passed"
    traps = {
        "seed repeats in a new env": True,
        "pickle": "another state",
        "deepcopy": "another state",
        "ends": ["terminated+truncated"],
    }
    words = "Both flags at once; copies lose the state. Words."
    assert trap_words({"note": "Words."}, {"traps": traps}) == words
    assert remarks({}, {"equal": same, "check_env": []}) == ""
    short = {"equal": {**same, "sync a": {"steps": 60, "ends": 0}}, "check_env": ["ends (serious): …"]}
    assert remarks({"note": "Words."}, short) == "Equal over 60 steps or more. `check_env`: ends (serious). Words."
    assert cell("a | b <c> {d} * _\n e", 99) == "a \\| b &lt;c> &#123;d} \\* \\_ e"
    assert status_of({"equal": same}, "") == "equal"
    assert status_of({"equal": {"sync a": "differs"}}, "") == "differs"
    assert status_of({}, "not done after 9 s") == "stopped"
