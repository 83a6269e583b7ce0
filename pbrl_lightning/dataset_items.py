"""Task items from the optional ``datasets`` library: by name, from files that it reads, and from its objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, MissingPackageError

PREFIX: Final = "datasets:"
"""What the name of a data set begins with."""

BUILDERS: Final = {".parquet": "parquet", ".csv": "csv"}
"""File endings that are left to the library, and what it calls them."""


def named_rows(source: str, split: str = "train") -> Iterable[Any]:
    """The rows of the data set that ``datasets:NAME``, ``…:CONFIGURATION`` or ``…:CONFIGURATION:SPLIT`` names.

    Args:
        source: ``NAME`` is one of the Hugging Face hub, or a local directory: of data files, or what a data set's
            ``save_to_disk`` wrote. ``CONFIGURATION`` may be empty. ``SPLIT`` may be a part, such as ``train[:1000]``.
        split: Taken where the source names none.

    Raises:
        ImportError: If ``datasets`` is not installed.
        MissingFileError: If there is no such directory.
        ConfigurationError: If the library cannot load it; its words follow.
    """
    name, _, rest = source.removeprefix(PREFIX).partition(":")
    configuration, _, part = rest.partition(":")
    directory = Path(name).expanduser()
    if not name or ((Path(name).is_absolute() or name[0] in ".~") and not directory.is_dir()):
        raise MissingFileError(f"{source!r} must name a data set of the hub or a directory: {name!r} is neither")
    library = _library(source)
    try:
        if (directory / "dataset_dict.json").exists():
            return library.load_from_disk(str(directory))[part or split]
        if (directory / "state.json").exists():
            return library.load_from_disk(str(directory))
        name = str(directory) if directory.is_dir() else name
        return library.load_dataset(name, configuration or None, split=part or split)
    except Exception as error:  # of many kinds: no network, no such name, split or configuration
        raise ConfigurationError(f"{source!r} cannot be loaded: {error}") from error


def file_rows(path: Path) -> Iterable[Any]:
    """The rows of a file that is left to the library.

    Raises:
        MissingFileError: If it does not exist.
        ImportError: If ``datasets`` is not installed.
        ConfigurationError: If the library cannot read it; its words follow.
    """
    if not path.exists():
        raise MissingFileError(f"the file of task items {str(path)!r} does not exist")
    library = _library(str(path))
    try:
        return library.load_dataset(BUILDERS[path.suffix], data_files=str(path), split="train")
    except Exception as error:
        raise ConfigurationError(f"{str(path)!r} cannot be loaded: {error}") from error


def checked_object(given: Any, where: str) -> Any:
    """What was given, unless it is an object of the library that has no rows to be counted and picked.

    Raises:
        ConfigurationError: If it is a stream, or several splits; says what to do.
    """
    library = sys.modules.get("datasets")  # who gives one has imported it
    if library is None or not hasattr(library, "IterableDataset"):
        return given
    if isinstance(given, (library.IterableDataset, library.IterableDatasetDict)):
        raise ConfigurationError(
            f"{where} must be a data set with a length, and this one is streamed: items are drawn by their index, "
            "round after round. Load it without `streaming=True`, or give its head, `list(stream.take(1000))`"
        )
    if isinstance(given, library.DatasetDict):
        splits = ", ".join(map(repr, given)) or "none"
        raise ConfigurationError(
            f"{where} must be one split of a data set, such as `data['train']`; this one has: {splits}"
        )
    return given


def _library(source: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingPackageError(
            f"{source!r} needs the `datasets` library: pip install 'pbrl-lightning[datasets]', or give the path of a "
            "JSONL file"
        ) from error
