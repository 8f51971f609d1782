"""marlvec/cli/browser: a page in a headless Chromium plays connect four against a policy that is served here."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import marlvec
from marlvec import Collector, SampleBatch
from marlvec.cli.game import PageServer
from marlvec.connectors import Rows
from marlvec.policies import FunctionPolicy

pytest.importorskip("websockets")
playwright = pytest.importorskip("playwright.sync_api")
external = pytest.importorskip("marlvec.external")

FOLDER = Path(__file__).resolve().parents[2] / "marlvec" / "cli" / "browser"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 60_000  # milliseconds that the page may take for anything
PLAYERS = ("player_0", "player_1")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Not on our terminal."""


@contextmanager
def folder() -> Iterator[str]:
    """Serve the folder, as ``python -m http.server`` does."""
    handler = functools.partial(_Quiet, directory=str(FOLDER))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def browser_page(address: str, width: int = 900, height: int = 860) -> Iterator[Any]:
    """A page in a window of that size; errors in its scripts fail the test."""
    errors: list[str] = []
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(LIMIT)
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.goto(address)
            yield page
        finally:
            browser.close()
    assert errors == []


@contextmanager
def page_at(path: str) -> Iterator[Any]:
    """A page of the folder."""
    with folder() as address, browser_page(address + path) as page:
        yield page


def last_with_room(rows: Rows) -> np.ndarray[Any, Any]:
    """Plays the last column that has room."""
    masks = rows["action_mask"]
    return masks.shape[1] - 1 - masks[:, ::-1].argmax(axis=1)


@contextmanager
def served(episodes: int, token: str | None = None) -> Iterator[tuple[str, Callable[[], SampleBatch]]]:
    """A server for connect four, and somebody who collects so many episodes: the function waits for their rows."""
    rows: list[SampleBatch] = []
    with external.make("connect_four") as envs, external.Server(envs, token=token) as server:
        collector = Collector(envs, FunctionPolicy(last_with_room), "main", seed=0)

        def collect() -> None:
            with suppress(InterruptedError):
                rows.append(collector.collect(episodes=episodes)["main"])

        def finished() -> SampleBatch:
            thread.join(LIMIT / 1000)
            return rows[0]

        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield server.url, finished
        finally:
            envs.gateway.fail(InterruptedError("the test is over"))
            thread.join()


def click(page: Any, column: int) -> None:
    page.click(f"[data-column='{column}']:enabled")


def says(page: Any, text: str) -> None:
    page.wait_for_function("text => document.getElementById('status').textContent === text", arg=text)


def test_a_person_plays_two_games_and_the_batch_is_that_of_the_env_inside(tmp_path: Path) -> None:
    with served(episodes=2) as (url, finished), page_at(f"index.html?url={url}") as page:
        for _ in range(4):
            says(page, "Your turn")
            click(page, 0)
        says(page, "You win!")
        page.click("#again:enabled")
        for _ in range(3):
            says(page, "Your turn")
            page.keyboard.press("1")
        says(page, "The policy wins")
        assert page.inner_text("#wins-you") == page.inner_text("#wins-policy") == "1"
        assert page.locator(".hole.won").count() == 4
        page.screenshot(path=str(tmp_path / "page.png"))
        batch = finished()
    games = ([0, 6, 0, 6, 0, 6, 0], [6, 0, 6, 0, 6, 0, 6])
    k = 0
    for eps_id, moves in zip(np.unique(batch.eps_id), games, strict=True):
        of_game = np.flatnonzero(batch.eps_id == eps_id)
        of_game = of_game[np.argsort(batch["env_t"][of_game], kind="stable")]
        assert batch.actions[of_game].tolist() == moves
        with marlvec.make("connect_four", backend="sync", autoreset_mode="disabled") as envs:
            obs, infos = envs.reset(seed=0)
            for row, move in zip(of_game, moves, strict=True):
                a = batch.agent_index[row]
                assert infos["acting"][0].tolist() == [a == 0, a == 1]
                np.testing.assert_array_equal(batch.obs[row], obs[0, a])
                np.testing.assert_array_equal(batch.action_mask[row], infos["action_mask"][0, a])
                obs, _, terminated, _, infos = envs.step(np.full((1, 2), move))
                k += 1
            assert terminated.all()
            for row in of_game[-2:]:
                np.testing.assert_array_equal(
                    batch.next_obs[row], infos["final_observation"][0, batch.agent_index[row]]
                )
                assert batch.terminated[row]
        winner = len(moves) - 1 & 1
        last = of_game[-2:]
        assert batch.rewards[last].tolist() == [1.0 if batch.agent_index[r] == winner else -1.0 for r in last]
    assert k == len(batch)


