"""What users get: sdist → wheel from it → a clean virtual environment, where the package must stand on its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Building fetches hatchling, installing fetches numpy and the rest; with a cold cache that takes a while.
pytestmark = pytest.mark.time_limit(600)


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; it runs outside the checkout, with nothing of this Python's paths."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVERAGE"))}
    result = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=500)
    if result.returncode != 0:
        line = " ".join(map(str, command))
        pytest.fail(f"ended with {result.returncode}: {line}\n{result.stdout}{result.stderr}", pytrace=False)
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment that has the wheel, what it depends on, and nothing else."""
    venv = tmp_path_factory.mktemp("clean") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv.parent)
    python = venv / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-compile", wheel, cwd=venv.parent)
    run(*pip, "check", cwd=venv.parent)
    return python


def tree(folder: str, name: str) -> Iterator[str]:
    """Files of a folder of the checkout, as they should be called in the wheel."""
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield f"{name}/{path.relative_to(ROOT / folder)}"


@pytest.mark.slow("builds a wheel and installs it")
def test_the_wheel_has_every_file_of_the_tree_and_no_other(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        *(name for name in tree("marlvec", "marlvec") if not name.startswith("marlvec/connectors/")),
        *tree("connectors", "marlvec/connectors"),
        *tree("examples", "marlvec/examples"),
    }
    assert len(names) == len(set(names))
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "marlvec/py.typed" in names
    assert "marlvec/connectors/agent/__init__.py" in names


@pytest.mark.slow("builds a wheel and installs it")
def test_a_checkout_without_links_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """As Git makes one on Windows: the link to connectors/ is a file there."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    run("git", "clone", "--quiet", "-c", "core.symlinks=false", ROOT, tmp_path / "clone", cwd=tmp_path)
    assert (tmp_path / "clone" / "marlvec" / "connectors").is_file()
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tmp_path / "clone", cwd=tmp_path)
    (other,) = tmp_path.glob("*.whl")
    committed = {name for name in zipfile.ZipFile(other).namelist() if ".dist-info/" not in name}
    ours = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert committed <= ours
    assert "marlvec/connectors/agent/__init__.py" in committed


@pytest.mark.slow("builds a wheel and installs it")
def test_links_of_the_page_on_pypi_are_whole(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        links = re.findall(r"\]\(([^)\s]+)\)", archive.read(name).decode())
    assert len(links) >= 10
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.slow("builds a wheel and installs it")
def test_the_sdist_has_each_file_once(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        assert not any(member.issym() or member.islnk() for member in archive)
        names = [member.name.partition("/")[2] for member in archive]
    assert len(names) == len(set(names))
    assert {"pyproject.toml", "README.md", "LICENSE", "marlvec/py.typed", "connectors/__init__.py"} <= set(names)
    assert not any(name.startswith("marlvec/connectors") for name in names)


@pytest.mark.slow("builds a wheel and installs it")
def test_every_module_imports_in_a_clean_environment(python: Path, tmp_path: Path) -> None:
    code = """
import importlib, json, pkgutil, sys
import marlvec, marlvec.connectors.agent
found = [m.name for m in pkgutil.walk_packages(marlvec.__path__, "marlvec.") if not m.name.endswith("__main__")]
files, missing = {}, {}
for name in ["marlvec", *found]:
    try:
        files[name] = importlib.import_module(name).__file__
    except ImportError as error:
        missing[name] = str(error)
print(json.dumps([files, missing]))
"""
    files, missing = json.loads(run(python, "-c", code, cwd=tmp_path))
    needs = [  # what nobody else imports
        ("marlvec.distributed.ray_engine", "ray"),
        ("marlvec.envs.grids.foraging", "lbforaging"),
        ("marlvec.envs.grids.overcooked", "overcooked_ai_py"),
        ("marlvec.envs.grids.warehouse", "rware"),
        ("marlvec.external.", "msgpack"),
        ("marlvec.external.", "websockets"),
        ("marlvec.vector.pools.envpool_tasks", "envpool"),
        ("marlvec.interop.pufferlib", "pufferlib"),
        ("marlvec.interop.rllib", "ray"),
        ("marlvec.interop.sb3", "stable_baselines3"),
        ("marlvec.interop.tianshou", "tianshou"),
        ("marlvec.interop.torch", "torch"),  # torchrl's own, too
        ("marlvec.native.", "numba"),
        ("marlvec.vector.watch", "numba"),
    ]
    for name, error in missing.items():
        assert any(name.startswith(start) and extra in error for start, extra in needs), (name, error)
    assert {"marlvec", "marlvec.connectors", "marlvec.connectors.agent", "marlvec.cli"} <= files.keys()
    assert [file for file in files.values() if not Path(file).is_relative_to(python.parent.parent)] == []


@pytest.mark.slow("builds a wheel and installs it")
@pytest.mark.checklist(1)
def test_simple_spread_works_after_a_plain_install(python: Path, tmp_path: Path) -> None:
    code = """
