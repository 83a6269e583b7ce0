"""The peer in a process of its own, asked one thing at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCRIPT = Path(__file__).with_name("comlrl_peer.py")


class Peer:
    """CoMLRL, run by its own interpreter; idle while nothing is asked of it.

    Args:
        python: The interpreter.
        directory: Where the model lies.
        threads: Threads of its torch.
    """

    def __init__(self, python: str, directory: str, threads: int) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}
        command = [python, str(SCRIPT), directory, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True, env=environment
        )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Its answer to one request.

        Raises:
            RuntimeError: If it died; what it said stands on stderr.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the peer died at {what!r}")
        return json.loads(answer)

    def seconds(self, what: str, **arguments: Any) -> float:
        """How long it took over something."""
        return float(self.ask(what, **arguments)["seconds"])

    def close(self) -> None:
        """Ends its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
