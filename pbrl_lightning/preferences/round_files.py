"""Preference pairs on disk: the record, the round file and the store of a run's rounds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.durable import write_atomically
from pbrl_lightning.preferences._records import (
    RoundFileError,
    decode_round,
    encode_round,
    pair_from_record,
    pair_to_record,
)
from pbrl_lightning.preferences.pair_sources import read_pairs
from pbrl_lightning.utils.errors import ConfigurationError, RunError, file_error

__all__ = [
    "ForeignReplayError",
    "RoundEntry",
    "RoundFileError",
    "RoundStore",
    "owned_by",
    "pair_from_record",
    "pair_to_record",
    "read_pairs",
    "read_round_file",
    "write_round_file",
]

_ROUND_NAME = re.compile(r"iteration_\d+\.json")
_CACHED_ROUNDS = 4


class ForeignReplayError(RunError):
    """The replay directory belongs to another run."""


def write_round_file(path: str | Path, iteration: int, pairs: Sequence[PreferencePair]) -> None:
    """Write a round's pairs so that the file is either the old one or the whole new one.

    Args:
        path: The file. Its directory must exist.
        iteration: Round number, 1-based.
        pairs: The pairs; none is fine.

    Raises:
        RoundFileError: If a pair holds a number that is not finite.
        ConfigurationError: If ``iteration`` is not a positive integer.
        OSError: If the file cannot be written. The old file stays.
    """
    _write(Path(path), encode_round(path, iteration, pairs))


def read_round_file(path: str | Path) -> list[PreferencePair]:
    """Read and check a round file.

    Args:
        path: A file of this library or of CoMLRL.

    Returns:
        Its pairs in order.

    Raises:
        RoundFileError: If the file is damaged (truncated, not JSON, another number of pairs than it says, a key twice)
            or a pair is; the message names the file.
        OSError: If it cannot be read.
    """
    return decode_round(path, Path(path).read_bytes())


@dataclass(frozen=True)
class RoundEntry:
    """One stored round.

    Attributes:
        iteration: Round number, 1-based.
        file: File name inside the replay directory.
        num_pairs: Number of pairs in it.
        sha256: Hex digest of its bytes.
    """

    iteration: int
    file: str
    num_pairs: int
    sha256: str


class RoundStore:
    """The round files of one run, in a directory that no other run writes to.

    Every file is checked against its sha256 before it is used. ``entries`` is the index; it alone decides which
    rounds exist, so files written after the checkpoint that a run resumes from are overwritten, not counted.

    Args:
        directory: The replay directory.
        run_id: The run that owns it, where already known.
    """

    def __init__(self, directory: str | Path, run_id: str | None = None) -> None:
        self.directory = Path(directory)
        self.run_id = run_id
        self.entries: list[RoundEntry] = []
        self._claimed = False
        self._cache: OrderedDict[int, list[PreferencePair]] = OrderedDict()
        # By iteration: what the file looked like when its sha256 was last seen right, and where its lines end.
        self._verified: dict[int, tuple[tuple[int, ...], array[int]]] = {}

    def open(self, run_id: str | None = None) -> None:
        """Create the directory where needed and claim it for this run.

        Args:
            run_id: The run's id; None takes the one given before or loaded from a checkpoint.

        Raises:
            ForeignReplayError: If the directory holds another run's files.
            ConfigurationError: If no run id is known, or another one than before is given.
            OSError: If the directory cannot be made or written to.
        """
        run_id = run_id or self.run_id
        if not run_id:
            raise ConfigurationError("`run_id` must be a non-empty text, got none")
        if self.run_id not in (None, run_id):
            raise ConfigurationError(f"`run_id` must be {self.run_id!r} as before, got {run_id!r}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            owner = self._read_owner()
            if owner is None:
                self._refuse_unowned_rounds()
                _write(self.directory / "run.json", json.dumps({"run_id": run_id}).encode(), exclusive=True)
                owner = self._read_owner()
            elif owner != run_id and not self._round_names():
                # A run that died in its first collection has nothing here to lose.
                _write(self.directory / "run.json", json.dumps({"run_id": run_id}).encode())
                owner = self._read_owner()
            if not os.access(self.directory, os.W_OK):
                raise PermissionError("no permission to write")
        except OSError as error:
            message = f"`replay_dir` must be a directory that can be written to, got {self.directory}: {error}"
            raise file_error(error, message) from error
        if owner != run_id:
            raise ForeignReplayError(
                f"`replay_dir` {self.directory} belongs to run {owner!r}, not to this run {run_id!r}; choose another "
                "`replay_dir`, remove that directory, or resume its run from a checkpoint"
            )
        self.run_id, self._claimed = run_id, True

    def write(self, iteration: int, pairs: Sequence[PreferencePair]) -> RoundEntry:
        """Store a round; index entries of the same and later rounds are dropped.

        Args:
            iteration: Round number, 1-based.
            pairs: Its pairs; none is fine.

        Returns:
            The new entry.

        Raises:
            RuntimeError: If the store is not open.
            RoundFileError: If a pair cannot be written.
            OSError: If the file cannot be written; file and index stay as they were.
        """
        if not self._claimed:
            raise RuntimeError(f"the round store of {self.directory} must be opened before it is written to")
        if self._read_owner() not in (None, self.run_id):
            raise ForeignReplayError(f"`replay_dir` {self.directory} was taken over by another run meanwhile")
        path = self.directory / f"iteration_{iteration:04d}.json"
        data = encode_round(path, iteration, pairs)
        _write(path, data)
        entry = RoundEntry(iteration, path.name, len(pairs), hashlib.sha256(data).hexdigest())
        self.entries = [old for old in self.entries if old.iteration < iteration] + [entry]
        for later in [known for known in {*self._cache, *self._verified} if known >= iteration]:
            self._cache.pop(later, None)
            self._verified.pop(later, None)
        self._verified[iteration] = (_stamp(path), _line_ends(data))
        return entry

    def read(self, iteration: int) -> list[PreferencePair]:
        """All pairs of a round. The list is shared with later calls: do not change it.

        Args:
            iteration: Round number, 1-based.

        Returns:
            Its pairs in order.

        Raises:
            ConfigurationError: If the round is not in the index.
            RoundFileError: If its file is missing or its bytes are not those that were written.
        """
        entry = self._entry(iteration)
        self._verify(entry)
        if iteration not in self._cache:
            path = self.directory / entry.file
            self._cache[iteration] = decode_round(path, path.read_bytes())
        self._cache.move_to_end(iteration)
        while len(self._cache) > _CACHED_ROUNDS:
            self._cache.popitem(last=False)
        return self._cache[iteration]

    def fetch(self, selection: Sequence[tuple[int, int]]) -> list[PreferencePair]:
        """The pairs that a replay buffer selected, parsing no others.

        The cost follows the number of pairs fetched, not the size of the history: after a file's bytes were checked
        once, a pair is read from its own line.

        Args:
            selection: ``(iteration, pair index)``, in any order, with repetitions.

        Returns:
            One pair per entry, aligned.

        Raises:
            ConfigurationError: If a round or pair does not exist.
            RoundFileError: If a file is missing or its bytes are not those that were written.
        """
        found: dict[tuple[int, int], PreferencePair] = {}
        for iteration, wanted in groupby(sorted(set(selection)), key=itemgetter(0)):
            entry = self._entry(iteration)
            ends = self._verify(entry)
            path = self.directory / entry.file
            with path.open("rb") as file:
                for _, index in wanted:
                    if not 0 <= index < entry.num_pairs:
                        raise ConfigurationError(f"the pair index must be from 0 to {entry.num_pairs - 1}, got {index}")
                    file.seek(ends[index] + 1)
                    line = file.read(ends[index + 1] - ends[index] - 1).rstrip(b",")
                    found[iteration, index] = pair_from_record(json.loads(line), file=path, index=index)
        return [found[key] for key in selection]

    def state_dict(self) -> dict[str, Any]:
        """The index in plain containers."""
        return {"run_id": self.run_id, "entries": [asdict(entry) for entry in self.entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over an index and the run it belongs to.

        Args:
            state: What ``state_dict`` gave.

        Raises:
            ForeignReplayError: If the store was opened by another run before.
            RoundFileError: If an entry does not name a round file.
        """
        if self._claimed and state["run_id"] != self.run_id:
            raise ForeignReplayError(
                f"`replay_dir` {self.directory} was opened by run {self.run_id!r}, the checkpoint is of run "
                f"{state['run_id']!r}; load the checkpoint before the store is opened"
            )
        entries = [RoundEntry(**entry) for entry in state["entries"]]
        for entry in entries:
            # Files are written under these names: a checkpoint from elsewhere must not lead out of the directory.
            if not _ROUND_NAME.fullmatch(entry.file) or not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
                raise RoundFileError(f"the checkpoint names {entry.file!r}, which is no round file of this library")
        self.run_id, self.entries = state["run_id"], entries
        self._cache.clear()
        self._verified.clear()

    def _entry(self, iteration: int) -> RoundEntry:
        for entry in self.entries:
            if entry.iteration == iteration:
                return entry
        known = ", ".join(str(entry.iteration) for entry in self.entries) or "no round yet"
        raise ConfigurationError(f"`iteration` must be a stored round ({known}), got {iteration}")

    def _verify(self, entry: RoundEntry) -> array[int]:
        """Check the file's sha256 unless it is untouched since the last check; gives the ends of its lines."""
        path = self.directory / entry.file
        try:
            stamp = _stamp(path)
            if entry.iteration not in self._verified or self._verified[entry.iteration][0] != stamp:
                self._cache.pop(entry.iteration, None)
                data = path.read_bytes()
                if hashlib.sha256(data).hexdigest() != entry.sha256:
                    raise RoundFileError(f"{path} was changed since it was stored (its sha256 differs)")
                self._verified[entry.iteration] = (stamp, _line_ends(data))
        except OSError as error:
            raise RoundFileError(f"{path} of round {entry.iteration} cannot be read: {error}") from error
        return self._verified[entry.iteration][1]

    def _read_owner(self) -> str | None:
        """The run id in ``run.json``; None without that file."""
        path = self.directory / "run.json"
        if not path.exists():
            return None
        with contextlib.suppress(ValueError):
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("run_id"), str):
                return content["run_id"]
        raise ForeignReplayError(f"{path} must hold a `run_id`, and does not; choose another `replay_dir` or remove it")

    def _round_names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if _ROUND_NAME.fullmatch(path.name))

    def _refuse_unowned_rounds(self) -> None:
        rounds = self._round_names()
        if rounds:
            raise ForeignReplayError(
                f"`replay_dir` {self.directory} holds round files of an unknown run ({rounds[0]} …, no run.json); "
                "choose another `replay_dir` or remove it"
            )


def owned_by(directory: Path, run_id: str) -> bool:
    """True if a directory is the replay directory of this run."""
    with contextlib.suppress(OSError, ForeignReplayError):
        return RoundStore(directory)._read_owner() == run_id
    return False


def _write(path: Path, data: bytes, exclusive: bool = False) -> None:
    write_atomically(path, lambda file: file.write(data), exclusive=exclusive)


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _line_ends(data: bytes) -> array[int]:
    return array("Q", (match.start() for match in re.finditer(b"\n", data)))