import marlvec, numpy
envs = marlvec.make("simple_spread", num_envs=16)
obs, infos = envs.reset(seed=0)
state = envs.state()
assert (envs.num_envs, envs.agent_num, envs.backend) == (16, 3, "async"), (envs.num_envs, envs.agent_num, envs.backend)
assert obs.shape == (16, 3, 18) and state.shape == (16, 54), (obs.shape, state.shape)
assert all(repr(envs.agent_action_space(agent)) == "Discrete(5)" for agent in range(3))
ends = []
for step in range(1, 51):
    obs, rewards, terminated, truncated, infos = envs.step(numpy.zeros((16, 3), numpy.int64))
    assert obs.shape == (16, 3, 18) and envs.state().shape == (16, 54)
    assert (terminated | truncated).all() == (terminated | truncated).any()
    ends += [step] * bool((terminated | truncated).any())
assert ends == [25, 50], ends
envs.close()
print("done")
"""
    assert run(python, "-c", code, cwd=tmp_path).splitlines()[-1] == "done"


@pytest.mark.slow("builds a wheel and installs it")
def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    assert "rollout" in run(python.parent / "marlvec", "--help", cwd=tmp_path)
    assert run(python.parent / "marlvec", "examples", "policies", "--copy", cwd=tmp_path) == "examples/policies.py\n"
    assert (tmp_path / "examples/policies.py").read_bytes() == (ROOT / "examples/policies.py").read_bytes()


RECORD = """
import marlvec
with marlvec.make("simple_spread", 2, backend="sync") as envs, marlvec.Recorder("run") as recorder:
    marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[recorder], seed=0).collect(env_steps=60)
data = marlvec.load_dataset("run")
"""
PLAY = """
import marlvec
with marlvec.make({env!r}, 2) as envs:
    envs.reset(seed=0)
    envs.step(envs.random_action(seed=0))
"""
EVERY_ID = """
import os
os.environ["SDL_VIDEODRIVER"] = "dummy"
import marlvec
from marlvec.registry import listing
ids = [row.id for row in listing(with_gymnasium=True) if row.extra == {extra!r}]
assert ids
for name in ids:
    with marlvec.make(name, 1, backend="sync") as envs:
        envs.reset(seed=0)
        envs.step(envs.random_action(seed=0))
"""
COMMAND = """
import pathlib, subprocess, sys
command = pathlib.Path(sys.executable).with_name("marlvec")
subprocess.run([command, *{arguments!r}.split()], check=True)
assert pathlib.Path({file!r}).stat().st_size
"""
MAIN_CALLS = {
    "plot": COMMAND.format(arguments="rollout simple_spread --num-envs 2 --env-steps 200 --plot a.png", file="a.png"),
    "video": COMMAND.format(arguments="record simple_spread -o a.mp4", file="a.mp4"),
    "tensorboard": """
import pathlib, marlvec
with marlvec.make("simple_spread", 2, backend="sync") as envs, marlvec.TensorBoardLogger("logs") as logger:
    marlvec.Collector(envs, marlvec.RandomPolicy(), callbacks=[logger], seed=0).collect(env_steps=60)
assert list(pathlib.Path("logs").iterdir())
""",
    **{extra: EVERY_ID.format(extra=extra) for extra in ("classic", "butterfly", "sisl", "atari", "box2d")},
    "lbf": PLAY.format(env="lbf/Foraging-8x8-2p-3f-v3"),
    "rware": PLAY.format(env="rware/rware-tiny-2ag-v2"),
    "overcooked": PLAY.format(env="overcooked/cramped_room"),
    "envpool": PLAY.format(env="envpool/TicTacToe-v1") + PLAY.format(env="envpool/Pong-v5"),
    "vmas": PLAY.format(env="vmas/balance"),
    "jax": """
import gymnasium, jax, numpy, marlvec
class Drift(marlvec.JaxWorld):
    name, agents = "drift", ("red", "blue")
    observation_spaces = (gymnasium.spaces.Box(-9, 9, (1,), numpy.float32),) * 2
    action_spaces = (gymnasium.spaces.Discrete(2),) * 2
    def reset(self, key):
        state = jax.random.uniform(key, (2, 1))
        return state, marlvec.JaxRows(state)
    def step(self, key, state, actions):
        state, none = state + actions[:, None], jax.numpy.zeros(2, bool)
        return state, marlvec.JaxRows(state, jax.numpy.ones(2), none, none)
with marlvec.make(Drift, 2) as envs:
    envs.reset(seed=0)
    envs.step(envs.random_action(seed=0))
""",
    "jaxmarl": PLAY.format(env="jaxmarl/MPE_simple_spread_v3"),
    "brax": PLAY.format(env="jaxmarl/halfcheetah_6x1"),
    "jumanji": PLAY.format(env="jumanji/Cleaner-v0"),
    "pgx": PLAY.format(env="pgx/tic_tac_toe"),
    "external": """
