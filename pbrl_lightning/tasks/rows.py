"""Rows of files and data sets, as the ready tasks take them."""

from __future__ import annotations

import itertools
import json
from importlib.resources import files

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.data_items import is_file_of_items, load_items
from pbrl_lightning.dataset_items import PREFIX, named_rows
from pbrl_lightning.utils.errors import ConfigurationError


def load_rows(source: str, split: str = "train", limit: int | None = None) -> list[TaskItem]:
    """The rows of a file, or of a data set of the Hugging Face hub.

    Args:
        source: A file or ``datasets:NAME`` as in :func:`pbrl_lightning.data_items.load_items`.
        split: Split of the data set, where ``source`` names none; a file has only one.
        limit: Number of leading rows, None for all.

    Raises:
        MissingFileError: If the file does not exist.
        ImportError: If ``datasets`` is needed and not installed.
        ConfigurationError: If there are no rows, one is not a dict, or ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise ConfigurationError(f"`limit` must be None or at least 1, got {limit}")
    if source.startswith(PREFIX):
        return load_items([dict(row) for row in itertools.islice(named_rows(source, split), limit)], source)
    if not is_file_of_items(source):
        raise ConfigurationError(
            f"`source` must be a file of JSON, JSONL, Parquet or CSV, or 'datasets:NAME', got {source!r}"
        )
    return load_items(source, "source")[:limit]


def packaged_rows(name: str) -> list[TaskItem]:
    """The rows of a small JSONL file that comes with the package; ``tasks/data/SOURCES.md`` says where it is from."""
    text = (files(__package__) / "data" / name).read_text(encoding="utf-8")
    # Not `splitlines`, which also breaks at characters JSON allows inside a string.
    return [json.loads(line) for line in text.split("\n") if line]
