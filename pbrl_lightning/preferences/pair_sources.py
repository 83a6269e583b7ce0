"""Preference pairs from files, data sets of the ``datasets`` library, lists and callables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.data_items import is_file_of_items, resolve_file
from pbrl_lightning.dataset_items import BUILDERS, PREFIX, checked_object, file_rows, named_rows
from pbrl_lightning.importing import import_object
from pbrl_lightning.preferences._records import RoundFileError, decode_round, describe
from pbrl_lightning.preferences.text_pairs import Render, check_same_agents, pair_from_row, read_pair_lines
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError

Place: TypeAlias = tuple[str, PreferencePair]
"""Where a pair was found, for messages, and the pair."""


def read_pairs(given: Any, render: Render | None = None, *, name: str = "pairs") -> list[PreferencePair]:
    """Reads preference pairs, in the given order.

    Each pair is a record or TRL's ``prompt``, ``chosen`` and ``rejected``
    (:func:`pbrl_lightning.preferences.text_pairs.read_pair_lines`).

    Args:
        given: One of these, or a list of several of the first three: a file (a round file, ``.json`` with a list of
            pairs, ``.jsonl``, ``.jsonl.gz``, and with the optional ``datasets`` library ``.parquet`` and ``.csv``; also
            ``package:NAME/FILE``); ``datasets:NAME``
            (:func:`pbrl_lightning.dataset_items.named_rows`); a ``datasets.Dataset``; a list of dicts or of
            PreferencePairs; a callable that returns any of these, or its import path.
        render: Makes text of the messages of conversational pairs; None writes them plainly.
        name: What to call the option in errors.

    Returns:
        The pairs, at least one.

    Raises:
        ConfigurationError: If what is given is none of these, names a file twice, or holds no pair.
        MissingFileError: If files do not exist; the message names them all.
        ImportError: If ``datasets`` is needed and not installed.
        RoundFileError: If a file is damaged, a pair has a missing or mistyped key, or a pair is of another number of
            agents than the first one.
    """
    return read_sources(pair_sources(given, name), render, name=name)


def read_sources(sources: Sequence[Any], render: Render | None = None, *, name: str = "pairs") -> list[PreferencePair]:
    """The pairs of what :func:`pair_sources` gave; otherwise as :func:`read_pairs`."""
    _check_files([Path(source) for source in sources if _is_file(source)], name)
    places = [place for source in sources for place in _places(source, render, name)]
    if not places:
        listed = ", ".join(str(source) for source in sources if isinstance(source, str | Path))
        raise ConfigurationError(f"`{name}` must hold at least one pair, got none{f' in {listed}' if listed else ''}")
    check_same_agents(places)
    return [pair for _, pair in places]


def pair_sources(given: Any, name: str) -> list[Any]:
    """What pairs were given as, as a list of files, names of data sets, and rows; a callable is called here.

    Nothing is read. What can be iterated over only once becomes a list, so that the sources can be read again.

    Raises:
        ConfigurationError: If there is nothing that could hold pairs.
    """
    if isinstance(given, str | Path):
        return _named_sources(given, name)
    if callable(given):
        return pair_sources(given(), name)
    checked_object(given, f"`{name}`")
    if isinstance(given, dict | bytes | PreferencePair) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"`{name}` must be a file, `{PREFIX}NAME`, a list of these, a `datasets.Dataset` or a list of dicts, "
            f"got {describe(given)}"
        )
    if not isinstance(given, Sequence) and hasattr(given, "__len__") and hasattr(given, "__getitem__"):
        return [given]  # a data set, whose rows are read when they are needed
    entries = list(given)
    if not entries:
        raise ConfigurationError(f"`{name}` must name at least one file or hold at least one pair, got an empty list")
    rows = [isinstance(entry, dict | PreferencePair) for entry in entries]
    if all(rows):
        return [entries]
    if any(rows):
        odd = rows.index(not rows[0])
        raise ConfigurationError(
            f"`{name}` must list either files or pairs, but `{name}[0]` is {describe(entries[0])} and "
            f"`{name}[{odd}]` is {describe(entries[odd])}"
        )
    for index, entry in enumerate(entries):
        if not isinstance(entry, str | Path) and not hasattr(entry, "column_names"):
            raise ConfigurationError(f"`{name}[{index}]` must be a file or a pair, got {describe(entry)}")
    return [source for entry in entries for source in pair_sources(entry, name)]


def _named_sources(given: str | Path, name: str) -> list[Any]:
    """A file, a data set, or what an import path stands for."""
    text = str(given)
    if isinstance(given, Path) or text.startswith((PREFIX, "package:")):
        return [resolve_file(given)]
    parts = text.replace(":", ".").split(".")
    is_path = is_file_of_items(text) or Path(text).expanduser().exists()
    if not is_path and len(parts) > 1 and all(part.isidentifier() for part in parts):
        return pair_sources(import_object(text), name)
    return [text]


def _is_file(source: Any) -> bool:
    return isinstance(source, Path) or (isinstance(source, str) and not source.startswith(PREFIX))


def _check_files(files: list[Path], name: str) -> None:
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise MissingFileError(f"`{name}` must name existing files, got {', '.join(missing)}")
    resolved = [file.resolve() for file in files]
    twice = [str(file) for position, file in enumerate(files) if resolved[position] in resolved[:position]]
    if twice:
        raise ConfigurationError(f"`{name}` must name each file once, got {', '.join(twice)} again")


def _places(source: Any, render: Render | None, name: str) -> Iterable[Place]:
    """The pairs of one source."""
    if not isinstance(source, str | Path):
        return _rows(source, f"`{name}`", render, "pair" if isinstance(source, list) else "row")
    if not _is_file(source):
        return _rows(checked_object(named_rows(str(source)), f"`{name}` ({source})"), str(source), render)
    path = Path(source)
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return read_pair_lines(path, render)
    if path.suffix in BUILDERS:
        return _rows(file_rows(path), str(path), render)
    data = path.read_bytes()
    if data.lstrip()[:1] == b"[":
        try:
            listed = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise RoundFileError(f"{path} is not a whole JSON file: {error}") from error
        return _rows(listed, str(path), render, "pair")
    return [(f"{path}, pair {index}", pair) for index, pair in enumerate(decode_round(path, data))]


def _rows(rows: Iterable[Any], where: str, render: Render | None, word: str = "row") -> Iterator[Place]:
    for index, row in enumerate(rows):
        place = f"{where}, {word} {index}"
        if isinstance(row, PreferencePair):
            yield place, row
            continue
        if word == "row" and isinstance(row, dict):  # a table has every column in every row
            row = {key: value for key, value in row.items() if value is not None}
        yield place, pair_from_row(place, row, render)
