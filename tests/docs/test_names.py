"""Names in backticks on the pages are today's, and their words are plain: "reward" for it, not "pay"."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from marlvec.errors import MissingExtraError

ROOT = Path(__file__).resolve().parents[2]
# The changelog says what names were called, docs/api is made from the sources, and docs/families from envs of others.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        page
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.parent.name not in ("api", "families") and not page.stem.startswith("changelog")
    ),
]
# Of other libraries, tools and languages, where they are named beside the first column of a table.
OTHERS = """
    A_g ARGS AlreadyPendingCallError AsyncEnvPool BigInt64Array DefaultCallbacks EnvRunnerServerForExternalInference
    Float32Array GAE MALLOC_MMAP_THRESHOLD_ MALLOC_TRIM_THRESHOLD_ Math MultiAgentOnPolicyAlgorithm MyPolicy NAME_mean
    POLICY PORT PolicyClient NAME VENV _2 _3 __setstate__ _max _min agent_episode black_death black_death_v3 commit
    ep_rew_mean importlinter js lint make_net make_rule nil noqa python3 setUint32 stack_num subtle tool
    pistonball pursuit env_fns creator Repeated color_reduction_v0 CatFrames MultiThreadedEnvWrapper ObservationNorm
    full_registration x3 x8 x15 RewardClipping VecNorm create_env_fn env_name Actor working_dir MissionSpace
    LearnedPolicyEnemySMAX jaxnav storm MPE_simple_facmac MPE_simple_world_comm_v3
    String hive_partitioning hive_schema read_ipc scan_ipc
    EGreedyModule ExplorationType DETERMINISTIC EpisodeBatch EnvRunnerGroup TensorDict agent_indicator_v0 avail_actions
    basic_mac batch_size_run common_reward complete_episodes cv_critic episode_limit epsilon_anneal_time epsilon_finish
    epsilon_start mac non_shared_mac obs_agent_id save_model save_to_path split_trajs t_env t_max test_interval
    test_nepisode truncate_episodes U6
    AuthenticationError DistributedDataParallel auth_token jax_enable_x64 max_workers min_workers runtime_env
    """
FILES = {"marlvec.js", "marlvec.v1", "marlvec.NAME"}  # a file, a name in general, and the protocol's name
# Each with what to write in its place.
INSTEAD = {
    r"pa(?:y|ys|id|ying)": "give a reward; cost; be worth it",
    r"told|tell(?:s|ing)?": "call with, pass, show, say; distinguish",
    r"somebody|nobody|everybody|anybody": "who it is: a process, a caller, an agent; none, no agent",
    r"doors?": "endpoint, gateway",
    r"desks?": "exchange",
    r"seats?": "agent",
    r"harvest(?:s|ed|ing)?": "collect",
    r"travel(?:s|led|ling)?": "be sent, be pickled; going back",
    r"compan(?:y|ies)": "group",
}
WORDS = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in INSTEAD.items()}
# Where a word has a meaning of its own: what stands there, as a whole.
ALLOWED = re.compile(
    r"""
    ^```.*?^```$             # blocks of code
    | `[^`\n]*`              # names: of others (`simple_world_comm_v3`), of before (the changelog's `--seat`, `Door`)
    | \bsimple_world_comm\b  # mpe2's
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_CODE = re.compile(r"`([^`\n]+)`")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@cache
def known_words() -> frozenset[str]:
    """All names in the sources, and the words of their one-line strings: columns, keys and ids."""
    words: set[str] = set()
    for folder in ("marlvec", "connectors", "examples", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            words.update(path.relative_to(ROOT).with_suffix("").parts)
            for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
                if token.type == tokenize.NAME:
                    words.add(token.string)
                elif token.type == tokenize.STRING and "\n" not in token.string:
                    words.update(re.findall(r"\w+", token.string))
    # docs/packages.md is written from this list, with the names of others.
    words.update(re.findall(r"\w+", (ROOT / "benchmarks" / "env_packages.toml").read_text(encoding="utf-8")))
    return frozenset(words)


def text_of(page: Path) -> str:
    """A page without its blocks of code; on pages about other libraries without what those call it, too."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    if page.parent.name in ("migrating", "libraries"):
        text = re.sub(r"^\|[^|\n]*\|", "|", text, flags=re.M)
    return text


def names_of(page: Path) -> list[str]:
    codes = (re.sub(r"\"[^\"]*\"|'[^']*'", "", code) for code in _CODE.findall(text_of(page)))
    return [found[0] for code in codes for found in _NAME.finditer(code)]


def own_names(page: Path) -> set[str]:
    """Classes and functions that the page's own blocks of code define."""
    return set(re.findall(r"^(?:class|def) (\w+)", page.read_text(encoding="utf-8"), re.M))


@pytest.mark.slow("runs a program of its own")
def test_names_on_the_pages_are_in_the_sources() -> None:
    unknown = {
        page.name: {part for name in names_of(page) for part in name.split(".")} - own_names(page) - set(OTHERS.split())
        for page in PAGES
    }
    found = {name: sorted(parts - known_words()) for name, parts in unknown.items() if parts - known_words()}
    assert found == {}, "renamed, or another library's: then name it in OTHERS"


def test_dotted_names_and_imports_on_the_pages_lead_somewhere() -> None:
    dotted = {name for page in PAGES for name in names_of(page) if name.startswith("marlvec.") and name not in FILES}
    for page in PAGES:
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "marlvec":
                    dotted |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert [name for name in sorted(dotted) if not leads_somewhere(name)] == []


def leads_somewhere(name: str) -> bool:
    """Whether a dotted name is a module, or what one has; views of libraries that are not here count."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except MissingExtraError:
            return True
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def texts() -> Iterator[tuple[str, int, str]]:
    """Where a text stands, the line it begins at, and the text: pages, examples, and docstrings of what ships."""
    pages = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    for page in (*pages, *sorted((ROOT / "examples").glob("*.py"))):
        yield str(page.relative_to(ROOT)), 1, page.read_text(encoding="utf-8")
    for folder in ("marlvec", "connectors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (ROOT / "marlvec" / "connectors") in path.parents:
                continue  # the same as connectors/, through the link
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                if (text := ast.get_docstring(node, clean=False)) is not None:
                    yield str(path.relative_to(ROOT)), node.body[0].lineno, text


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """Lines, from 0, and what is wrong in them."""
    plain = ALLOWED.sub(lambda part: re.sub(r"[^\n]", " ", part[0]), text)
    for k, line in enumerate(plain.splitlines()):
        for word, instead in WORDS.items():
            for hit in word.findall(line):
                yield k, f"{hit!r}: write {instead}"


@pytest.mark.slow("runs a program of its own")
def test_no_page_no_example_and_no_docstring_speaks_in_images() -> None:
    assert [f"{where}:{first + k}: {fault}" for where, first, text in texts() for k, fault in found_in(text)] == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("Agents are paid\nand nobody is told.", [0, 1, 1]),
        ("The `--seat` of before", []),
        ("```python\ntold = 1\n```\nA door", [3]),
        ("payoff, unpaid, payment, foretold", []),
    ],
)
def test_words_are_found_where_they_are(text: str, lines: list[int]) -> None:
    assert [k for k, _ in found_in(text)] == lines
