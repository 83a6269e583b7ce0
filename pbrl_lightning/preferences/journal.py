"""What a round's collection has brought so far: on disk before anything is built on it."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from pbrl_lightning.batches import Response, TeamSample
from pbrl_lightning.durable import sync_directory
from pbrl_lightning.text_gate import encodable
from pbrl_lightning.timing import spending

Key = tuple[str | int, ...]


class CollectionJournal:
    """Texts, ids and scores of one round's collection, appended as they arrive.

    A collection that is started again under the same name finds what an earlier one brought, and asks only for the
    rest. Every process, and every start, has a file of its own and reads those that are there; a line that a crash cut
    short is passed over.

    Args:
        directory: Of this collection; None keeps everything in memory (a trial run).
        rank: This process.
    """

    def __init__(self, directory: Path | None, rank: int = 0) -> None:
        self.directory = directory
        self._rank = rank
        self._entries: dict[Key, Any] = {}
        self._files: list[Path] = []
        self._file: BinaryIO | None = None
        for path in sorted(directory.glob("rank_*.jsonl")) if directory is not None else []:
            self._files.append(path)
            self._entries.update(_read(path))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __getitem__(self, key: Key) -> Any:
        return self._entries[key]

    def take(self, key: Key) -> Any:
        """A value that is not needed here again; the disk keeps it."""
        return self._entries.pop(key)

    def add(self, entries: Iterable[tuple[Key, Any]]) -> None:
        """Keeps what arrived, on disk when this returns; it can be looked up.

        Args:
            entries: Keys and values; values are plain JSON data with finite numbers.

        Raises:
            OSError: If it cannot be written.
        """
        added = dict(entries)
        self.write(added.items())
        self._entries.update(added)

    @spending("saving")
    def write(self, entries: Iterable[tuple[Key, Any]]) -> None:
        """As :meth:`add`, for values that only a restarted collection will look up."""
        lines = [json.dumps([list(key), value], allow_nan=False) + "\n" for key, value in entries]
        if self.directory is None or not lines:
            return
        if self._file is None:
            self._file = self._new_file(self.directory)
        try:
            self._file.write("".join(lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except BaseException:
            self._drop_file()  # nothing is written behind half a line
            raise

    def _new_file(self, directory: Path) -> BinaryIO:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank_{self._rank}-{uuid.uuid4().hex[:12]}.jsonl"
        file = path.open("xb")
        self._files.append(path)
        sync_directory(directory)
        return file

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        """Ends the collection: the file stays, what was kept in memory does not."""
        self._drop_file()
        self._entries.clear()

    def remove(self) -> None:
        """Removes what this journal read or wrote, and the directories that are empty then."""
        self.close()
        for path in self._files:
            path.unlink(missing_ok=True)
        if self.directory is not None:
            for directory in (self.directory, self.directory.parent):
                with contextlib.suppress(OSError):
                    directory.rmdir()


def sample_to_json(sample: TeamSample) -> dict[str, Any]:
    """A team sample as plain JSON data."""
    return {
        "prompts": sample.prompts,
        "prompt_ids": sample.prompt_ids,
        "responses": [
            [[index, said.text, said.token_ids, said.finished] for index, said in responses.items()]
            for responses in sample.responses
        ],
        "joint_tokens": sample.joint_tokens,
    }


def sample_from_json(item_index: int, data: dict[str, Any]) -> TeamSample:
    """What :func:`sample_to_json` gave."""
    responses = [
        {index: Response(encodable(text), ids, finished) for index, text, ids, finished in entries}
        for entries in data["responses"]
    ]
    return TeamSample(item_index, encodable(data["prompts"]), responses, data["prompt_ids"], data["joint_tokens"])


def _read(path: Path) -> dict[Key, Any]:
    entries: dict[Key, Any] = {}
    # What follows the last newline is half a line; any other that does not read is asked for again too.
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            key, value = json.loads(line)
            entries[tuple(key)] = value
    return entries
