"""Optional libraries: `import_extra` imports one, or raises with the extra to install.

`describe_package` says which installed package raised, and which versions it was made for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from traceback import walk_tb
from typing import Any

from marlvec.errors import MissingExtraError


@contextmanager
def needs_extra(library: str, what: str, install: str) -> Iterator[None]:
    """In this context, a failed import raises `MissingExtraError` with the command that installs the library."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs {library}, which cannot be imported ({error}); to install it: {install}"
        ) from error


def import_extra(module: str, what: str, install: str) -> Any:
    """Import an optional library; ``what`` needs it and ``install`` installs it, in the `MissingExtraError`."""
    with needs_extra(module.partition(".")[0], what, install):
        found = importlib.import_module(module)
    return found


_APIS = ("gymnasium", "pettingzoo", "gym", "numpy", "jax")  # whose new versions break envs
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^;)]*)")


def describe_package(error: BaseException) -> str:
    """Return a sentence on the package whose code raised: its version, what it requires, and what is installed.

    The package is the outermost one in the traceback that was made for Gymnasium, Gym or PettingZoo; if there is none,
    as for an env in a file of the user, the text is empty.
    """
    try:
        owners = metadata.packages_distributions()
        modules = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)]
        names = dict.fromkeys(name for module in modules for name in owners.get(module, ()) if name != "marlvec")
        for name in names:
            needs = _requirements(name)
            if name.lower() not in _APIS and {"gymnasium", "gym", "pettingzoo"} & needs.keys():
                return _sentence(name, needs, error)
    except Exception:  # broken metadata of some package: the env's own error is the one to show
        pass
    return ""


def _requirements(name: str) -> dict[str, str]:
    """Return what a package requires of `_APIS`: name to versions."""
    lines = [line for line in metadata.requires(name) or () if "extra ==" not in line]
    found = (_REQUIREMENT.match(line) for line in lines)
    pairs = ((one.group(1).lower(), one.group(2).strip()) for one in found if one)
    return {library: versions for library, versions in pairs if library in _APIS}


def _sentence(name: str, needs: dict[str, str], error: BaseException) -> str:
    installed = []
    for library in _APIS:
        try:
            installed.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    pins = [f"'{library}{versions}'" for library, versions in needs.items() if versions]
    advice = (
        f"where these differ, pin what it was made for: pip install {' '.join(pins)}"
        if pins
        else "it names no versions, so it may have been made for older ones: pin those of its time"
    )
    if "module" in str(error) and isinstance(error, (TypeError, AttributeError)) and "agent_selector" in _lines(error):
        advice = (
            "since PettingZoo 1.25 pettingzoo.utils.agent_selector is a module, no class: before its import write "
            "pettingzoo.utils.agent_selector = pettingzoo.utils.AgentSelector"
        )
    wanted = ", ".join(f"{library} {versions or 'of any version'}" for library, versions in needs.items())
    return f"{name} {metadata.version(name)} raised. It requires {wanted}; installed: {', '.join(installed)}; {advice}."


def _lines(error: BaseException) -> str:
    """Return the names in the code that raised."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return " ".join(frames[-1].f_code.co_names) if frames else ""
