"""Paths in checkpoints: only those of the run's own checkpoint directory are taken over, whoever wrote the file.

Lightning removes the files that a ``ModelCheckpoint`` remembers as soon as it has better ones, and takes what it
remembers from the checkpoint without a check (2.6): one from elsewhere could name any file of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import fsspec  # type: ignore[import-untyped]
import lightning as L
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn

_BY_NAME = ("best_model_path", "kth_best_model_path", "best_k_models", "last_model_path", "dirpath")
"""What a ``ModelCheckpoint`` remembers of files; it only compares the directory with its own."""


def confine_checkpoint_paths(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Drops the paths that checkpoint callbacks would take over and that lead out of their own directories.

    Args:
        trainer: Its callbacks know their directories by now.
        checkpoint: As loaded; its callbacks' states are replaced in place.
    """
    states = checkpoint.get("callbacks")
    if not isinstance(states, dict):
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, Checkpoint):
            continue
        for key in (callback.state_key, callback._legacy_state_key):
            if key in states:
                states[key] = _confined(states[key], callback)


def is_own_checkpoint(path: Any, directory: Any, extension: str = ".ckpt") -> bool:
    """True if a path is that of a checkpoint below a directory, links and ``..`` followed.

    Args:
        path: As a checkpoint names it, whether or not it exists.
        directory: A local directory, or the address of a remote one; None has nothing below it.
        extension: How the names of checkpoints end.

    Example:
        >>> is_own_checkpoint("/runs/a/checkpoints/last.ckpt", "/runs/a/checkpoints")
        True
        >>> is_own_checkpoint("/runs/a/checkpoints/../../b/last.ckpt", "/runs/a/checkpoints")
        False
        >>> is_own_checkpoint("local:///runs/a/checkpoints/last.ckpt", "/runs/a/checkpoints")
        False
    """
    if not isinstance(path, str) or not directory or not path.endswith(extension) or "\0" in path:
        return False
    protocol, outer = path.rpartition("://")[0], str(directory).rpartition("://")[0]
    if protocol != outer or "::" in path or path.startswith("~"):
        return False
    inside, top = path, str(directory)
    if outer:
        try:
            system, top = fsspec.core.url_to_fs(top)
        except (ImportError, ValueError):  # an optional package is missing, as its own use will say
            return False
        inside = system._strip_protocol(inside)
        if not isinstance(system, LocalFileSystem):
            return ".." not in inside.split("/") and inside.startswith(top.rstrip("/") + "/")
    inside, top = os.path.realpath(inside), os.path.realpath(top)
    return inside != top and os.path.commonpath([inside, top]) == top


def _confined(state: Any, callback: Checkpoint) -> dict[str, Any]:
    """What a callback may take over of its saved state."""
    if not isinstance(state, Mapping):
        return {}
    directory, extension = getattr(callback, "dirpath", None), getattr(callback, "FILE_EXTENSION", ".ckpt")
    dropped: list[str] = []

    def own(path: Any) -> bool:
        if path in ("", directory) or is_own_checkpoint(path, directory, extension):
            return True
        dropped.append(str(path))
        return False

    by_name = _BY_NAME if isinstance(callback, ModelCheckpoint) else ()
    kept = {name: value if name in by_name else _inside(value, own) for name, value in state.items()}
    if isinstance(callback, ModelCheckpoint):
        _confine_best(kept, own)
        if "last_model_path" in kept and not own(kept["last_model_path"]):
            kept["last_model_path"] = ""
    if dropped and state.get("dirpath") == directory:  # Lightning says it of a directory that has changed
        rank_zero_warn(
            f"the checkpoint names {dropped[0]!r}{' and others' * (len(set(dropped)) > 1)} as files of this run, which "
            f"are no checkpoints in its directory {str(directory)!r}: they are left alone"
        )
    return kept


def _confine_best(state: dict[str, Any], own: Callable[[Any], bool]) -> None:
    """Drops all best checkpoints together if one is not the run's own: they are compared with each other."""
    best, worst = state.get("best_k_models", {}), state.get("kth_best_model_path", "")
    whole = isinstance(best, Mapping) and (worst == "" or worst in best)
    # Every path is asked for, so that the warning counts them.
    if not all([whole, *[own(path) for path in (best if isinstance(best, Mapping) else ())], own(worst)]):
        state |= {"best_k_models": {}, "kth_best_model_path": "", "best_model_path": ""}
        state.pop("kth_value", None)
    if not own(state.setdefault("best_model_path", "")):
        state["best_model_path"] = ""
    if not state["best_model_path"]:
        state["best_model_score"] = None


def _inside(value: Any, own: Callable[[Any], bool]) -> Any:
    """A value of a callback of the user's own without the paths that lead elsewhere."""
    if isinstance(value, Mapping):
        return {name: _inside(part, own) for name, part in value.items() if not _leads_elsewhere(name, own)}
    if isinstance(value, list | tuple):
        return type(value)(_inside(part, own) for part in value)
    return "" if _leads_elsewhere(value, own) else value


def _leads_elsewhere(value: Any, own: Callable[[Any], bool]) -> bool:
    if not isinstance(value, str):
        return False
    names_place = os.path.isabs(value) or value.startswith("~") or "://" in value or ".." in value.split("/")
    return names_place and not own(value)
