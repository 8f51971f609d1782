"""marlvec/cli/browser/marlvec.js in Node: it plays whole episodes, and says what to do without a WebSocket."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.external.served import expected, obs_of, served

CLIENT = Path(__file__).resolve().parents[2] / "marlvec" / "cli" / "browser" / "marlvec.js"
NODE = shutil.which("node")
PLAY = """
import { connect } from "%s";
const client = await connect("%s", { token: "%s", %s });
for (let k = 0; k < 5; k++) {
  const episode = await client.begin();
  const said = [];
  for (let n = 0; n < 4; n++) {
    const obs = [10 * k + n, 2 * (10 * k + n), 1];
    const { a, b } = await episode.step({ a: obs, b: obs }, { rewards: n ? { a: 1, b: 0 } : undefined });
    said.push(a, b);
  }
  await episode.end({ a: [0, 0, 1], b: [0, 0, 1] });
  console.log(said.join(" "));
}
await client.close();
"""
TOKEN = "0123456789" * 5

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node: apt-get install nodejs")


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    assert NODE is not None
    command = [NODE, *options, "--input-type=module", "-e", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def options_of_node() -> list[str]:
    assert NODE is not None
    version = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return ["--experimental-websocket"] if int(version.lstrip("v").split(".")[0]) < 22 else []


@pytest.mark.parametrize("given", [False, True])
def test_it_plays_whole_episodes(given: bool) -> None:
    """With Node's own WebSocket, and with a class that is given."""
    which = "WebSocket: class extends globalThis.WebSocket {}" if given else ""
    with served(server_options={"token": TOKEN}) as there:
        ran = run(PLAY % (CLIENT.as_uri(), there.url, TOKEN, which), *options_of_node())
    assert ran.returncode == 0, ran.stderr
    want = [[expected(obs_of(10 * k + n)) for n in range(4) for _ in "ab"] for k in range(5)]
    assert [[int(word) for word in line.split()] for line in ran.stdout.splitlines()] == want


def test_without_a_websocket_it_says_how_to_get_one() -> None:
    script = PLAY % (CLIENT.as_uri(), "ws://127.0.0.1:9/", TOKEN, "")
    ran = run(f"delete globalThis.WebSocket; {script}")
    assert ran.returncode != 0
    assert "start Node 20 with --experimental-websocket" in ran.stderr
    assert "connect(url, { WebSocket })" in ran.stderr