import threading, marlvec
from marlvec import external
def simulate(url):
    with external.Client(url) as client:
        episode = client.start_episode()
        env = marlvec.registry.resolve("simple_spread")(max_cycles=5)
        obs, _ = env.reset(seed=0)
        while env.agents:
            obs, rewards, *_ = env.step(client.get_action(episode, obs))
            client.log_returns(episode, rewards)
        client.end_episode(episode, obs, truncated=True)
with external.make("simple_spread", num_envs=2) as envs, external.Server(envs) as server:
    thread = threading.Thread(target=simulate, args=(server.url,))
    thread.start()
    collector = marlvec.Collector(envs, marlvec.RandomPolicy(), batch_mode="complete", seed=0)
    assert collector.collect(episodes=1).env_steps == 5
    thread.join()
""",
    "sb3": """
import marlvec
from marlvec.interop.sb3 import SB3VecEnv, only_decisions
from stable_baselines3 import PPO
envs = SB3VecEnv(marlvec.make("simple_spread", num_envs=2, backend="sync"))
model = PPO("MlpPolicy", envs, n_steps=8, batch_size=48, device="cpu")
only_decisions(model)
model.learn(48)
envs.close()
""",
    "torchrl": """
from marlvec.interop.torchrl import TorchRLEnv
env = TorchRLEnv.make("simple_spread", num_envs=2, backend="sync")
env.rollout(3)
env.close()
""",
    "tianshou": """
import numpy
from marlvec.interop.tianshou import TianshouVectorEnv
envs = TianshouVectorEnv.make("simple_spread", num_envs=2, backend="sync")
envs.reset(seed=0)
envs.step(numpy.zeros(6, int))
envs.close()
""",
    "distributed": """
import marlvec
from marlvec.distributed import Collectors
def build(place):
    return marlvec.Collector(marlvec.make("simple_spread", 2, backend="sync"), marlvec.RandomPolicy(), seed=place.seed)
with Collectors(build, 1) as collectors:
    assert collectors.collect(env_steps=50).env_steps == 50
""",
    "rllib": """
from ray.rllib.algorithms.ppo import PPOConfig
from marlvec.interop.rllib import RLlibEnvRunner
config = PPOConfig().environment("simple_spread")
config = config.env_runners(env_runner_cls=RLlibEnvRunner, num_env_runners=0, num_envs_per_env_runner=2)
config = config.multi_agent(policies={"agent"}, policy_mapping_fn=lambda *_, **__: "agent")
runner = RLlibEnvRunner(config=config, worker_index=0)
assert runner.sample(num_timesteps=10, random_actions=True)
runner.stop()
""",
    "parquet": RECORD + "assert len(list(data.episodes())) == 4",
    "minari": RECORD
    + """
from marlvec.recording import from_minari, to_minari
from_minari(to_minari(data, "spread/agent_0/random-v0", "agent_0"), "back")
assert len(marlvec.load_dataset("back")["main"]) == len(data["main"]) // 3
""",
    "vault": RECORD
    + """
from marlvec.recording import from_vault, to_vault
to_vault(data, "spread.vlt/Random")
from_vault("spread.vlt/Random", "back")
assert len(marlvec.load_dataset("back")["main"])
""",
    "openspiel": """
import marlvec
from marlvec.selfplay import alpha_rank
assert len(alpha_rank([[0.0, 1.0], [-1.0, 0.0]])) == 2
with marlvec.make("openspiel/kuhn_poker", 2, backend="sync") as envs:
    envs.reset(seed=0)
""",
    "textarena": """
import marlvec
with marlvec.make("textarena/TicTacToe-v0", 2, backend="sync") as envs:
    envs.reset(seed=0)
""",
    "selfplay": """
from marlvec.selfplay import OpenSkill
OpenSkill()
""",
    "native": """
import marlvec
with marlvec.make("simple_spread", 2, backend="native") as envs:
    envs.reset(seed=0)
""",
}
"""What each extra is for, by extra: runs with nothing but the extra installed."""
TORCH = ("vmas", "sb3", "torchrl", "tianshou", "rllib")
"""Extras that ask for torch: the test installs the processor's build first, as docs/install.md says."""
FOR_DEVELOPERS = {"test", "lint", "docs"}
CHEAP = {"minari"}


def test_every_extra_has_a_main_call() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert extras.keys() - FOR_DEVELOPERS == MAIN_CALLS.keys()


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(extra, marks=pytest.mark.slow("a virtual environment") if extra in CHEAP else pytest.mark.soak)
        for extra in MAIN_CALLS
    ],
)
def test_an_extra_alone_is_enough_for_its_main_call(extra: str, wheel: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    beside = ["torch==2.13.0"] if extra in TORCH else []
    run(*pip, "install", "--quiet", "--no-compile", f"{wheel}[{extra}]", *beside, cwd=tmp_path)
    home = {"MINARI_DATASETS_PATH": str(tmp_path / "minari")}
    code = f"import os\nos.environ.update({home})\n{MAIN_CALLS[extra]}\nprint('done')"
    assert run(python, "-c", code, cwd=tmp_path).splitlines()[-1] == "done"
