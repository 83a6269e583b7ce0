"""A remote model for the runs against one: letters by chance, in the `generic` format of the comparators' page.

Alone: ``python benchmarks/results_parts/server.py 8000``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LETTERS = "abcd"


class LetterServer(ThreadingHTTPServer):
    """Answers each role with one of four letters; which one depends on nothing but what was asked, and how often."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._asked: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.server_address[1]}/generate"

    def answers(self, request: dict[str, Any]) -> list[str]:
        """As many letters as were asked for."""
        key = (request["prompt"], request["agent_idx"])
        with self._lock:
            self._asked[key] += 1
            asked = self._asked[key]
        drawn = hashlib.sha256(json.dumps([*key, asked]).encode()).digest()
        return [LETTERS[drawn[index % 32] % len(LETTERS)] for index in range(request["num_return_sequences"])]


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self) -> None:
        """Reads and answers it."""
        assert isinstance(self.server, LetterServer)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"completions": self.server.answers(request)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@contextmanager
def serving() -> Iterator[str]:
    """The URL of a server for the time of the block, on a free port."""
    server = LetterServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    LetterServer(int(sys.argv[1])).serve_forever()
