"""Round data beside the checkpoints, so that a checkpoint directory alone is enough to resume."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from pbrl_lightning.durable import sync_directory, write_atomically
from pbrl_lightning.preferences.round_files import RoundEntry, RoundFileError

MIRROR = "replay"
"""Name of the directory beside the checkpoints."""


def mirror_round(store_directory: Path, entry: RoundEntry, checkpoint_directory: Path) -> None:
    """Keeps a round's bytes beside the checkpoints: once, as a hard link where the file system allows it.

    The name holds the bytes' sha256, because a resumed run may write a round anew that an older checkpoint needs.
    """
    target = checkpoint_directory / MIRROR / _name(entry)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(store_directory / entry.file, target)
        sync_directory(target.parent)
    except OSError:
        data = (store_directory / entry.file).read_bytes()
        write_atomically(target, lambda file: file.write(data))


def places_of_round(store_directory: Path, entry: RoundEntry, checkpoint_directory: Path) -> list[Path]:
    """Where a round's bytes may be: first the replay directory, then the mirrors beside and above a checkpoint.

    A checkpoint's name may put it into sub-folders (that of a metric with slashes does), so the directories above are
    searched too: names hold the bytes' sha256.
    """
    parents = (checkpoint_directory, *checkpoint_directory.parents)
    return [store_directory / entry.file, *(parent / MIRROR / _name(entry) for parent in parents)]


def restore_rounds(store_directory: Path, entries: list[RoundEntry], checkpoint_directory: Path) -> None:
    """Brings back round files that the replay directory has lost, or that were written anew since.

    Raises:
        RoundFileError: If a round is in neither place.
    """
    for entry in entries:
        path, *mirrors = places_of_round(store_directory, entry, checkpoint_directory)
        if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == entry.sha256:
            continue
        source = next((mirror for mirror in mirrors if mirror.exists()), mirrors[0])
        if not source.exists():
            raise RoundFileError(
                f"round {entry.iteration} as the checkpoint knows it is in neither {path} nor {source}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # never write through a hard link
        shutil.copyfile(source, path)


def _name(entry: RoundEntry) -> str:
    return f"{Path(entry.file).stem}-{entry.sha256[:16]}.json"
