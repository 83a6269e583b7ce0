"""Task items from lists, files, data sets and callables."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.dataset_items import BUILDERS, PREFIX, checked_object, file_rows, named_rows
from pbrl_lightning.importing import import_object, package_file
from pbrl_lightning.text_gate import encodable
from pbrl_lightning.utils.errors import ConfigurationError, MissingFileError, file_error

Items = str | Iterable[TaskItem] | Callable[[], Iterable[TaskItem]]


def load_items(given: Any, name: str) -> list[TaskItem]:
    """Task items as a list of dicts.

    Args:
        given: A list of dicts, a path to a JSON file (a list) or a JSONL file (also gzipped), a callable that returns
            items, or the import path of one. With the optional ``datasets`` library also a ``Dataset``, the path of a
            Parquet or CSV file, or ``datasets:NAME`` (:func:`pbrl_lightning.dataset_items.named_rows`).
        name: What to call them in errors.

    Raises:
        MissingFileError: If a file does not exist.
        OSError: If it cannot be read.
        ImportError: If ``datasets`` is needed and not installed.
        ConfigurationError: If a file is damaged, there are no items, or one is not a dict; names the index or the line.
    """
    where = f"`{name}`"
    if isinstance(given, (str, Path)):
        if is_file_of_items(given):
            where = f"`{name}` ({given})"
            given = _read(Path(given))
        elif str(given).startswith(PREFIX):
            where = f"`{name}` ({given})"
            given = named_rows(str(given))
        else:
            given = import_object(str(given))
    if callable(given):
        given = given()
    checked_object(given, where)
    if isinstance(given, (str, bytes, dict)) or not isinstance(given, Iterable):
        raise ConfigurationError(f"{where} must be a list of dicts, got {type(given).__name__}")
    items = list(given)
    if not items:
        raise ConfigurationError(f"{where} must hold at least one task item, got none")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ConfigurationError(
                f"{where} must be a list of dicts, but item {index} is {type(item).__name__}: {item!r:.80}"
            )
    return [encodable(item) for item in items]


def source_names(**given: Any) -> dict[str, str]:
    """What to call each of what items and pairs were given as, in Markdown; no path of this machine, and no item.

    Example:
        >>> source_names(items="/home/me/rain.jsonl", eval_items=[{"prompt": "rain"}], pairs=None)
        {'items': 'the file `rain.jsonl`', 'eval_items': 'given in Python'}
    """
    return {name: _source_name(value) for name, value in given.items() if value is not None}


def _source_name(given: Any) -> str:
    if isinstance(given, list | tuple) and given and all(isinstance(entry, str | Path) for entry in given):  # of pairs
        return "; ".join(_source_name(entry) for entry in given)
    if callable(given) and hasattr(given, "__qualname__"):
        return f"given in Python by `{given.__module__}:{given.__qualname__}`"
    if not isinstance(given, (str, Path)):
        return "given in Python" if isinstance(given, list) else f"given in Python as a `{type(given).__name__}`"
    name = str(given)
    if name.startswith(PREFIX) and Path(local := name.removeprefix(PREFIX).partition(":")[0]).expanduser().is_dir():
        return f"the directory `{Path(local).name}`, by the `datasets` library"
    is_path = not name.startswith((PREFIX, "package:")) and (is_file_of_items(name) or "/" in name)
    return f"the file `{Path(name).name}`" if is_path else f"`{name}`"


def is_file_of_items(name: str | Path) -> bool:
    """True if a name ends as files of task items do, whether or not there is such a file."""
    return str(name).endswith((".json", ".jsonl", ".jsonl.gz", *BUILDERS)) and not str(name).startswith(PREFIX)


def resolve_file(path: str | Path) -> str | Path:
    """A path as it is, or the file that ``package:NAME/FILE`` stands for."""
    return package_file(path) if isinstance(path, str) and path.startswith("package:") else path


def _read(path: Path) -> Any:
    if path.suffix in BUILDERS:
        return file_rows(path)
    if not path.exists():
        raise MissingFileError(f"the file of task items {str(path)!r} does not exist")
    try:
        data = path.read_bytes()
    except OSError as error:
        message = f"the file of task items {str(path)!r} cannot be read: {error.strerror}"
        raise file_error(error, message) from error
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigurationError(f"{path} is not a whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"{path}, line {line}: not UTF-8 text: {error.reason}") from error
    if path.suffix == ".json":
        return _decode(text, str(path))
    lines = enumerate(text.split("\n"), 1)
    return [_decode(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _decode(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():  # may be half of a pair, which no tokenizer reads
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ConfigurationError(f"{where}: lists or objects are nested too deeply") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ConfigurationError(f"{where}: not valid text: {half} is half of a pair of surrogates") from error
    except ValueError as error:  # not JSON, or an integer of more digits than Python reads
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from error
    return value
