"""The page of `marlvec play --browser`: what it serves, to whom, and what it shows as text."""

from __future__ import annotations

import http.client
import urllib.parse

import pytest

from marlvec.cli.game import PageServer

NAME = '<img src=x onerror="alert(1)">&'


def ask(page: PageServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    """Status and body of one request; the path goes as it is."""
    there = urllib.parse.urlsplit(page.url)
    connection = http.client.HTTPConnection(str(there.hostname), there.port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", (host or "127.0.0.1:{}").format(there.port))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def test_it_serves_its_files_and_no_others() -> None:
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        for path in ("/", "/index.html", "/marlvec.js", "/page.js", "/game.js", "/style.css", "/?a=b"):
            assert ask(page, path)[0] == 200, path
        for path in (
            "/README.md",
            "/../page_server.py",
            "/%2e%2e/page_server.py",
            "//etc/passwd",
            "/etc/passwd",
            "http://x/",
        ):
            assert ask(page, path) == (404, ""), path
        assert ask(page, "/", method="POST")[0] == 501


@pytest.mark.parametrize("host", ["evil.example:{}", "127.0.0.1.evil.example:{}", "evil.example", "localhost.:{}", ""])
def test_names_that_are_made_to_lead_here_get_nothing(host: str) -> None:
    with PageServer("random", "ws://127.0.0.1:8765/") as page:
        assert ask(page, "/", host) == (403, "")
        assert ask(page, "/", "localhost:{}")[0] == 200


def test_names_are_text() -> None:
    """Of the opponent, and the url."""
    with PageServer(NAME, 'ws://x/"><script>') as page:
        _, text = ask(page, "/")
    assert "<img" not in text
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;" in text
    assert 'data-url="ws://x/&quot;&gt;&lt;script&gt;"' in text