def test_the_rules_are_those_of_pettingzoo() -> None:
    rng = np.random.default_rng(0)
    games: list[list[int]] = []
    told: list[Any] = []
    with marlvec.make("connect_four", backend="sync", autoreset_mode="disabled") as envs:
        for _ in range(60):
            obs, infos = envs.reset(seed=0)
            moves, seen, over = [], [], False
            while not over:
                a = int(infos["acting"][0].argmax())
                legal = infos["action_mask"][0, a]
                seen.append([a, legal.tolist(), obs[0, a].ravel().tolist()])
                move = int(rng.choice(np.flatnonzero(legal)))
                moves.append(move)
                obs, rewards, terminated, _, infos = envs.step(np.full((1, 2), move))
                over = bool(terminated.all())
            final = infos["final_observation"][0].reshape(2, -1).tolist()
            games.append(moves)
            told.append([seen, final, int(rewards[0].argmax()) if rewards.any() else None])
    script = """async (games) => {
        const { ConnectFour } = await import("./game.js");
        return games.map((moves) => {
            const game = new ConnectFour();
            const seen = moves.map((move) => {
                if (game.isOver) throw new Error("over too early");
                const now = [game.turn, game.legal(), [...game.observe(game.turn)]];
                game.play(move);
                return now;
            });
            if (!game.isOver) throw new Error("not over");
            return [seen, [[...game.observe(0)], [...game.observe(1)]], game.winner];
        });
    }"""
    with page_at("index.html") as page:
        assert page.evaluate(script, games) == told


def test_a_session_goes_on_after_its_connection_broke() -> None:
    token = external.make_token()
    script = """async ([url, token]) => {
        const { connect } = await import("./marlvec.js");
        const { ConnectFour } = await import("./game.js");
        const client = await connect(url, { token });
        const episode = await client.begin();
        const game = new ConnectFour();
        while (!game.isOver) {
            const agent = client.agents[game.turn];
            const asked = episode.step({ [agent]: game.observe(game.turn) }, { masks: { [agent]: game.legal() } });
            client.socket.close();  // the cable, after the question
            game.play((await asked)[agent]);
        }
        const obs = Object.fromEntries(client.agents.map((agent, k) => [agent, game.observe(k)]));
        await episode.end(obs, { rewards: { player_0: 1, player_1: -1 } });
        const refused = await episode.step({ player_0: game.observe(0) }).catch((error) => error.code);
        const unknown = await episode.step({ nobody: [] }).catch((error) => error.code);
        await client.close();
        const closed = await client.begin().catch((error) => error.code);
        return [game.fields.filter((owner) => owner >= 0).length, refused, unknown, closed];
    }"""
    with served(1, token) as (url, finished), page_at("index.html") as page:
        discs, *codes = page.evaluate(script, [url, token])
        assert codes == ["episode", "value", "closed"]
        batch = finished()
    assert len(batch) == discs
    assert sorted(batch["env_t"].tolist()) == list(range(discs))


def test_missing_or_wrong_token_is_reported() -> None:
    with served(1, external.make_token()) as (url, _), page_at(f"index.html?url={url}") as page:
        says(page, "the server asks for a token")
        page.fill("#token", external.make_token())
        page.click("#settings button")
        says(page, "the token is missing or wrong")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1280, 600), (390, 844), (360, 640), (320, 568)])
def test_the_page_fits_the_window_and_scrolls_nowhere(width: int, height: int) -> None:
    opponent = "main_12, a snapshot of 'main' from step 200,000"
    with served(1) as (url, _), PageServer(opponent, url) as page, browser_page(page.url, width, height) as found:
        says(found, "Your turn")
        assert found.inner_text("#opponent") == opponent
        root = found.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert root[0] <= width
        assert root[1] <= height
