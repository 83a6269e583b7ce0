"""The file of results: one line per run, written anew after each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .rows import ROWS, Row
from .running import digest_of

Key = tuple[str, int]
Result = dict[str, Any]


def read(path: Path) -> dict[Key, Result]:
    """All runs of a file by row and seed; none if there is no file."""
    if not path.exists():
        return {}
    return {(entry["name"], entry["seed"]): entry for entry in json.loads(path.read_text(encoding="utf-8"))["runs"]}


def write(path: Path, results: dict[Key, Result]) -> None:
    """Replaces the file in one step; in the order of the page."""
    places = {row.name: place for place, row in enumerate(ROWS)}
    kept = sorted((key for key in results if key[0] in places), key=lambda key: (places[key[0]], key[1]))
    lines = ",\n".join(json.dumps(results[key]) for key in kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    temporary.replace(path)


def missing(results: dict[Key, Result], rows: list[Row], seeds: list[int] | None = None) -> list[tuple[Row, int]]:
    """What was not run yet, or with another configuration; of the seeds of the page unless others are given."""
    digests = {row.name: digest_of(row) for row in rows}
    done = {key for key, entry in results.items() if entry["digest"] == digests.get(key[0])}
    return [(row, seed) for row in rows for seed in seeds or row.seeds if (row.name, seed) not in done]
