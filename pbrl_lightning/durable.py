"""Files that are whole or not there: written under a temporary name, synced, renamed, and the directory synced."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from pbrl_lightning.timing import spending

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]


@spending("saving")
def write_atomically(path: Path, write: Callable[[IO[bytes]], object], *, exclusive: bool = False) -> None:
    """Writes a file so that there is either the old one or the whole new one, also after a loss of power.

    Args:
        path: The file. Its directory must exist.
        write: Fills the file that it is given.
        exclusive: An existing file stays.

    Raises:
        OSError: If it cannot be written. The old file stays.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file, held(temporary):
            write(file)
            file.flush()
            os.fsync(file.fileno())
            file.close()  # Windows renames no open file
            if exclusive:
                # A link fails where the name exists, so of two runs that start at once only one gets it.
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return
                except OSError:  # a file system without links
                    os.replace(temporary, path)
            else:
                os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def held(path: Path) -> Iterator[Literal["mine", "busy", "unknown"]]:
    """Locks a file or directory for as long as this process works on it; the system drops the lock of a killed one.

    Yields:
        Whether the lock is this process's now, another's, or cannot be had here.
    """
    if fcntl is None:
        yield "unknown"
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state: Literal["mine", "busy", "unknown"] = "mine"
        except BlockingIOError:
            state = "busy"
        except OSError:  # a network file system without locks
            state = "unknown"
        yield state
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable."""
    if os.name == "nt":  # Windows cannot open a directory
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
