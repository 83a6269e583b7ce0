"""The JSON record of a preference pair and the bytes of a round file."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pbrl_lightning.batches import PreferencePair
from pbrl_lightning.utils.errors import ConfigurationError

_TEXT_KEYS = ("prompts", "winner_completions", "loser_completions")
_NUMBER_KEYS = ("winner_reward", "loser_reward", "candidate_reward_mean")
_OPTIONAL_NUMBER_KEYS = ("target_raw_reward", "comparator_raw_reward")


class RoundFileError(ConfigurationError):
    """A round file or record is damaged or does not have the format of one."""


def pair_to_record(pair: PreferencePair) -> dict[str, Any]:
    """The JSON record of a pair: nine keys, plain numbers; token ids stay out.

    Args:
        pair: The pair; its numbers may be anything ``float`` takes (NumPy scalars, one-element tensors, Decimal).

    Returns:
        A dict of lists, strings, floats and None.

    Raises:
        ValueError: If a number is not finite.
    """
    record: dict[str, Any] = {key: list(getattr(pair, key)) for key in _TEXT_KEYS}
    record |= {key: _plain(key, getattr(pair, key)) for key in _NUMBER_KEYS}
    record["raw_rewards"] = [_plain("raw_rewards", value) for value in pair.raw_rewards]
    for key in _OPTIONAL_NUMBER_KEYS:
        value = getattr(pair, key)
        record[key] = None if value is None else _plain(key, value)
    return record


def pair_from_record(record: object, *, file: str | Path, index: int) -> PreferencePair:
    """Check a record and make the pair of it.

    Args:
        record: One entry of a round file's ``pairs``. Unknown keys are ignored; the three raw rewards may be absent
            or null.
        file: Where it stands, for messages.
        index: Its position in the file, for messages.

    Returns:
        The pair, without token ids.

    Raises:
        RoundFileError: If a key is missing, has the wrong type, holds a non-finite number, or the three text lists
            differ in length.
    """
    where = f"{file}, pair {index}"
    if not isinstance(record, dict):
        raise RoundFileError(f"{where}: a pair must be an object, got {describe(record)}")
    missing = [key for key in (*_TEXT_KEYS, *_NUMBER_KEYS) if key not in record]
    if missing:
        raise RoundFileError(f"{where}: `{missing[0]}` is missing; the record has {', '.join(map(str, record))}")
    texts = {key: _texts(where, key, record[key]) for key in _TEXT_KEYS}
    num_agents = len(texts["prompts"])
    for key, values in texts.items():
        if len(values) != num_agents or not values:
            expected = f"{num_agents} texts like `prompts`" if num_agents else "one text per agent"
            raise RoundFileError(f"{where}: `{key}` must have {expected}, got {len(values)}")
    raw = record.get("raw_rewards")
    raw = [] if raw is None else raw
    if not isinstance(raw, list) or len(raw) not in (0, 2):
        raise RoundFileError(f"{where}: `raw_rewards` must be a list of 0 or 2 numbers, got {describe(raw)}")
    optional = {key: record.get(key) for key in _OPTIONAL_NUMBER_KEYS}
    fields: dict[str, Any] = {
        **texts,
        **{key: _number(where, key, record[key]) for key in _NUMBER_KEYS},
        "raw_rewards": [_number(where, "raw_rewards", value) for value in raw],
        **{key: None if value is None else _number(where, key, value) for key, value in optional.items()},
    }
    return PreferencePair(**fields)


def encode_round(path: str | Path, iteration: int, pairs: Sequence[PreferencePair]) -> bytes:
    """A round file's bytes: one pair per line, so that a pair can be read alone."""
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 1:
        raise ValueError(f"`iteration` must be an integer >= 1, got {iteration!r}")
    lines = []
    for index, pair in enumerate(pairs):
        try:
            record = pair_to_record(pair)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RoundFileError(f"{path}, pair {index}: {error}") from error
        pair_from_record(record, file=path, index=index)  # nothing is written that would be refused when read
        lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False))
    body = ",\n".join(lines) + "\n" if lines else ""
    text = f'{{"iteration": {iteration}, "num_pairs": {len(lines)}, "pairs": [\n{body}]}}'
    # A lone surrogate (a cut emoji) has no UTF-8 form; Python's escape for it is JSON's escape too.
    return text.encode("utf-8", errors="backslashreplace")


def decode_round(path: str | Path, data: bytes) -> list[PreferencePair]:
    """Check a round file's bytes and make pairs of them."""
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise RoundFileError(f"{path} is not a whole JSON file: {error}") from error
    if not isinstance(content, dict):
        raise RoundFileError(f"{path} must hold an object, got {describe(content)}")
    for key, kind in (("iteration", int), ("num_pairs", int), ("pairs", list)):
        if key not in content:
            raise RoundFileError(f"{path}: `{key}` is missing")
        if not isinstance(content[key], kind) or isinstance(content[key], bool):
            raise RoundFileError(f"{path}: `{key}` must be of type {kind.__name__}, got {describe(content[key])}")
    if content["num_pairs"] != len(content["pairs"]):
        raise RoundFileError(f"{path}: `num_pairs` is {content['num_pairs']}, but there are {len(content['pairs'])}")
    return [pair_from_record(record, file=path, index=index) for index, record in enumerate(content["pairs"])]


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(items)
    if len(content) != len(items):
        keys = [key for key, _ in items]
        raise ValueError(f"a key stands twice: {next(key for key in keys if keys.count(key) > 1)}")
    return content


def _plain(key: str, value: Any) -> float:
    number = float(value.item() if hasattr(value, "item") else value)
    if not math.isfinite(number):
        raise ValueError(f"`{key}` must be finite, got {number}")
    return number


def _texts(where: str, key: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise RoundFileError(f"{where}: `{key}` must be a list of texts, got {describe(value)}")
    return value


def _number(where: str, key: str, value: object) -> float:
    with contextlib.suppress(OverflowError):  # an integer too large for a float
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise RoundFileError(f"{where}: `{key}` must be a finite number, got {describe(value)}")


def describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
