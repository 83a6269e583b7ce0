"""Rows of a data set from JSON, JSONL (also gzipped) or the optional ``datasets`` library."""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.data_items import load_items

_DATASETS: Final = "datasets:"


def load_rows(source: str, split: str = "train", limit: int | None = None) -> list[TaskItem]:
    """The rows of a file, or of a data set of the Hugging Face hub.

    Args:
        source: A path to ``.json``, ``.jsonl`` or ``.jsonl.gz``, or ``datasets:NAME`` (with a configuration:
            ``datasets:NAME:CONFIGURATION``), which needs ``pip install 'pbrl-lightning[datasets]'`` and, unless the
            data set is in its cache, the network.
        split: Split of the data set; a file has only one.
        limit: Number of leading rows, None for all.

    Raises:
        FileNotFoundError: If the file does not exist.
        ImportError: If ``datasets`` is needed and not installed.
        ValueError: If there are no rows, one is not a dict, or ``limit`` is below 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be None or at least 1, got {limit}")
    if source.startswith(_DATASETS):
        name, _, configuration = source.removeprefix(_DATASETS).partition(":")
        rows = _datasets().load_dataset(name, configuration or None, split=split)
        return load_items([dict(row) for row in itertools.islice(rows, limit)], source)
    if source.endswith(".gz"):
        with gzip.open(source, "rt", encoding="utf-8") as lines:
            return load_items([json.loads(line) for line in lines if line.strip()], source)[:limit]
    if Path(source).suffix not in (".json", ".jsonl"):
        raise ValueError(f"`source` must be a .json, .jsonl or .jsonl.gz file or 'datasets:NAME', got {source!r}")
    return load_items(source, "source")[:limit]


def packaged_rows(name: str) -> list[TaskItem]:
    """The rows of a small JSONL file that comes with the package; ``tasks/data/SOURCES.md`` says where it is from."""
    text = (files(__package__) / "data" / name).read_text(encoding="utf-8")
    # Not `splitlines`, which also breaks at characters JSON allows inside a string.
    return [json.loads(line) for line in text.split("\n") if line]


def _datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            "a source 'datasets:NAME' needs the `datasets` library: pip install 'pbrl-lightning[datasets]', or give "
            "the path of a JSONL file"
        ) from error
