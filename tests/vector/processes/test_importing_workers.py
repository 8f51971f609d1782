"""Classes of modules that a worker cannot import, or must not import again: the module that makes the envs while it is
imported, the main module of a spawned child, a module loaded from a path.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import marlvec
from marlvec.errors import ResourceError

ENV = """
import gymnasium
import marlvec

class Env(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Discrete(9), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return first(), {}

    def step(self, action):
        return 1, 0.0, False, False, {}

def first():
    return 7
"""
MAKES = ENV + 'envs = marlvec.make(Env, num_envs=4, num_workers=2, backend="async")\n'
SPAWNED = f"""
import multiprocessing, sys
{ENV}
def work():
    with marlvec.make(Env, num_envs=4, num_workers=2, backend="async") as envs:
        print(envs.reset(seed=0)[0].ravel().tolist(), envs.exec_func(lambda env: first()))

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a module that makes envs of its own class while it is imported."""
    name = f"makes_envs_{id(tmp_path)}"
    (tmp_path / f"{name}.py").write_text(MAKES)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    if imported := sys.modules.pop(name, None):
        imported.envs.close()


def test_module_that_makes_envs_while_it_is_imported_sends_their_class_by_value(module: str) -> None:
    envs = importlib.import_module(module).envs
    assert envs.reset(seed=0)[0].ravel().tolist() == [7, 7, 7, 7]
    assert envs.exec_func(lambda env: type(env).__module__) == (module,) * 4


@pytest.mark.parametrize("by_name", [False, True])
def test_worker_that_imports_such_a_module_makes_no_envs_of_its_own(module: str, by_name: bool) -> None:
    imported = importlib.import_module(module)
    env = f"{module}:Env" if by_name else imported.Env
    with pytest.raises(ResourceError, match=rf"'{module}', which makes envs .* while it is imported.*__main__"):
        marlvec.make(env, num_envs=2, num_workers=1, backend="async")


@pytest.mark.slow("plays whole episodes in worker processes")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_class_of_the_script_reaches_workers_of_a_child_that_was_spawned(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    ran = subprocess.run([sys.executable, script, method], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "[7, 7, 7, 7] (7, 7, 7, 7)\n"


def load_from_path(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["a_module_of_no_path", "no_such_package.of_no_path", "string"])
def test_class_of_a_module_that_was_loaded_from_a_path_goes_by_value(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest's importlib mode loads tests. ``string``: by that name a worker finds another file."""
    path = tmp_path / "module.py"
    path.write_text(ENV)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = load_from_path(path, name)
    try:
        with marlvec.make(module.Env, num_envs=2, num_workers=1, backend="async") as envs:
            assert envs.reset(seed=0)[0].ravel().tolist() == [7, 7]
            assert envs.exec_func(module.Env.reset) == ((7, {}),) * 2
    finally:
        del sys.modules[name]
