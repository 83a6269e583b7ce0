"""Task items from lists, files and callables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pbrl_lightning.batches import TaskItem
from pbrl_lightning.importing import import_object, package_file

Items = str | Iterable[TaskItem] | Callable[[], Iterable[TaskItem]]


def load_items(given: Any, name: str) -> list[TaskItem]:
    """Task items as a list of dicts.

    Args:
        given: A list of dicts, a path to a JSON file (a list) or a JSONL file, a callable that returns items, or the
            import path of one.
        name: What to call them in errors.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If there are no items, or one is not a dict; names the index or the line.
    """
    where = f"`{name}`"
    if isinstance(given, (str, Path)):
        path = Path(given)
        if path.suffix in (".json", ".jsonl"):
            where = f"`{name}` ({path})"
            given = _read(path)
        else:
            given = import_object(str(given))
    if callable(given):
        given = given()
    if isinstance(given, (str, bytes, dict)) or not isinstance(given, Iterable):
        raise ValueError(f"{where} must be a list of dicts, got {type(given).__name__}")
    items = list(given)
    if not items:
        raise ValueError(f"{where} must hold at least one task item, got none")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(
                f"{where} must be a list of dicts, but item {index} is {type(item).__name__}: {item!r:.80}"
            )
    return items


def resolve_file(path: str | Path) -> str | Path:
    """A path as it is, or the file that ``package:NAME/FILE`` stands for."""
    return package_file(path) if isinstance(path, str) and path.startswith("package:") else path


def _read(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"the file of task items {str(path)!r} does not exist")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from error
    items = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                items.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not valid JSON: {error}") from error
    return items
