"""`PageServer`: serves the connect four page over HTTP, on this machine only, with the opponent's name."""

from __future__ import annotations

import html
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from marlvec.serialization.saved import ProcessBound

__all__ = ["PageServer", "page_of"]

FOLDER = Path(__file__).resolve().parent.parent / "browser"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HOSTS = ("127.0.0.1", "localhost")
_URL = 'data-url="ws://127.0.0.1:8765/"'
_BEGIN, _END = '<span id="opponent">', "</span>"


def page_of(opponent: str, url: str) -> str:
    """Return the page's HTML, "You against ``opponent``", for the policy server at ``url``, ``ws://…``."""
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    before, _, rest = text.replace(_URL, f'data-url="{html.escape(url)}"').partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{html.escape(opponent)}{_END}{after}"


class PageServer(ProcessBound):
    """Serves the page from a thread until closed; use it in a ``with`` block.

    It answers only requests to 127.0.0.1 and localhost: a foreign page whose name resolves to this machine (DNS
    rebinding) receives nothing.
    """

    def __init__(self, opponent: str, url: str) -> None:
        files = {f"/{path.name}": path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
        files["/"] = files["/index.html"] = page_of(opponent, url).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.partition("?")[0]
                found = files.get(name)
                status = 200 if found is not None else 404
                if self.headers.get("Host", "").rpartition(":")[0] not in _HOSTS:
                    status, found = 403, None
                self.send_response(status)
                kind = _TYPES.get(Path(name).suffix, _TYPES[".html"])
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(found or b"")))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(found or b"")

            def log_message(self, *args: Any) -> None:
                """Discard log lines, which would clutter the player's terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="marlvec page", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def close(self) -> None:
        if not self._is_forked:  # a fork has no thread that would answer
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._check_process("with PageServer")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
